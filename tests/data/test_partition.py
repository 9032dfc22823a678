import json
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedx_pl.config.schema import PartitionOptions
from fedx_pl.data import dealing, split_file
from fedx_pl.data.images import ImageData, Split
from fedx_pl.errors import UserError

quick = settings(max_examples=60)
SEEDS = st.integers(0, 2**32)
LABELS = hnp.arrays(
    np.int64, st.integers(1, 120), elements=st.sampled_from([-1, 0, 3, 4, 7, 10**12])
)
BETAS = st.sampled_from([1e-300, 1e-6, 0.05, 0.5, 100.0, 1e12, 1e308])


def assert_partition(split: list[np.ndarray], num_images: int, clients: int) -> None:
    assert len(split) == clients
    assert all(
        len(part) > 0 and part.dtype == np.int64 and (np.diff(part) > 0).all() for part in split
    )
    assert np.array_equal(np.sort(np.concatenate(split)), np.arange(num_images))


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert len(first) == len(second)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def deal(options, labels, groups, *, clients, seed=0, fingerprint="", num_images=100):
    images = Split(np.zeros((num_images, 1, 1, 1), np.uint8), labels, groups)
    data = ImageData(
        name="test",
        train=images,
        test=None,
        classes=(),
        group_names=(),
        source="here",
        fingerprint=fingerprint,
    )
    return options.made(clients).deal(data, seed)


def class_mix(labels: np.ndarray, split: list[np.ndarray]) -> np.ndarray:
    """(clients, classes) share of each class within a client."""
    counts = np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in split])
    return counts / counts.sum(axis=1, keepdims=True)


@quick
@given(num_images=st.integers(1, 200), data=st.data(), seed=SEEDS)
def test_iid_deals_everything_in_equal_parts(num_images, data, seed):
    clients = data.draw(st.integers(1, num_images))
    split = dealing.iid(num_images, clients, seed)
    assert_partition(split, num_images, clients)
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert_same(split, dealing.iid(num_images, clients, seed))


