"""The benchmarks measure what they say: no assertion here is about time."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # `benchmarks` is not installed; it runs from the repository

from benchmarks import reference
from benchmarks.__main__ import main
from benchmarks.bound import Bound
from benchmarks.measure import Lap, best, flops, interleave
from benchmarks.report import Part, Row, save
from benchmarks.rounds import VARIANTS, Setting, images_of, training_round, variant
from benchmarks.targets import TARGETS, Target
from helpers import THREADS, data_for, make_model, start

from fedx_pl.data.batches import ClientData
from fedx_pl.evaluation.linear import linear_probe
from fedx_pl.evaluation.options import LinearOptions
from fedx_pl.federation.aggregate import FedAvg
from fedx_pl.methods import SimCLR, SSLMethod
from fedx_pl.mixins import FedXMixin, FedXOptions, wrap

CPU = torch.device("cpu")


@pytest.fixture
def thin_and_few(tiny_root: Path) -> list[str]:
    """Overrides that make any part run on the small CIFAR-10 with a very thin network."""
    data = [f"data.root={tiny_root}", "data.verify=false", "data.download=false"]
    return [
        *data,
        "backbone.name=resnet10",
        "backbone.width=4",
        "backbone.stem=half",
        f"run.threads={THREADS}",
    ]


def settled(**fedx: Any) -> tuple[SSLMethod, ClientData]:
    """FedX on SimCLR after a first round: BatchNorm has statistics, F is frozen in eval mode."""
    model = make_model(wrap(FedXMixin, SimCLR), fedx=FedXOptions(enabled=True, **fedx))
    data = data_for(model)
    model.train()
    for batch in data.epoch(7):
        model.embed(batch.first)
    return start(model, data), data


# --- clocks ---------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    calls: list[str] = []

    def contender(name: str) -> int:
        calls.append(name)
        return 1

    interleave({name: lambda name=name: contender(name) for name in "abc"}, repeats=2)
    assert "".join(calls) == "abcabc"


def test_times_are_per_image_and_the_best_counts() -> None:
    laps = iter([Lap(10, 5.0), Lap(10, 2.0), Lap(5, 4.0)])
    times = interleave({"own clock": lambda: next(laps)}, repeats=3)
    assert times == {"own clock": [0.5, 0.2, 0.8]}
    assert best(times) == {"own clock": 0.2}


def test_a_contender_without_a_clock_is_timed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 106.0])
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(ticks))
    assert interleave({"a": lambda: 3}, repeats=1) == {"a": [2.0]}


def test_a_multiply_add_is_two_flops() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert flops(lambda: a @ b) == 2 * 3 * 5 * 7


# --- targets --------------------------------------------------------------------------------------


def test_a_target_knows_its_direction() -> None:
    faster, smaller = Target("a", 2.0, ">="), Target("b", 2.0, "<=")
    assert (faster.met(2.5), faster.met(1.5), faster.met(math.nan)) == (True, False, False)
    assert (smaller.met(2.5), smaller.met(1.5), smaller.met(math.nan)) == (False, True, False)


def test_a_number_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path / "out.json", {}, {"part": Part([Row("a", math.nan)])})
    assert not (tmp_path / "out.json").exists()


# --- the contenders compute what they stand for ---------------------------------------------------


def test_reference_and_ours_have_the_same_loss_and_gradient() -> None:
    """Compares a loop, F on three views in NCHW, with the mixin, F on two in channels_last."""
    model, data = settled(divergence="authors")
    network = reference.Network(model).train()
    frozen = reference.Network(model).eval()
    batch = next(data.epoch(0))
    assert batch.relation is not None
    ours = model.loss(batch, model.embed_views(batch)).total
    theirs = reference.step_loss(network, frozen, batch.first, batch.second, batch.relation)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    ours.backward()
    theirs.backward()
    ours_grads = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            parameter.grad, ours_grads[name.replace("head", "fedx_head")], atol=1e-4, rtol=1e-3
        )


def test_reference_averages_as_fedavg_does() -> None:
    model, _ = settled()
    clients = [reference.Network(model) for _ in range(3)]
    sizes = [10, 30, 20]
    ours = FedAvg(clients[0].state_dict())
    for i, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        with torch.no_grad():
            for parameter in client.parameters():
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                )
        ours.add(client.state_dict(), size)
    server = reference.Network(model)
    reference.average(server, clients, sizes)
    torch.testing.assert_close(server.state_dict(), ours.result())


def test_reference_probe_is_as_accurate_as_ours() -> None:
    labels = torch.arange(300) % 3
    x = 5 * (
        torch.randn(300, 8, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(8)[labels]
    )
    torch.manual_seed(0)
    theirs = reference.linear_probe(
        x[:200], labels[:200], x[200:], labels[200:], epochs=150, device=CPU
    )
    ours = linear_probe(
        x[:200],
        labels[:200],
        x[200:],
        labels[200:],
        classes=3,
        options=LinearOptions(epochs=150),
        seed=0,
    )
    assert theirs > 85
    assert theirs == pytest.approx(ours.top1, abs=4)


def test_reference_and_ours_see_the_same_number_of_images(thin_and_few: list[str]) -> None:
    setting = Setting(CPU, overrides=tuple(thin_and_few))
    short = ("federation.rounds=1", "federation.clients=2", "federation.epochs=1")
    run = setting.build(*variant("FedX", 16), *short)
    theirs = reference.Reference(run)
    before = {name: tensor.clone() for name, tensor in theirs.server.state_dict().items()}
    assert theirs() == images_of(run) == training_round(run).images == 2 * 7 * 16  # 120 images each
    assert not torch.equal(
        theirs.server.backbone.conv1.weight, before["backbone.conv1.weight"]
    )  # It did train.
    assert all(math.isfinite(loss) for loss in theirs.losses)


@pytest.mark.parametrize("name", VARIANTS)
def test_bound_passes_as_many_images_as_training(thin_and_few: list[str], name: str) -> None:
    """B = B_r = 16: the student sees x, x~ and, but for the queue, x_r; F sees x~ and x_r."""
    student, teacher = {"FedX": (48, 32), "FedX queue": (32, 16), "plain": (32, None)}[name]
    run = Setting(CPU, overrides=tuple(thin_and_few)).build(
        *variant(name, 16), "federation.clients=2"
    )
    bound = Bound(run, steps=3)
    bound.step()  # F is folded, and checked on its first batch.
    frozen = bound.teacher.network if bound.teacher else None
    seen: dict[str, list[int]] = {"student": [], "teacher": []}
    for role, network in (("student", bound.student), ("teacher", frozen)):
        if network is not None:
            network.register_forward_pre_hook(
                lambda _, args, role=role: seen[role].append(len(args[0]))
            )
    assert bound() == 3 * 16
    assert seen == {"student": [student] * 3, "teacher": [] if teacher is None else [teacher] * 3}
    assert frozen is None or not any(p.grad is not None for p in frozen.parameters())


def test_runs_begin_with_a_settled_batchnorm_and_are_not_evaluated(thin_and_few: list[str]) -> None:
    run = Setting(CPU, overrides=tuple(thin_and_few)).build(
        *variant("FedX", 16), "federation.clients=2"
    )
    counters = [
        t
        for name, t in run.model.backbone.state_dict().items()
        if name.endswith("num_batches_tracked")
    ]
    assert counters
    assert all(counters)
    assert not run.trainer.evaluator.possible


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quick_run_writes_finite_numbers_and_names_its_targets(
    thin_and_few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "bench.json"
    parts = ["overhead", "training-thin"]
    assert (
        main(
            [
                "--quick",
                "--device",
                "cpu",
                "--only",
                *parts,
                "--out",
                str(out),
                "--set",
                *thin_and_few,
            ]
        )
        == 0
    )
    found = json.loads(
        out.read_text(), parse_constant=lambda word: pytest.fail(f"{word} in the JSON")
    )
    assert found["quick"] is True
    assert found["machine"]["torch"] == torch.__version__
    assert list(found["parts"]) == parts
    rows = [row for part in found["parts"].values() for row in part["rows"]]
    assert {
        row["name"] for row in rows
    } <= TARGETS.keys()  # A row whose name is misspelt would have no target.
    assert all(row["measured"] > 0 for row in rows)
    times = [
        time
        for part in found["parts"].values()
        for values in part["times"].values()
        for time in values
    ]
    assert times
    assert all(time > 0 for time in times)
    printed = capsys.readouterr().out
    assert printed.startswith("overhead, training-thin: 1 repeat(s)")
    assert "thin 64+64: FedX against reference" in printed


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "overhead", "--repeats", "0", "--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("error: --repeats 0")
