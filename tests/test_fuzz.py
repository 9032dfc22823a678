"""Random and hostile input gives a clean error or a correct result, never a traceback.

A damaged file is never taken for a good one.

FEDX_FUZZ=20000 pytest tests/test_fuzz.py      # cases of each test; CI tries fewer
"""

import os
import random
import shutil
import string
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import tiny_federation
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedx_pl.cli import main as cli
from fedx_pl.config import compose as configuration
from fedx_pl.config.build import make_data, require_possible
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config, PartitionOptions, all_keys
from fedx_pl.data.images import ImageData, Split
from fedx_pl.data.partition import PARTITIONS
from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import FedAvg
from fedx_pl.federation.checkpoint import Checkpoints, ClientRecord, RunState
from fedx_pl.federation.pending import UnfinishedRound
from fedx_pl.federation.round import ClientMemory, GlobalState, Update

CASES = int(os.environ.get("FEDX_FUZZ", "300"))
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
fuzz = settings(max_examples=CASES, deadline=None, suppress_health_check=QUIET)

KEYS = [key for key, _, _ in all_keys()]
# Values that have brought something down, here or elsewhere.
HOSTILE = [
    "", "null", "~", "[]", "{}", "[1,2", "{a: b}", "1e999", "-0", "0x10", "${seed}", "${", "$",
    "${oc.env:HOME}", "???", "[???]", "!!python/object/apply:os.system [true]", "*a", "&a b",
    "[*a]", "[&a [*a]]", "inf", "-inf", "nan", "-1", "0", "1", "2", "1e308", "9" * 20,
    "-" + "9" * 20, "9" * 5000, "[" * 3000, "{a: " * 2000, "../../x", "..", ".", "a/b", "a\\b",
    "/dev/zero", "/dev/null", "/etc/passwd", "x" * 300, "x" * 100_000, "\0", "a\0b", "a\nb",
    "\x1b[31m", "\udcff", "\ud800", "é", "\u202e", "true", "simclr", "byol", "cifar10", "folder",
    "arrays", "a:b", ":", "a:", ":b", "..:x", "os:system", "[os:system]", "[fedx]", "[[1],[2]]",
    "[{a: 1}]", "[inf]", "[nan,0]", "[-1]", "cuda:99999999999", "cifar10-", "-", "--", "=", "a=b",
    "1_000", "1,5", "٣", "0.5", "[0.5,0.5,0.5]", "[a,b,c]",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(HOSTILE),
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(str),
    st.text(max_size=30),
    st.text(string.printable, max_size=20),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=5)), max_size=4).map(str),
)


@fuzz
@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS) | st.text(max_size=20), VALUES), min_size=1, max_size=3
    )
)
@example([("optim.lr", "${oc.env:HOME}")])
@example([("seed", "${"), ("seed", "0.0")])
def test_any_value_in_any_key_is_a_configuration_or_a_clean_error(
    words: list[tuple[str, str]],
) -> None:
    overrides = [f"{key}={value}" for key, value in words]
    if any(word.startswith(("method=", "method.name=")) for word in overrides):
        return  # A method by its own name is code, which the user asks for.
    try:
        config = compose(overrides)
    except UserError:
        return
    assert isinstance(config, Config)
    assert config.run.dir or config.run_folder.parent == Path(config.run.root)
    again = configuration.from_tree(yaml.safe_load(config.to_yaml()), "what it wrote itself")
    assert again.hash == config.hash


def any_value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(HOSTILE)
    if kind < 0.9:
        return str(rng.randint(-(10 ** rng.randint(0, 30)), 10 ** rng.randint(0, 30)))
    return "".join(rng.choice(string.printable + "é\0\udcff") for _ in range(rng.randint(0, 15)))


def any_words(rng: random.Random) -> list[str]:
    keys = [
        *KEYS,
        "method",
        "data",
        "recipe",
        "profile",
        "experiment",
        "fedx",
        "resume",
        "regularizer",
    ]
    return [f"{rng.choice(keys)}={any_value(rng)}" for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]