@pytest.mark.filterwarnings("ignore:in each of")
@quick
@given(labels=LABELS, data=st.data(), beta=BETAS, min_size=st.integers(0, 30), seed=SEEDS)
def test_dirichlet_always_ends_with_a_partition_and_the_minimum_size(
    labels, data, beta, min_size, seed
):
    clients = data.draw(st.integers(1, len(labels)))
    split = dealing.dirichlet(labels, clients, beta, seed, min_size)
    assert_partition(split, len(labels), clients)
    assert min(map(len, split)) >= min(min_size, len(labels) // clients)
    assert_same(split, dealing.dirichlet(labels, clients, beta, seed, min_size))


@pytest.mark.filterwarnings("ignore:in each of")
@quick
@given(
    num_images=st.integers(1, 200),
    data=st.data(),
    beta=BETAS,
    min_size=st.integers(0, 30),
    seed=SEEDS,
)
def test_quantity_skew_always_ends_with_a_partition_and_the_minimum_size(
    num_images, data, beta, min_size, seed
):
    clients = data.draw(st.integers(1, num_images))
    split = dealing.quantity_skew(num_images, clients, beta, seed, min_size)
    assert_partition(split, num_images, clients)
    assert min(map(len, split)) >= min(min_size, num_images // clients)
    assert_same(split, dealing.quantity_skew(num_images, clients, beta, seed, min_size))


@quick
@given(classes=st.integers(1, 12), clients=st.integers(1, 15), data=st.data(), seed=SEEDS)
def test_classes_per_client_keeps_to_k_classes_and_shares_each_evenly(classes, clients, data, seed):
    k = data.draw(st.integers(-(-classes // clients), classes))
    # 15 images of a class or more: enough for every possible owner
    labels = np.repeat(
        np.arange(classes) * 7 - 1,
        data.draw(st.lists(st.integers(15, 40), min_size=classes, max_size=classes)),
    )
    split = dealing.classes_per_client(labels, clients, k, seed)
    assert_partition(split, len(labels), clients)
    assert all(len(np.unique(labels[part])) == k for part in split)
    counts = np.array(
        [[(labels[part] == value).sum() for part in split] for value in np.unique(labels)]
    )
    for row in counts:
        assert row[row > 0].max() - row[row > 0].min() <= 1
    owners = (counts > 0).sum(axis=1)
    assert owners.max() - owners.min() <= 1
    assert_same(split, dealing.classes_per_client(labels, clients, k, seed))


@quick
@given(groups=st.lists(st.sampled_from(["north", "south", "été", ""]), min_size=1, max_size=50))
def test_by_group_makes_one_client_per_folder_in_sorted_order(groups):
    split = dealing.by_group(np.array(groups))
    assert_partition(split, len(groups), len(set(groups)))
    assert [{groups[i] for i in part} for part in split] == [{name} for name in sorted(set(groups))]


@pytest.mark.parametrize(
    "deal",
    [
        lambda labels, seed: dealing.iid(len(labels), 5, seed),
        lambda labels, seed: dealing.dirichlet(labels, 5, 0.5, seed),
        lambda labels, seed: dealing.quantity_skew(len(labels), 5, 0.5, seed),
        lambda labels, seed: dealing.classes_per_client(labels, 5, 2, seed),
    ],
    ids=["iid", "dirichlet", "quantity", "classes"],
)
def test_another_seed_deals_other_images(deal):
    labels = np.arange(500) % 10
    assert not np.array_equal(deal(labels, 0)[0], deal(labels, 1)[0])


class FixedRng:
    """Stands in for a generator.

    Rounding starts at a known place, the first open client is picked.
    """

    def __init__(self, start=0.5):
        self.start = start

    def random(self):
        return self.start

    def choice(self, options):
        return options[0]


def test_cut_gives_the_numbers_of_a_hand_computed_case():
    """10 images, shares .1 .25 .4 .25, the third client is full.

    Without it the shares sum to .6; cumulated and divided: 1/6, 3.5/6, 3.5/6, 1. Times 10, plus the
    start .5, rounded down: floor(2.17) = 2, floor(6.33) = 6, 6, floor(10.5) = 10. Differences: 2,
    4, 0, 4.
    """
    counts = dealing.cut(
        10, np.array([0.1, 0.25, 0.4, 0.25]), np.array([True, True, False, True]), FixedRng()
    )
    assert counts.tolist() == [2, 4, 0, 4]


@pytest.mark.parametrize("shares", [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [np.nan, np.nan, np.nan]])
def test_cut_gives_all_to_one_open_client_when_no_share_is_left(shares):
    assert dealing.cut(
        7, np.array(shares), np.array([False, True, False]), FixedRng()
    ).tolist() == [0, 7, 0]


def test_cut_deals_only_images_that_exist():
    """The largest float below 1, added to 50,000, rounds to 50,001."""
    assert (
        dealing.cut(50_000, np.ones(3), np.ones(3, dtype=bool), FixedRng(1 - 2**-53)).sum()
        == 50_000
    )


def test_dirichlet_fills_no_client_by_more_than_one_class_beyond_the_average():
    """A client at or over N/n gets no later classes, so it overshoots by less than one class."""
    labels = np.repeat(np.arange(20), 50)
    sizes = [len(p) for seed in range(5) for p in dealing.dirichlet(labels, 10, 0.3, seed)]
    assert 100 < max(sizes) < 100 + 50


def test_dirichlet_class_mix_is_even_for_large_beta_and_skewed_for_small():
    labels = np.arange(5000) % 10
    for large in (1e6, 1e308):  # sums of gamma variates that large overflow
        assert np.abs(class_mix(labels, dealing.dirichlet(labels, 10, large, 0)) - 0.1).max() < 0.01
    paper = class_mix(labels, dealing.dirichlet(labels, 10, 0.5, 0)).max(axis=1).mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skewed = class_mix(labels, dealing.dirichlet(labels, 10, 0.01, 0)).max(axis=1).mean()
    assert 0.2 < paper < 0.6 < 0.8 < skewed


def test_dirichlet_rounding_does_not_favor_some_clients():
    """100 classes of 500 images on 1000 equal clients are half an image each.

    Rounding must not pick the same half.
    """
    labels = np.arange(50_000) % 100
    sizes = np.array([len(part) for part in dealing.dirichlet(labels, 1000, 1e8, 0)])
    assert sizes.min() > 35


def test_dirichlet_images_within_a_class_are_random():
    part = dealing.dirichlet(np.zeros(10_000, dtype=int), 2, 1e6, 0)[0]
    assert 4700 < part.mean() < 5300


def test_quantity_skew_sizes_follow_beta():
    sizes = {
        beta: np.array([len(p) for p in dealing.quantity_skew(10_000, 10, beta, 0, 1)])
        for beta in (0.3, 1e6)
    }
    assert abs(sizes[1e6] - 1000).max() < 10
    assert sizes[0.3].max() > 2500


def test_classes_per_client_mixes_classes_freely():
    labels = np.arange(4000) % 10
    pairs = {tuple(np.unique(labels[p])) for p in dealing.classes_per_client(labels, 40, 2, 0)}
    assert len(pairs) > 15  # a fixed pairing of classes would give 5


def test_top_up_warns_with_the_number_of_images_it_moved():
    """One class and a beta that gives everything to one of 4 clients.

    Each of the 3 others needs 10 images.
    """
    with pytest.warns(UserWarning, match=r"fewer than 10 images: moved 30 random images"):
        split = dealing.dirichlet(np.zeros(100, dtype=int), 4, 1e-9, 0)
    assert sorted(map(len, split)) == [10, 10, 10, 70]


def test_top_up_takes_from_the_largest_only():
    """Sizes 9, 8, 3, 0 with 3 wanted: 3 to move; the level 7 frees 2 + 1."""
    owner = np.repeat([0, 1, 2], [9, 8, 3])
    before = owner.copy()
    assert dealing.top_up(owner, 4, 3, np.random.default_rng(0)) == 3
    assert np.bincount(owner).tolist() == [7, 7, 3, 3]
    assert (before != owner).sum() == 3


def test_drawing_again_comes_before_moving_images():
    """With a minimum of 350 of 500, seven draws of eight fail, but hardly 50 in a row."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10):
            assert min(map(len, dealing.dirichlet(np.arange(5000) % 10, 10, 0.5, seed, 350))) >= 350


def lines_run(deal, labels):
    """The number of Python lines that a partition executes."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        split = deal(labels)
    finally:
        sys.settrace(before)
    assert_partition(split, len(labels), 1000)
    return lines


@pytest.mark.filterwarnings("ignore:in each of")
@pytest.mark.parametrize(
    "deal",
    [
        lambda labels: dealing.dirichlet(labels, 1000, 0.05, 0),
        lambda labels: dealing.dirichlet(labels % 10, 1000, 0.05, 0),
        lambda labels: dealing.classes_per_client(labels, 1000, 2, 0),
        lambda labels: dealing.quantity_skew(len(labels), 1000, 0.05, 0),
    ],
    ids=["dirichlet", "dirichlet of ten", "classes", "quantity"],
)
def test_a_split_over_a_thousand_clients_takes_no_loop_over_images(deal):
    """Python loops over classes and clients, and numpy over images.

    That makes a split fast on any machine.
    """
    labels = np.random.default_rng(0).integers(0, 100, 100_000)
    assert lines_run(deal, labels) < lines_run(deal, labels[:50_000]) + 5000


TEN = np.arange(100) % 10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dealing.iid(10, 0, 0), ["clients=0", "clients=10"]),
        (lambda: dealing.dirichlet(TEN, -3, 0.5, 0), ["clients=-3"]),
        (
            lambda: dealing.iid(10, 11, 0),
            ["clients=11", "(10)", "clients=10"],
        ),
        (lambda: dealing.dirichlet(TEN, 101, 0.5, 0), ["clients=101"]),
        (lambda: dealing.quantity_skew(5, 6, 0.5, 0), ["clients=6"]),
        (lambda: dealing.classes_per_client(TEN, 101, 2, 0), ["clients=101"]),
        (lambda: dealing.dirichlet(TEN, 5, 0.0, 0), ["beta=0.0", "beta=0.5"]),
        (lambda: dealing.dirichlet(TEN, 5, float("nan"), 0), ["beta=nan"]),
        (lambda: dealing.quantity_skew(100, 5, -1.0, 0), ["beta=-1.0"]),
        (lambda: dealing.quantity_skew(100, 5, float("inf"), 0), ["beta=inf"]),
        (
            lambda: dealing.classes_per_client(TEN, 20, 0, 0),
            ["classes=0", "write classes=1"],
        ),
        (
            lambda: dealing.classes_per_client(TEN, 5, 11, 0),
            ["classes=11", "write classes=10"],
        ),
        (
            lambda: dealing.classes_per_client(TEN, 4, 2, 0),
            ["classes=3", "clients=5"],
        ),
        (
            lambda: dealing.classes_per_client(np.array([0, 0, 0, 0, 1]), 5, 1, 0),
            ["classes=1", "1 of 5"],
        ),
        (lambda: dealing.iid(10, 2, -1), ["seed=-1", "seed=0"]),
    ],
)
def test_impossible_requests_name_the_argument_and_what_to_write(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:in each of")
@pytest.mark.parametrize(
    ("kind", "direct"),
    [
        ("iid", lambda: dealing.iid(100, 5, 3)),
        ("dirichlet", lambda: dealing.dirichlet(TEN, 5, 0.7, 3, 19)),
        ("classes", lambda: dealing.classes_per_client(TEN, 5, 4, 3)),
        ("quantity", lambda: dealing.quantity_skew(100, 5, 0.7, 3, 19)),
        ("folders", lambda: dealing.by_group(np.arange(100) // 20)),
    ],
)
def test_make_passes_every_option_on(kind, direct):
    options = PartitionOptions(kind=kind, beta=0.7, classes=4, min_size=19)
    assert_same(deal(options, TEN, np.arange(100) // 20, clients=5, seed=3), direct())


@pytest.mark.parametrize(
    ("options", "labels", "groups", "words"),
    [
        (PartitionOptions(), None, None, ["partition=Dirichlet()", "write partition=IID()"]),
        (
            PartitionOptions(kind="classes"),
            None,
            None,
            ["partition=ClassesPerClient()", "write partition=IID()"],
        ),
        (
            PartitionOptions(kind="folders"),
            TEN,
            None,
            ["partition=Folders()", "partition=IID()"],
        ),
        (
            PartitionOptions(kind="folders"),
            TEN,
            TEN,
            ["clients=5", "write clients=10"],
        ),
    ],
)
def test_make_explains_what_does_not_fit(options, labels, groups, words):
    with pytest.raises(UserError) as error:
        deal(options, labels, groups, clients=5)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_unknown_kind_and_a_bad_beta_are_refused_at_once():
    with pytest.raises(
        UserError, match=r"partition\.kind=dirichlt .* did you mean partition\.kind=dirichlet"
    ):
        PartitionOptions(kind="dirichlt").made(clients=3)
    with pytest.raises(UserError, match=r"^beta=0 is not possible"):
        PartitionOptions(beta=0)


def test_every_option_has_a_help_line():
    assert all(f.metadata["help"] for f in PartitionOptions.__dataclass_fields__.values())


def test_a_saved_split_comes_back(tmp_path):
    split = dealing.dirichlet(TEN, 5, 0.5, 0)
    path = tmp_path / "run" / "split.json"
    split_file.save(path, split, fingerprint="abc", options={"kind": "dirichlet", "beta": 0.5})
    assert_same(split_file.load(path, fingerprint="abc", num_images=100), split)
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["num_images"] == 100
    assert content["options"] == {"kind": "dirichlet", "beta": 0.5}
    assert [p.name for p in path.parent.iterdir()] == ["split.json"]


def test_make_uses_the_file_instead_of_the_kind(tmp_path):
    path = tmp_path / "split.json"
    split_file.save(path, [np.array([5, 7]), np.array([0])], fingerprint="abc", options={})
    split = deal(PartitionOptions(file=str(path)), TEN, None, clients=2, fingerprint="abc")
    assert_same(split, [np.array([5, 7]), np.array([0])])  # the other 97 images stay unused
    with pytest.raises(UserError, match=r"write clients=2"):
        deal(PartitionOptions(file=str(path)), TEN, None, clients=3, fingerprint="abc")


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "split.json"
    split_file.save(path, [np.arange(3)], fingerprint="old", options={})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        split_file.save(path, [np.arange(4)], fingerprint="new", options={})
    assert [p.name for p in tmp_path.iterdir()] == ["split.json"]
    assert_same(split_file.load(path, fingerprint="old", num_images=3), [np.arange(3)])


def split_text(clients: object, **changes: object) -> str:
    return json.dumps(
        {
            "format": 1,
            "fingerprint": "abc",
            "num_images": 10,
            "options": {},
            "clients": clients,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[1, 2]", "not a split file"),
        (split_text([[0]], format=2), "not a split file"),
        (split_text([[0]], fingerprint="xyz"), "other images"),
        (split_text([]), "no clients"),
        (split_text({"0": [1]}), "no clients"),
        (split_text([[0], []]), "client 1 no images"),
        (split_text([[0], 1]), "client 1 no images"),
        (split_text([[0, 10]]), "no image number from 0 to 9"),
        (split_text([[-1]]), "no image number"),
        (split_text([[10**30]]), "no image number"),
        (split_text([[1.5]]), "no image number"),
        (split_text([[True]]), "no image number"),
        (split_text([["1"]]), "no image number"),
        (split_text([[0, 1], [1, 2]]), "client 1 an image twice"),
        (split_text([[3, 3]]), "client 0 an image twice"),
    ],
)
def test_a_bad_split_file_is_refused_by_name(tmp_path, text, why):
    path = tmp_path / "split.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=why) as error:
        split_file.load(path, fingerprint="abc", num_images=10)
    assert f"file='{path}'" in str(error.value)


def test_a_split_file_that_is_binary_or_a_folder_is_refused(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(UserError, match="not JSON"):
        split_file.load(tmp_path / "image.png", fingerprint="abc", num_images=10)
    with pytest.raises(UserError, match="cannot be read"):
        split_file.load(tmp_path, fingerprint="abc", num_images=10)
