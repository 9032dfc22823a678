"""The robust rules against hand-derived numbers and plain numpy, and what they have in common."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.federation import robust
from fedx_pl.federation.aggregate import Aggregator, BadUpdate, FedAvg
from fedx_pl.federation.options import AggregateOptions
from fedx_pl.federation.robust import MEDIAN, MultiKrum, NormClipping, TrimmedMean, make_rule
from fedx_pl.federation.round import GlobalState

ROBUST = ("clip", "median", "trimmed", "krum")


def fold(
    rule: Aggregator, values: Sequence[object], images: Sequence[int] = (), name: str = "w"
) -> list[float]:
    """Adds one client per value and gives back the resulting tensor as a list."""
    for client, value in enumerate(values):
        rule.add({name: torch.tensor(value)}, images[client] if images else 1, client)
    return rule.result()[name].flatten().tolist()


ZERO = {"w": torch.zeros(1)}


# --- median and trimmed mean ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0, 1.0, 100.0], 5.0),  # odd: the middle one
        ([4.0, 1.0, 100.0, 2.0], 3.0),  # even: (2 + 4) / 2
        ([1.0, 9.0, 1.0, 1.0], 1.0),  # ties
        ([1.0, 4.0], 2.5),  # nothing can be left out
        ([7.0], 7.0),
    ],
)
def test_the_median_is_the_middle_or_the_mean_of_the_middle_two(
    values: list[float], expected: float
) -> None:
    assert fold(TrimmedMean(ZERO, MEDIAN), [[value] for value in values]) == [expected]


def test_each_value_has_its_own_median() -> None:
    """(1, 30), (2, 10), (3, 20): 2 is the second client's, 20 the third's."""
    assert fold(
        TrimmedMean({"w": torch.zeros(2)}, MEDIAN), [[1.0, 30.0], [2.0, 10.0], [3.0, 20.0]]
    ) == [2.0, 20.0]


@pytest.mark.parametrize(
    ("trim", "values", "expected"),
    [
        (0.2, [1.0, 2.0, 3.0, 7.0, 1000.0], 4.0),  # one of five at either end: (2 + 3 + 7) / 3
        (0.1, [1.0, 2.0, 3.0, 7.0, 1000.0], 4.0),  # half a client is one
        (0.3, [-9.0, 1.0, 2.0, 4.0, 6.0, 99.0], 3.0),  # 1.8 are two: (2 + 4) / 2
        (0.4, [5.0, 1.0, 100.0], 5.0),  # 1.2 would be two and leave none
        (0.1, [1.0, 4.0], 2.5),
        (0.0, [1.0, 2.0, 6.0], 3.0),  # the plain mean
    ],
)
def test_the_trimmed_mean_leaves_the_ends_out(
    trim: float, values: list[float], expected: float
) -> None:
    assert fold(TrimmedMean(ZERO, trim), [[value] for value in values]) == [expected]


def test_seven_percent_of_a_hundred_are_seven() -> None:
    """In floating point 0.07 * 100 is more than 7.

    Values 1 to 100 squared: the mean of 8^2 to 93^2.
    """
    expected = sum(i * i for i in range(8, 94)) / 86
    assert fold(TrimmedMean(ZERO, 0.07), [[float(i * i)] for i in range(1, 101)]) == [
        pytest.approx(expected)
    ]


def test_for_median_and_trimmed_mean_all_clients_count_alike() -> None:
    """A client's number of images is only its claim."""
    values, images = [[1.0], [2.0], [30.0]], [1, 1, 9_000_000]
    assert (
        fold(TrimmedMean(ZERO, MEDIAN), values, images)
        == fold(TrimmedMean(ZERO, 0.1), values, images)
        == [2.0]
    )


def test_medians_of_counters_are_rounded_as_means_of_counters_are() -> None:
    """(10 + 13) / 2 = 11.5 rounds to the even neighbor; so does FedAvg."""
    reference = {"bn.num_batches_tracked": torch.tensor(0)}
    for rule in (TrimmedMean(reference, MEDIAN), FedAvg(reference)):
        assert fold(rule, [10, 13], name="bn.num_batches_tracked") == [12]


