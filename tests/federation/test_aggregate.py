"""FedAvg against hand-derived numbers, and what it refuses."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedx_pl.federation.aggregate import BadUpdate, FedAvg, counted
from fedx_pl.federation.options import AggregateOptions
from fedx_pl.federation.robust import make_rule
from fedx_pl.federation.round import GlobalState


def state(value: float, steps: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 2), float(value)), "bn.num_batches_tracked": torch.tensor(steps)}


def test_the_mean_is_weighted_by_images() -> None:
    """(1 * 100 + 4 * 300) / 400 = 3.25."""
    average = FedAvg(state(0))
    average.add(state(1.0), 100)
    average.add(state(4.0), 300)
    assert average.result()["w"].flatten().tolist() == [3.25] * 4


def test_weights_belong_to_the_clients_that_took_part_and_sum_to_one() -> None:
    """Clients 1 and 3 of four (sizes 10, 20, 30, 40).

    (20 a + 40 b) / 60, not shares of the whole 100.
    """
    average = FedAvg(state(0))
    average.add(state(3.0), 20)
    average.add(state(6.0), 40)
    assert average.result()["w"][0, 0].item() == pytest.approx(5.0)


def test_huge_but_finite_values_are_not_infinity() -> None:
    """Their float32 sum overflows, their mean does not."""
    average = FedAvg(state(0))
    average.add(state(3e38), 1)
    assert average.result()["w"].isfinite().all()


def test_integer_buffers_keep_their_dtype() -> None:
    average = FedAvg(state(0))
    average.add(state(0, steps=10), 1)
    average.add(state(0, steps=13), 1)
    tracked = average.result()["bn.num_batches_tracked"]
    assert tracked.dtype == torch.int64
    assert tracked.item() == 12  # 11.5 rounds to the even neighbor


def test_the_order_of_arrival_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [({"w": torch.randn(1000, generator=generator)}, n) for n in (17, 4999, 250, 1)]
    results = []
    for order in itertools.permutations(updates):
        average = FedAvg({"w": torch.zeros(1000)})
        for update, images in order:
            average.add(update, images)
        results.append(average.result()["w"])
    assert all(torch.equal(result, results[0]) for result in results)


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 10_000)), min_size=1, max_size=8
    )
)
def test_the_mean_lies_between_the_clients(clients: list[tuple[float, int]]) -> None:
    average = FedAvg({"w": torch.zeros(1)})
    for value, images in clients:
        average.add({"w": torch.tensor([value])}, images)
    values = [value for value, _ in clients]
    tolerance = 1e-3
    assert min(values) - tolerance <= average.result()["w"].item() <= max(values) + tolerance


def test_half_precision_weights_are_accumulated_wide() -> None:
    """2048 + 1 is 2048 in float16.

    A running sum in half precision would lose every second update.
    """
    average = FedAvg({"w": torch.zeros(1, dtype=torch.float16)})
    for _ in range(4096):
        average.add({"w": torch.ones(1, dtype=torch.float16)}, 1)
    assert average.result()["w"].item() == 1.0


@pytest.mark.parametrize(
    ("bad", "images", "reason"),
    [
        (
            {
                "w": torch.tensor([[float("nan"), 0], [0, 0]]),
                "bn.num_batches_tracked": torch.tensor(0),
            },
            1,
            "NaN",
        ),
        (
            {"w": torch.full((2, 2), float("inf")), "bn.num_batches_tracked": torch.tensor(0)},
            1,
            "infinity",
        ),
        ({"w": torch.zeros(2, 2)}, 1, "missing, e.g. bn.num_batches_tracked"),
        ({**state(0), "extra": torch.zeros(1)}, 1, "unknown, e.g. extra"),
        ({**state(0), "w": torch.zeros(3)}, 1, r"w has shape \(3,\)"),
        ({**state(0), "w": torch.zeros(2, 2, dtype=torch.float64)}, 1, "float64"),
        (state(0), 0, "0 images"),
        (state(0), -5, "-5 images"),
        (state(0), 10_000_001, "10000001 images, possible are 1 to 10000000"),
        (state(0), 1.5, "1.5 images"),
        (state(0), True, "True images"),
        (state(0), float("nan"), "nan images"),
    ],
)
def test_a_bad_update_is_refused_and_leaves_the_average_as_it_was(
    bad: dict[str, torch.Tensor], images: int, reason: str
) -> None:
    average = FedAvg(state(0))
    average.add(state(2.0), 10)
    with pytest.raises(BadUpdate, match=reason):
        average.add(bad, images)
    assert average.num_clients == 1
    assert average.result()["w"][0, 0].item() == 2.0


def test_a_claim_of_too_many_images_is_refused() -> None:
    average = FedAvg(state(0), max_images=100)
    average.add(state(1), 100)
    with pytest.raises(BadUpdate, match="101 images, possible are 1 to 100"):
        average.add(state(1), 101)


def test_a_negative_variance_is_refused_by_name() -> None:
    """BatchNorm takes its root: one negative value makes NaN of every image.

    Zero and -0 are not negative.
    """
    names = ("conv.weight", "a.running_var", "b.running_var")
    average = FedAvg({name: torch.ones(3) for name in names})
    average.add({name: torch.tensor([0.0, -0.0, 1.0]) for name in names}, 1)
    average.add({name: torch.ones(3) for name in names} | {"conv.weight": -torch.ones(3)}, 1)
    with pytest.raises(BadUpdate, match=r"b\.running_var holds negative variances"):
        average.add(
            {name: torch.ones(3) for name in names}
            | {"b.running_var": torch.tensor([1.0, -1e-3, 1.0])},
            1,
        )
    assert average.num_clients == 2


def test_an_empty_average_says_so() -> None:
    with pytest.raises(ValueError, match="no update"):
        FedAvg(state(0)).result()


def test_the_plain_mean_refuses_an_update_that_is_far_too_long() -> None:
    """Weights (3, 4) have length 5.

    (30, 40) is ten times as long; (9, 12), three times, is just let in. BatchNorm's statistics do
    not count.
    """
    reference = {"w": torch.tensor([3.0, 4.0]), "bn.running_var": torch.ones(1)}
    average = make_rule(AggregateOptions(), GlobalState(weights=reference))
    with pytest.raises(
        BadUpdate, match=r"its weights are 10 times as long, aggregate.max_growth=3"
    ):
        average.add({"w": torch.tensor([30.0, 40.0]), "bn.running_var": torch.ones(1)}, 1)
    average.add({"w": torch.tensor([9.0, 12.0]), "bn.running_var": torch.full((1,), 1e6)}, 1)
    assert average.num_clients == 1


# --- weights that are no longer the global ones, statistics and counters that cannot be -----------


WEIGHTS = {"backbone.w": torch.tensor([3.0, 4.0]), "head.w": torch.tensor([12.0])}


def times(backbone: float, head: float = 1.0) -> dict[str, torch.Tensor]:
    return {"backbone.w": WEIGHTS["backbone.w"] * backbone, "head.w": WEIGHTS["head.w"] * head}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (times(-2, -2), "its weights kept -2 of the global ones, possible is 0.01 or more"),
        (times(-1, -1), "its weights kept -1 "),
        (times(0.001, 0.001), "its weights kept 0.001 "),
        (times(1e-45, 1e-45), "its weights kept 1.*e-45 "),
        (
            times(0.001),
            "its backbone kept 0.001 ",
        ),  # (0.001 * 25 + 144) / 169 of all: the head hides it.
        (
            {"backbone.w": torch.tensor([-4.0, 3.0]), "head.w": torch.zeros(1)},
            "its weights kept 0 ",
        ),  # replaced
    ],
)
def test_weights_that_were_shrunk_reversed_or_replaced_are_refused(
    bad: dict[str, torch.Tensor], reason: str
) -> None:
    rule = make_rule(AggregateOptions(), GlobalState(weights=WEIGHTS))
    rule.add(times(1.1, 0.9), 1)
    rule.add(
        {"backbone.w": torch.tensor([10.0, 4.0]), "head.w": torch.tensor([12.0])}, 1
    )  # turned and lengthened
    with pytest.raises(BadUpdate, match=reason):
        rule.add(bad, 1)
    assert rule.num_clients == 2
    make_rule(AggregateOptions(max_growth=0), GlobalState(weights=WEIGHTS)).add(bad, 1)


def test_a_regularizer_s_changes_may_point_anywhere() -> None:
    """SCAFFOLD's control variates are not weights."""
    state = GlobalState(weights=WEIGHTS, server={"w": torch.ones(2)})
    rule = make_rule(AggregateOptions(), state)
    rule.add(GlobalState(weights=WEIGHTS, server={"w": -torch.ones(2)}).tensors(), 1)
    assert rule.num_clients == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("bn.running_mean", 3e38, r"bn\.running_mean holds 3e\+38, possible is 1e\+06"),
        ("bn.running_mean", -2e6, r"bn\.running_mean holds 2e\+06, possible is 1e\+06"),
        ("bn.running_var", 2e12, r"bn\.running_var holds 2e\+12, possible is 1e\+12"),
        ("bn.num_batches_tracked", 2**62, r"bn\.num_batches_tracked moved by more than"),
        ("bn.num_batches_tracked", -(2**63), r"bn\.num_batches_tracked moved by more than"),
    ],
)
def test_statistics_that_would_never_be_forgotten_are_refused_by_name(
    name: str, value: float, reason: str
) -> None:
    good = {
        "bn.running_mean": torch.full(
            (4,), 9e5
        ),  # Of four, the norm is 18e5: no single one is too large.
        "bn.running_var": torch.full((4,), 9e11),
        "bn.num_batches_tracked": torch.tensor(10**6),
    }
    average = FedAvg({key: torch.zeros_like(tensor) for key, tensor in good.items()})
    average.add(good, 1)
    with pytest.raises(BadUpdate, match=reason):
        average.add(good | {name: torch.full_like(good[name], value)}, 1)
    assert average.num_clients == 1


