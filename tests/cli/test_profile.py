"""The default profile, and the question before the paper's setting runs on a CPU."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import torch
from helpers import definition

from fedx_pl import federate
from fedx_pl.cli import confirm
from fedx_pl.cli import main as cli
from fedx_pl.config import compose as configuration
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.experiments.sweep import Sweep
from fedx_pl.federation import estimate

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A terminal as standard input and error of a command; yields its keyboard."""
    keyboard, end = os.openpty()
    with (
        open(keyboard, "w") as typed,
        open(end) as stdin,
        open(os.dup(end), "w") as stderr,
        monkeypatch.context() as patch,
    ):
        patch.setattr("sys.stdin", stdin)
        patch.setattr("sys.stderr", stderr)
        yield typed


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes any run count as a long one."""
    monkeypatch.setattr(confirm, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "BUDGET_SECONDS", 0.001)


def test_the_profile_is_the_machine_s_unless_one_is_named() -> None:
    expected = "paper" if torch.cuda.is_available() else "cpu"
    assert compose([]).profile == expected
    assert compose(["profile=auto"]).content() == compose([]).content()
    assert compose(["profile=paper"]).profile == "paper"
    assert (
        Config().profile == "paper"
    )  # The schema's defaults are the paper's, with or without a GPU.


@without_gpu
def test_the_first_line_names_the_default_profile(
    quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in quick if word != "profile=paper"]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("profile cpu (no GPU here): ")
    run = federate("", *words, rounds=1)
    assert capsys.readouterr().out.startswith("profile cpu (no GPU here): ")
    assert "-cpu-" in run.folder.name


@without_gpu
def test_the_paper_s_profile_on_a_cpu_is_announced(
    quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    federate("", *quick, rounds=1)
    out = capsys.readouterr().out
    assert out.startswith("profile paper: made for a GPU, and there is none here")
    assert "note: 240 images, " in out


@without_gpu
@pytest.mark.usefixtures("long_runs")
def test_a_long_run_without_a_gpu_needs_a_yes_where_nobody_can_be_asked(
    quick: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *quick]) == 2
    shown = capsys.readouterr()
    assert "240 images, " in shown.out
    assert shown.err.startswith("error: profile=paper takes about ")
    assert "add --yes" in shown.err
    assert not (tmp_path / "runs").exists()
    assert cli.main(["train", *quick, "--dry-run"]) == 0
    assert cli.main(["train", *quick, "--yes"]) == 0
    assert cli.main(["train", *quick]) == 0  # Finished: there is nothing to wait for.


@without_gpu
@pytest.mark.usefixtures("long_runs")
def test_on_a_terminal_a_long_run_without_a_gpu_waits_for_an_answer(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as keyboard:
        for answer, code in (("\n", 2), ("n\n", 2), ("y\n", 0)):
            keyboard.write(answer)
            keyboard.flush()
            assert cli.main(["train", *quick, "federation.rounds=1"]) == code
            assert (tmp_path / "runs").exists() == (code == 0)


@without_gpu
def test_a_short_run_of_the_paper_s_profile_is_not_asked_about(quick: list[str]) -> None:
    assert cli.main(["train", *quick, "federation.rounds=1"]) == 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of runs of each sweep; none of them is trained."""
    found: list[int] = []

    def run(sweep: Sweep) -> list[object]:
        found.append(len(sweep.waiting))
        return []

    monkeypatch.setattr(Sweep, "run", run)
    return found


def sweep_of(quick: list[str], tmp_path: Path, first: str = "plain: method=simclr") -> list[str]:
    """The command of a sweep of two runs."""
    where = [word for word in quick if word.startswith(("run.root", "data.root", "data.download"))]
    what = " ".join(
        word for word in quick if word not in where and not word.startswith(("run.", "profile="))
    )
    text = f"title: mine\nbase: {what}\naxes:\n  variant: {{{first}, + FedX: fedx=true}}\n"
    return ["sweep", str(definition(tmp_path / "experiments", text)), "profile=paper", *where]


@without_gpu
@pytest.mark.usefixtures("long_runs")
def test_a_long_sweep_without_a_gpu_needs_a_yes_where_nobody_can_be_asked(
    quick: list[str], tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = sweep_of(quick, tmp_path)
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert "profile paper: made for a GPU, and there is none here" in shown.out
    assert "All runs take about " in shown.out
    assert shown.err.startswith("error: profile=paper takes about ")
    assert "add --yes" in shown.err
    assert "profile=mini" in shown.err
    assert not (tmp_path / "runs").exists()
    assert cli.main([*words, "--dry-run"]) == 0
    assert "All runs take" not in capsys.readouterr().out
    assert started == []
    assert cli.main([*words, "--yes"]) == 0
    assert started == [2]


@without_gpu
@pytest.mark.usefixtures("long_runs")
def test_on_a_terminal_a_long_sweep_without_a_gpu_waits_for_an_answer(
    quick: list[str], tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as keyboard:
        for answer, code in (("n\n", 2), ("y\n", 0)):
            keyboard.write(answer)
            keyboard.flush()
            assert cli.main(sweep_of(quick, tmp_path)) == code
            assert started == ([2] if code == 0 else [])


@without_gpu
def test_a_sweep_that_cannot_be_estimated_is_asked_about(
    quick: list[str], tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(sweep_of(quick, tmp_path, "broken: partition.file=/nowhere.json")) == 2
    assert "profile=paper takes weeks here" in capsys.readouterr().err
    assert started == []


@without_gpu
def test_a_short_sweep_of_the_paper_s_profile_is_not_asked_about(
    quick: list[str], tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "BUDGET_SECONDS", 0.001)
    assert cli.main(sweep_of(quick, tmp_path)) == 0
    assert started == [2]


def test_data_describes_the_whole_set_whatever_the_profile_takes_of_it(
    tiny_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(configuration.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / "profile" / "cpu.yaml").write_text("data: {limit: 100}")
    monkeypatch.setattr(configuration, "CONFIGS", tmp_path / "configs")
    words = ["profile=cpu", f"data.root={tiny_root}", "data.verify=false", "data.download=false"]
    assert configuration.compose(words).data.limit == 100
    assert cli.main(["data", "cifar10", *words]) == 0
    assert "train: 240 images" in capsys.readouterr().out
    assert cli.main(["data", "cifar10", *words, "data.limit=50"]) == 0
    assert "train: 50 images" in capsys.readouterr().out