def any_line(rng: random.Random, run: str) -> list[str]:
    """Arguments for ``fedx-pl`` that do not train, fetch images or listen on a port."""
    folder = rng.choice([run, run, any_value(rng)])
    out = ["-o", rng.choice([value for value in HOSTILE if not value.startswith(("/", ".."))])]
    lines = {
        "train": [*any_words(rng), *rng.choice([[], ["--fork", any_value(rng)]]), "--dry-run"],
        "evaluate": [
            folder,
            *rng.choice([[], ["knn"], [any_value(rng)]]),
            *any_words(rng),
            "--round",
            any_value(rng),
        ],
        "data": [any_value(rng), *any_words(rng), "data.download=false"],
        "sweep": [any_value(rng), "--seeds", any_value(rng), "--jobs", any_value(rng), "--dry-run"],
        "report": [folder, "--definitions", any_value(rng)],
        "export": [
            folder,
            "--to",
            rng.choice(["safetensors", any_value(rng)]),
            *rng.choice([[], out]),
        ],
        "embed": [folder, any_value(rng), *rng.choice([[], out])],
        "neighbors": [folder, any_value(rng), any_value(rng), "--count", any_value(rng)],
        "completion": [any_value(rng)],
        "federate": [
            "keys",
            "--sites",
            any_value(rng),
            "--port",
            any_value(rng),
            "--host",
            any_value(rng),
        ],
        any_value(rng): any_words(rng),
    }
    command = rng.choice([*lines, "train", "train", "evaluate"])
    line = [command, *lines[command]]
    return line if rng.random() < 0.9 else rng.sample(line, k=len(line))