# --- the share of one client ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "share", "expected"),
    [
        ([300, 100, 10_000_000], 0.5, [300, 100, 400]),  # As many as all others together.
        ([300, 100, 200], 0.5, [300, 100, 200]),  # Just half of 600.
        ([1, 10_000_000], 0.5, [1, 1]),
        ([7], 0.5, [7]),
        ([10, 90, 100, 200], 0.3, [10, 30, 30, 30]),  # c = 0.3 * (3 c + 10), so 30.
        ([10, 20, 10_000_000], 0.3, [10, 10, 10]),  # A third is more than 0.3: all alike.
        ([5, 6, 10_000_000], 1.0, [5, 6, 10_000_000]),
    ],
)
def test_no_client_counts_for_more_than_its_share(
    images: list[int], share: float, expected: list[int]
) -> None:
    assert list(counted(dict(enumerate(images)), share).values()) == expected


def test_a_name_that_a_client_made_up_is_shown_as_one_short_line() -> None:
    with pytest.raises(BadUpdate, match="1 tensors are unknown") as refused:
        FedAvg(state(0)).add(state(0) | {"\x1b[2J\n" * 10_000: torch.zeros(1)}, 1)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


def test_a_layer_that_goes_straight_back_is_refused_and_one_that_goes_sideways_is_not() -> None:
    """`a` has a tenth of the length of `b`: of all weights together nearly everything is kept."""
    reference = {"a": torch.full((4, 4), 3.0), "b": torch.full((4, 4), 30.0)}
    rule = make_rule(AggregateOptions(), GlobalState(weights=reference))
    for factor in (-2.0, 0.0):
        with pytest.raises(BadUpdate, match=f"its a kept {factor:g} of the global ones"):
            rule.add(reference | {"a": factor * reference["a"]}, 1)
    sideways = torch.tensor([12.0, -12.0]).repeat(4, 2)
    rule.add(reference | {"a": sideways - 0.1 * reference["a"]}, 1)  # As noise may do.
    small = {"a": torch.full((4, 4), 0.1), "b": torch.full((4, 4), 30.0)}
    rule = make_rule(AggregateOptions(), GlobalState(weights=small))
    rule.add(small | {"a": -2 * small["a"]}, 1)  # It may have begun at zero.


@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=9), st.floats(0.01, 1))
def test_shares_are_kept_as_far_as_they_can_be(images: list[int], share: float) -> None:
    """They are kept within one image; a client below its share is not changed."""
    found = counted(dict(enumerate(images)), share)
    assert all(1 <= found[client] <= claimed for client, claimed in enumerate(images))
    if share * len(images) >= 1:
        assert max(found.values()) <= share * sum(found.values()) * (1 + 1e-6) + 1
    if max(images) <= share * sum(images):
        assert list(found.values()) == images


@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_a_claim_of_ten_million_images_counts_for_half(rule: str) -> None:
    """Values 1, 1 and 3 with 300, 100 and 400 images: (400 + 1200) / 800 = 2.

    With the claimed number it would be 3.
    """
    made = make_rule(
        AggregateOptions(rule=rule, max_share=0.5), GlobalState(weights={"w": torch.tensor([2.0])})
    )
    for client, (value, images) in enumerate([(1.0, 300), (1.0, 100), (3.0, 10_000_000)]):
        made.add({"w": torch.tensor([value])}, images, client)
    assert made.result()["w"].item() == made.result()["w"].item() == 2.0
    assert made.remarks == {2: "its 10,000,000 images count as 400, aggregate.max_share=0.5"}