def test_a_median_in_chunks_is_numpy_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers all shapes that occur.

    Convolutions in channels_last, vectors, scalars, empty tensors, half precision.
    """
    monkeypatch.setattr(robust, "_CHUNK", 64)
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "conv": (6, 5, 3, 3),
        "vector": (131,),
        "scalar": (),
        "empty": (0, 4),
        "matrix": (3, 40),
    }
    reference = {name: torch.zeros(shape) for name, shape in shapes.items()}
    reference["conv"] = reference["conv"].contiguous(memory_format=torch.channels_last)
    reference["half"] = torch.zeros(17, dtype=torch.bfloat16)
    updates = [
        {
            name: (torch.zeros_like(t) + torch.randn(t.shape, generator=draw)).to(t.dtype)
            for name, t in reference.items()
        }
        for _ in range(6)
    ]
    median, trimmed = TrimmedMean(reference, MEDIAN), TrimmedMean(reference, 0.2)
    for client, update in enumerate(updates):
        median.add(update, 1, client)
        trimmed.add(update, 1, client)
    for name in reference:
        values = np.stack([update[name].double().numpy() for update in updates])
        kept = np.sort(values, axis=0)[2:-2]
        for rule, expected in ((median, np.median(values, axis=0)), (trimmed, kept.mean(axis=0))):
            found = rule.result()[name]
            assert found.dtype == reference[name].dtype
            assert torch.equal(found, torch.from_numpy(np.asarray(expected)).to(found.dtype))
    assert median.result()["conv"].is_contiguous(memory_format=torch.channels_last)


# --- norm clipping --------------------------------------------------------------------------------


def test_a_long_change_is_clipped_to_the_bound_in_its_direction() -> None:
    """Norms 5, 5 and 1000, so the bound is 2 * 5: (600, 800) becomes (6, 8).

    With 1, 1 and 2 images: (3 + 0 + 2 * 6) / 4 = 3.75 and (4 + 5 + 2 * 8) / 4 = 6.25.
    """
    rule = NormClipping({"w": torch.zeros(2)}, clip=2)
    assert fold(rule, [[3.0, 4.0], [0.0, 5.0], [600.0, 800.0]], [1, 1, 2]) == [3.75, 6.25]
    assert rule.remarks == {2: "the change of its weights was clipped from norm 1e+03 to 10"}


def test_the_change_is_measured_from_the_global_state() -> None:
    """From 10: ways 1, 2 and 1000; the median is 2 and the bound 3: (11 + 12 + 13) / 3 = 12."""
    assert fold(
        NormClipping({"w": torch.tensor([10.0])}, clip=1.5), [[11.0], [12.0], [1010.0]]
    ) == [12.0]


def test_of_an_even_number_the_smaller_middle_norm_is_the_median() -> None:
    """Of norms 1 and 100 either may be the attacker's.

    The mean of the two would let 100 pass half of it.
    """
    assert fold(NormClipping(ZERO, clip=1), [[1.0], [100.0]]) == [1.0]


def test_clipping_changes_nothing_if_nobody_is_far_off() -> None:
    """Norms 1, 2, 3: the bound is 4."""
    rule, mean, values = NormClipping(ZERO, clip=2), FedAvg(ZERO), [[1.0], [-2.0], [3.0]]
    assert fold(rule, values, [3, 1, 7]) == fold(mean, values, [3, 1, 7])
    assert rule.remarks == {}


def test_an_attack_on_the_weights_does_not_hide_behind_larger_statistics() -> None:
    """Weights move by 1, statistics by 100.

    50 would pass a bound of 2 * 100; it is clipped to 2, the rest stays.
    """
    reference = {"conv.weight": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    rule = NormClipping(reference, clip=2)
    for client, weight in enumerate((1.0, 1.0, 50.0)):
        rule.add(
            {"conv.weight": torch.tensor([weight]), "bn.running_mean": torch.tensor([100.0])},
            1,
            client,
        )
    result = rule.result()
    assert result["conv.weight"].item() == pytest.approx(4 / 3)
    assert result["bn.running_mean"].item() == 100
    assert list(result) == list(reference)


def test_what_clients_send_to_a_regularizer_is_clipped_towards_zero() -> None:
    """Such a tensor is a change already.

    1, 1 and 100 with the bound 2 make 4/3, whatever the server's own value (5) is.
    """
    reference = {"server/w": torch.tensor([5.0])}
    assert fold(
        NormClipping(reference, 2, changes=["server/w"]), [[1.0], [1.0], [100.0]], name="server/w"
    ) == [pytest.approx(4 / 3)]


def test_the_largest_numbers_are_clipped_without_loss() -> None:
    """3e38 squared is no float32; the clipped update must be 2, not what is left of 3e38 - 3e38."""
    assert fold(NormClipping(ZERO, clip=2), [[1.0], [1.0], [3e38]]) == [pytest.approx(4 / 3)]


def test_a_round_in_which_nothing_moves_stays_where_it_is() -> None:
    assert fold(NormClipping({"w": torch.ones(1)}, clip=2), [[1.0], [1.0], [5.0]]) == [1.0]


# --- multi-Krum -----------------------------------------------------------------------------------


def test_krum_leaves_out_clients_without_neighbors() -> None:
    """With n = 5, f = 1, a score is the sum of the two smallest squared distances.

    At 0: 1 + 4 = 5. At 1: 1 + 1 = 2. At 2: 2. At 3: 5. At 100: 97^2 + 98^2 = 19013. The mean of the
    four best by images: (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / 10 = 2.
    """
    rule = MultiKrum(ZERO, byzantine=1)
    assert fold(rule, [[0.0], [1.0], [2.0], [3.0], [100.0]], [1, 2, 3, 4, 1000]) == [2.0]
    assert rule.remarks == {4: "krum left out its weights"}


def test_krum_counts_only_the_nearest() -> None:
    """With n = 6, f = 1 there are three neighbors.

    The pair at 50 is close to itself but has no third: 0 + 47^2 + 48^2.

    Scores at 0, 1, 2, 3: 14, 6, 6, 14. At 50: 0 + 2209 + 2304 = 4513, twice: the later of the two
    is left out, and (0 + 1 + 2 + 3 + 50) / 5 = 11.2. Against two that collude f must be 2, and a
    round needs 7.
    """
    values = [[0.0], [1.0], [2.0], [3.0], [50.0], [50.0]]
    assert fold(MultiKrum(ZERO, byzantine=1), values) == [pytest.approx(11.2)]
    # n = 7, f = 2: again three neighbors, five are kept: (0 + 1 + 2 + 3 + 4) / 5.
    assert fold(MultiKrum(ZERO, byzantine=2), [[4.0], *values]) == [2.0]


def test_of_equal_scores_the_later_client_is_left_out_in_whatever_order_they_came() -> None:
    """-10 and 10 both have 100 + 100 to the zeros: client 4 goes, (-10 + 0 + 0 + 0) / 4 = -2.5."""
    values = dict(enumerate((-10.0, 0.0, 0.0, 0.0, 10.0)))
    for order in itertools.permutations(values):
        rule = MultiKrum(ZERO, byzantine=1)
        for client in order:
            rule.add({"w": torch.tensor([values[client]])}, 1, client)
        assert rule.result()["w"].item() == -2.5


def test_krum_without_bad_clients_is_fedavg() -> None:
    values, images = [[1.0], [5.0], [1000.0]], [1, 2, 3]
    assert fold(MultiKrum(ZERO, byzantine=0), values, images) == fold(FedAvg(ZERO), values, images)


def test_krum_selects_weights_and_statistics_apart() -> None:
    """Client 0 is off in its weights, client 4 in its much larger statistics.

    Each is left out where it is off.
    """
    reference = {"conv.weight": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    rule = MultiKrum(reference, byzantine=1)
    for client, (weight, mean) in enumerate(
        [(9.0, 100.0), (1.0, 200.0), (1.0, 300.0), (1.0, 400.0), (1.0, 5000.0)]
    ):
        rule.add(
            {"conv.weight": torch.tensor([weight]), "bn.running_mean": torch.tensor([mean])},
            1,
            client,
        )
    result = rule.result()
    assert (result["conv.weight"].item(), result["bn.running_mean"].item()) == (1, 250)
    assert rule.remarks == {0: "krum left out its weights", 4: "krum left out its statistics"}


@pytest.mark.parametrize("byzantine", [1, 2, 3])
def test_krum_is_numpy_s(byzantine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine clients, two tensors: scores from a plain double loop over concatenated vectors."""
    monkeypatch.setattr(robust, "_CHUNK", 100)
    rng = np.random.default_rng(byzantine)
    reference = {"a": torch.zeros(20, 3), "b": torch.zeros(11)}
    updates = [
        {name: rng.normal(size=t.shape).astype(np.float32) for name, t in reference.items()}
        for _ in range(9)
    ]
    images = rng.integers(1, 100, 9).tolist()
    rule = MultiKrum(reference, byzantine)
    for client, update in enumerate(updates):
        rule.add(
            {name: torch.from_numpy(values) for name, values in update.items()},
            images[client],
            client,
        )
    vectors = [
        np.concatenate([update["a"].ravel(), update["b"]]).astype(np.float64) for update in updates
    ]
    scores = []
    for i, one in enumerate(vectors):
        distances = sorted(np.sum((one - other) ** 2) for j, other in enumerate(vectors) if j != i)
        scores.append(sum(distances[: 9 - byzantine - 2]))
    best = np.argsort(scores)[: 9 - byzantine]
    expected = np.average(
        [updates[i]["a"] for i in best], axis=0, weights=[images[i] for i in best]
    )
    np.testing.assert_allclose(rule.result()["a"].numpy(), expected, rtol=1e-6)


def test_krum_says_how_many_updates_it_needs() -> None:
    with pytest.raises(
        UserError, match=r"^byzantine=1 .*needs 5 good updates, and there are 4.*rule=median"
    ):
        fold(MultiKrum(ZERO, byzantine=1), [[0.0]] * 4)


# --- what all have in common ----------------------------------------------------------------------


def of(rule: str, reference: dict[str, torch.Tensor]) -> Aggregator:
    return make_rule(AggregateOptions(rule=rule, max_growth=0), GlobalState(weights=reference))


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_arrival_does_not_matter(rule: str) -> None:
    draw = torch.Generator().manual_seed(0)
    updates = [{"w": torch.randn(300, generator=draw) * scale} for scale in (1, 1.1, 0.9, 1, 50)]
    results = []
    for order in itertools.permutations(range(5)):
        aggregator = of(rule, {"w": torch.full((300,), 0.1)})
        for client in order:
            aggregator.add(updates[client], 10 + client, client)
        results.append(aggregator.result()["w"])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("rule", ROBUST)
def test_a_bad_update_is_refused_and_leaves_the_rest_as_it_was(rule: str) -> None:
    aggregator = of(rule, ZERO)
    for client in range(5):
        aggregator.add({"w": torch.ones(1)}, 10, client)
    for bad, images in (
        ({"w": torch.tensor([math.nan])}, 1),
        ({}, 1),
        ({"w": torch.ones(1)}, 10**9),
    ):
        with pytest.raises(BadUpdate):
            aggregator.add(bad, images, 5)
    assert (aggregator.num_clients, aggregator.num_images, aggregator.result()["w"].item()) == (
        5,
        50,
        1,
    )


@pytest.mark.parametrize("rule", ROBUST)
def test_no_updates_no_result(rule: str) -> None:
    with pytest.raises(ValueError, match="no update"):
        of(rule, ZERO).result()


@given(
    st.sampled_from(("mean", *ROBUST)),
    st.floats(0, 1e6, width=32),
    st.lists(
        st.tuples(st.floats(0, 1e6, width=32), st.integers(1, 10_000)), min_size=5, max_size=9
    ),
)
def test_no_rule_makes_a_variance_negative_or_leaves_the_clients_range(
    rule: str, start: float, clients: list[tuple[float, int]]
) -> None:
    """Clipping moves towards the global state, so that one is in the range, too."""
    aggregator = of(rule, {"bn.running_var": torch.tensor([start])})
    for client, (value, images) in enumerate(clients):
        aggregator.add({"bn.running_var": torch.tensor([value])}, images, client)
    found, values = (
        aggregator.result()["bn.running_var"].item(),
        [start, *(value for value, _ in clients)],
    )
    assert found >= 0
    assert min(values) * (1 - 1e-6) <= found <= max(values) * (1 + 1e-6)


# --- the configuration ----------------------------------------------------------------------------


def test_a_rule_has_a_short_name_and_shows_in_the_run_s() -> None:
    assert compose(["aggregate=median"]).aggregate.rule == "median"
    assert "-median-" in compose(["aggregate=median"]).run_name
    assert compose([]).aggregate == AggregateOptions()
    assert type(make_rule(AggregateOptions(), GlobalState(weights=ZERO))) is FedAvg


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["aggregate=average"], "aggregate=average is not known; type one of mean, clip"),
        (["aggregate.clip=0"], "aggregate.clip=0"),
        (["aggregate.clip=nan"], "aggregate.clip=nan"),
        (
            ["aggregate.trim=0.5"],
            r"aggregate.trim=0.5 is not possible; type a number of at least 0 and below 0.5",
        ),
        (["aggregate.byzantine=-1"], "aggregate.byzantine=-1"),
        (["aggregate.max_images=0"], "aggregate.max_images=0"),
        (
            ["aggregate.max_share=0"],
            r"aggregate.max_share=0.0 is not possible; type a number above 0 and of at most 1",
        ),
        (["aggregate.max_share=nan"], "aggregate.max_share=nan"),
        (["aggregate.quarantine=-1"], "aggregate.quarantine=-1"),
        (
            ["aggregate=krum", "aggregate.byzantine=2", "federation.min_clients=6"],
            "type federation.min_clients=7",
        ),
    ],
)
def test_impossible_values_say_what_to_type(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(["profile=paper", *overrides])


def test_a_repaired_client_can_be_asked_again_in_the_same_run() -> None:
    """The quarantine is therefore not part of a run's hash."""
    assert compose([]).run_name == compose(["aggregate.quarantine=0"]).run_name
    assert compose([]).content() == compose(["aggregate.quarantine=0"]).content()


def test_a_bound_of_the_share_is_part_of_a_run_and_no_bound_leaves_names_as_they_were() -> None:
    """Runs that are older than the key have content and hash without it."""
    assert "max_share" not in compose([]).content()["aggregate"]
    assert compose(["aggregate.max_share=1"]).run_name == compose([]).run_name
    assert compose(["aggregate.max_share=0.5"]).hash != compose([]).hash