@pytest.fixture(scope="module")
def finished(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    words = [*tiny_federation(tiny_root, run.parent), f"run.dir={run}", "federation.rounds=1"]
    assert cli.main(["train", *words, "evaluation.linear.epochs=1"]) == 0
    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "count", [pytest.param(120), pytest.param(max(3000, CASES), marks=pytest.mark.slow)]
)
def test_any_command_line_ends_in_success_or_in_one_line(
    count: int,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No input gives a traceback, or a file in a place that was not asked for."""

    def only_checked(config: Config, *arguments: object, **settings: object) -> None:
        require_possible(config)
        make_data(config)
        raise UserError("that would be a run")

    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"fedx_pl.cli.{command}.build", only_checked)
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for seed in range(count):
        line = any_line(random.Random(seed), str(finished))
        code = cli.main(line)
        said = capsys.readouterr().err
        assert code in (0, 2), line
        if code == 2 and said:
            said = (
                said.partition("\n")[2] if said.startswith("decoded copies of the images") else said
            )
            assert said.startswith("error: "), (line, said)
            assert said.count("\n") == 1 or "Put one of these into" in said, (line, said)
            assert len(said) < 3000, (line, said)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@fuzz
@given(
    st.sampled_from([*PARTITIONS]),
    st.integers(0, 60),
    st.integers(1, 6),
    st.integers(1, 12),
    st.floats(1e-3, 1e3),
    st.integers(0, 12),
    st.integers(1, 7),
    st.integers(0, 2**40),
    st.booleans(),
)
def test_any_partition_deals_every_image_at_most_once_or_says_why_not(
    kind: str,
    images: int,
    classes: int,
    clients: int,
    beta: float,
    least: int,
    held: int,
    seed: int,
    labelled: bool,
) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(-1, classes, images) if labelled else None
    groups = rng.integers(0, 4, images)
    try:
        options = PartitionOptions(kind=kind, beta=beta, classes=held, min_size=least)
        split = Split(np.zeros((images, 1, 1, 1), np.uint8), labels, groups)
        data = ImageData(
            name="test",
            train=split,
            test=None,
            classes=(),
            group_names=(),
            source="here",
            fingerprint="",
        )
        found = options.made(clients).deal(data, seed)
    except UserError:
        return
    assert len(found) == clients
    dealt = np.concatenate(found)
    assert len(np.unique(dealt)) == len(dealt)
    assert ((dealt >= 0) & (dealt < images)).all()
    assert all(len(rows) > 0 for rows in found)


@fuzz
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(-30, 30))
def test_an_average_does_not_depend_on_the_order_or_grouping_of_clients(
    seed: int, clients: int, scale: float
) -> None:
    """The mean of groups, weighted by their images, is the mean of all; sums are float64."""
    rng = np.random.default_rng(seed)
    reference = {"w": torch.zeros(20), "n": torch.tensor(0)}
    states = [
        (
            {
                "w": torch.tensor(rng.normal(0, 2.0**scale, 20), dtype=torch.float32),
                "n": torch.tensor(i),
            },
            int(n),
        )
        for i, n in enumerate(rng.integers(1, 5000, clients))
    ]

    def mean(order: list[int]) -> torch.Tensor:
        average = FedAvg(reference)
        for i in order:
            average.add(*states[i])
        return average.result()["w"]

    straight, order = mean(list(range(clients))), rng.permutation(clients).tolist()
    torch.testing.assert_close(mean(order), straight, rtol=2e-7, atol=0)
    cut = int(rng.integers(0, clients)) + 1
    groups = [group for group in (order[:cut], order[cut:]) if group]
    average = FedAvg(reference)
    for group in groups:
        average.add({"w": mean(group), "n": torch.tensor(0)}, sum(states[i][1] for i in group))
    largest = float(max(state["w"].abs().max() for state, _ in states))
    torch.testing.assert_close(average.result()["w"], straight, rtol=1e-6, atol=1e-6 * largest)


def damage(content: bytes, where: float, how: str, value: int) -> bytes:
    place = min(int(where * len(content)), len(content) - 1)
    if how == "truncate":
        return content[:place]
    if how == "insert":
        return content[:place] + bytes([value]) + content[place:]
    return content[:place] + bytes([content[place] ^ (value or 1)]) + content[place + 1 :]


def copied(run: Path, place: Path) -> Path:
    folder = place / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(run, folder))


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder, keep=2)
    for number in (1, 2):
        memory = ClientMemory(
            private={"queue": torch.full((4,), float(number))}, last_round=number, steps=5, epochs=1
        )
        record = checkpoints.save_client(
            Update(
                client=0,
                num_images=10,
                state=GlobalState(weights={}),
                memory=memory,
                losses=torch.zeros(1, 1),
                loss_names=("total",),
                images_seen=10,
            )
        )
        state = RunState(
            round=number,
            rows=[{"round": number, "loss": 0.5}],
            untrained={"knn_top1": 9.0},
            clients={0: record},
            seconds=1.0,
        )
        checkpoints.commit(state, GlobalState(weights={"w": torch.arange(6.0) * number}))
    pending = UnfinishedRound(folder)
    for client in (0, 1):
        update = Update(
            client=client,
            num_images=7,
            state=GlobalState(weights={"w": torch.ones(3) * client}),
            memory=ClientMemory(last_round=3, steps=1, epochs=1),
            losses=torch.zeros(2, 1),
            loss_names=("total",),
            images_seen=7,
        )
        pending.save(
            3,
            replace(update, seconds=60.0),
            ClientRecord(last_round=3, steps=1, epochs=1, sha256="", images=7),
        )
    return folder


DAMAGE = (st.floats(0, 1), st.sampled_from(["flip", "truncate", "insert"]), st.integers(0, 255))


@fuzz
@given(st.sampled_from(["global.safetensors", "state.json", "SHA256SUMS"]), *DAMAGE)
def test_a_damaged_checkpoint_is_noticed(
    two_rounds: Path, tmp_path: Path, name: str, where: float, how: str, value: int
) -> None:
    """The run resumes from the round before, or from the newest if its damage is harmless."""
    folder = copied(two_rounds, tmp_path)
    file = folder / "checkpoints" / "round_00002" / name
    before = file.read_bytes()
    file.write_bytes(after := damage(before, where, how, value))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = Checkpoints(folder).latest()
    assert found is not None
    state, global_state = found
    assert torch.equal(global_state.weights["w"], torch.arange(6.0) * state.round)
    assert state.rows == [{"round": state.round, "loss": 0.5}]
    assert state.untrained == {"knn_top1": 9.0}
    assert state.clients[0].last_round == state.round
    assert state.seconds == 1.0
    if after != before and state.round == 1:
        assert "damaged" in str(said[0].message)


@fuzz
@given(st.sampled_from(["global.safetensors", "state.json", "SHA256SUMS"]), *DAMAGE)
def test_a_damaged_pending_update_is_left_out(
    two_rounds: Path, tmp_path: Path, name: str, where: float, how: str, value: int
) -> None:
    folder = copied(two_rounds, tmp_path)
    file = folder / "pending" / "00000" / name
    file.write_bytes(damage(file.read_bytes(), where, how, value))
    for update, record in UnfinishedRound(folder).load(3):
        assert torch.equal(update.state.weights["w"], torch.ones(3) * update.client)
        assert (update.num_images, record.last_round, update.losses.shape) == (7, 3, (2, 1))


@fuzz
@given(*DAMAGE)
def test_a_damaged_private_state_is_refused(
    two_rounds: Path, tmp_path: Path, where: float, how: str, value: int
) -> None:
    folder = copied(two_rounds, tmp_path)
    (file,) = (folder / "clients").glob("*00002.safetensors")
    before = file.read_bytes()
    file.write_bytes(after := damage(before, where, how, value))
    checkpoints = Checkpoints(folder)
    state, _ = checkpoints.read(2)
    if after == before:
        return
    with pytest.raises(UserError, match="damaged"):
        checkpoints.load_client(0, state.clients[0])
    if len(after) != len(before):
        with pytest.warns(UserWarning, match="missing or cut off"):
            assert Checkpoints(folder).latest()[0].round == 1
