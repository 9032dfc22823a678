"""What a run folder must have before a run starts, and what it keeps."""

import importlib
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import METHOD, Watching, forget_modules
from test_trainer import run

from fedx_pl.callbacks.tensorboard import RunWriter
from fedx_pl.cli import main as cli
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.pending import UnfinishedRound
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.federation.run_state import ClientRecord, RunState


def test_too_little_space_is_reported_before_training(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    display = Watching()
    with pytest.raises(
        UserError, match=r"has 10.0 MB free, and this run needs about 5\d.\d MB; .*run.dir=ANOTHER"
    ):
        run(compose([*quick, f"run.dir={tmp_path / 'run'}"]), display)
    assert display.steps == 0


class Interrupted(Watching):
    """Raises KeyboardInterrupt after the first round."""

    def row(self, row: dict[str, Any]) -> None:
        if row["round"]:
            raise KeyboardInterrupt


def test_a_run_from_before_labels_were_a_choice_is_resumed(
    quick: list[str], tmp_path: Path
) -> None:
    """Without data.limit it had all labels, as it has today."""
    config = compose([*quick, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(KeyboardInterrupt):
        run(config, Interrupted())
    file = tmp_path / "run" / "config.yaml"
    file.write_text(file.read_text().replace("  labels: all\n", ""))
    display = Watching()
    assert [row["round"] for row in run(config, display).history] == [1, 2]
    assert "resuming after round 1 of 2" in display.notes[0]


def test_the_best_round_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Linear accuracy counts; kNN only where nothing else was measured."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    rows = []
    for round, linear in ((1, 30.0), (2, 50.0), (3, 40.0), (4, None)):
        rows.append(
            {"round": round, "knn_top1": 10.0 * round} | ({"linear_top1": linear} if linear else {})
        )
        weights = {"w": torch.tensor(float(round))}
        checkpoints.commit(RunState(round=round, rows=list(rows)), GlobalState(weights=weights))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "best",
        "round_00004",
    ]
    state, found = checkpoints.read(2)
    assert (state.round, found.weights["w"].item()) == (2, 2.0)
    with pytest.raises(UserError, match="no checkpoint of round 3"):
        checkpoints.read(3)


def test_an_update_is_pending_only_if_saving_it_is_cheaper_than_training_it_again(
    tmp_path: Path,
) -> None:
    """4 MB at 400 MB/s take 0.01 s; ten times that is 0.1 s."""
    update = Update(
        client=2,
        num_images=7,
        state=GlobalState(weights={"w": torch.ones(1_000_000)}),
        memory=ClientMemory(),
        losses=torch.zeros(3, 1),
        loss_names=("total",),
        images_seen=9,
    )
    record = ClientRecord(last_round=1, steps=3, epochs=1, sha256="", images=7)
    pending = UnfinishedRound(tmp_path)
    pending.save(1, replace(update, seconds=0.09), record)
    assert list(pending.load(1)) == []
    pending.save(1, replace(update, seconds=0.11), record)
    # Trained again after a power loss: it is aggregated once.
    pending.save(1, replace(update, seconds=0.11), record)
    paths = [tmp_path / "pending", *(tmp_path / "pending").rglob("*")]
    assert len(paths) == 5
    assert not any(path.stat().st_mode & 0o077 for path in paths)  # No other user may read it.
    ((found, kept),) = pending.load(1)
    assert torch.equal(found.state.weights["w"], update.state.weights["w"])
    assert (found.client, found.num_images, found.images_seen, kept) == (2, 7, 9, record)
    assert list(pending.load(2)) == []
    pending.clear()
    assert list(pending.load(1)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_names": ("total", ["term"])},
        {"losses": torch.zeros(3, 2, dtype=torch.float8_e4m3fn)},
        {"seconds": 1e301},
        {"metrics": {"own": "large"}},
    ],
    ids=["name", "dtype", "seconds", "metric"],
)
def test_a_pending_update_with_numbers_that_cannot_be_is_left_out(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Its checksum may be right; averaging it would raise, again at each start."""
    update = Update(
        client=2,
        num_images=7,
        state=GlobalState(weights={}),
        memory=ClientMemory(),
        losses=torch.zeros(3, 2),
        loss_names=("total", "term"),
        images_seen=9,
        metrics={"own": float("inf")},
        seconds=1.0,
    )
    record = ClientRecord(last_round=1, steps=3, epochs=1, sha256="", images=7)
    pending = UnfinishedRound(tmp_path)
    pending.save(1, update, record)
    assert len(list(pending.load(1))) == 1
    pending.save(1, replace(update, **changed), record)
    assert list(pending.load(1)) == []


def test_what_was_logged_after_the_last_checkpoint_is_cut_off(tmp_path: Path) -> None:
    """Two writers stand for two processes: the second cuts off what exceeds the known length."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunWriter(tmp_path) as writer:
        writer.round(1, {"a": 1.0})
        lengths = writer.lengths()
        writer.round(2, {"a": 2.0})
    with RunWriter(tmp_path, lengths=lengths) as writer:
        writer.round(2, {"a": 2.5})
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=False)
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("a")] == [(1, 1.0), (2, 2.5)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_the_run_cleanly(
    quick: list[str],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cluster sends such a signal; here it comes after the first round."""
    commit = Checkpoints.commit

    def commit_then_signal(self: Checkpoints, *checkpoint: Any) -> None:
        commit(self, *checkpoint)
        signal.raise_signal(getattr(signal, name))

    monkeypatch.setattr(Checkpoints, "commit", commit_then_signal)
    command = ["train", *quick, "federation.rounds=500", f"run.dir={tmp_path / 'run'}"]
    assert cli.main(command) == 0
    error = capsys.readouterr().err
    assert f"stopped by {name}; run the same command again to resume: fedx-pl train" in error
    assert "Traceback" not in error
    assert Checkpoints(tmp_path / "run").rounds() == [1]


def test_a_run_that_was_killed_during_cleanup_is_cleaned_up_at_the_next_start(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round is committed, and what it replaces is still there."""
    config = compose([*quick, "method=byol", "run.keep=1", f"run.dir={tmp_path / 'run'}"])
    tidy = Checkpoints.clear

    def die(self: Checkpoints) -> None:
        if (tmp_path / "run" / "checkpoints" / "round_00002").exists():
            raise KeyboardInterrupt
        tidy(self)

    monkeypatch.setattr(Checkpoints, "clear", die)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert (tmp_path / "run" / "checkpoints" / "round_00001").exists()
    monkeypatch.undo()
    run(config)
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").glob("round_*")] == [
        "round_00002"
    ]
    best = Checkpoints(tmp_path / "run").latest()[0].best
    files = {file.name for file in (tmp_path / "run" / "clients").iterdir()}
    assert files == {
        f"{client:05d}_round_{n:05d}.safetensors" for client in range(3) for n in {best, 2}
    }
    assert not (tmp_path / "run" / "pending").exists()


def edit(folder: Path, text: str, name: str = "mine") -> None:
    """Writes a module and unloads it, so that it is imported as by a new process."""
    (folder / f"{name}.py").write_text(text)
    forget_modules(folder)


@pytest.mark.parametrize("rounds_done", [1, 2])
def test_an_edited_method_never_gets_the_old_numbers(
    quick: list[str], modules: Path, rounds_done: int
) -> None:
    """This holds for finished and unfinished runs; the command in the message works."""
    words = [*quick, "method=mine:Mine", "federation.rounds=2"]
    edit(modules, "from scale import SCALE\n" + METHOD.replace("mean()", "mean() * SCALE"))
    edit(modules, "SCALE = 1.0\n", "scale")
    display = Watching()
    if rounds_done < 2:
        display.row = lambda row: exec("raise KeyboardInterrupt") if row["round"] == 1 else None  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            run(compose(words), display)
        folder = compose(words).run_folder
    else:
        folder = run(compose(words)).folder
    edit(modules, "SCALE = 2.0\n", "scale")
    with pytest.raises(UserError) as refused:
        run(compose(words))
    assert (
        f"{folder} was trained with other code: scale.py changed since; type name=ANOTHER "
        in str(refused.value)
    )
    assert f"--fork {folder} for a new run from its weights, or delete {folder}" in str(
        refused.value
    )
    assert run(compose([*words, "name=another"])).folder != folder
    fork = [*words, f"fork={folder}", f"run.dir={modules / 'fork'}"]
    assert run(compose(fork)).history[-1]["round"] == 2
    edit(modules, "SCALE = 3.0\n", "scale")
    with pytest.raises(
        UserError, match=r"type run\.dir=ANOTHER for a new run, run\.dir=ANOTHER --fork"
    ):
        run(compose(fork))
    edit(modules, "SCALE = 1.0\n", "scale")  # As it was: the run is resumed.
    assert run(compose(words)).history[-1]["round"] == 2


@pytest.mark.parametrize("fedx", ["fedx=true", "fedx=false"])
@pytest.mark.parametrize("run_before", [True, False])
def test_an_edit_while_python_runs_is_refused_before_anything_is_trained(
    quick: list[str], modules: Path, run_before: bool, fedx: str
) -> None:
    """This holds if FedX wraps the user's class, and if no run has read the file before."""
    words = [*quick, "method=mine:Mine", "federation.rounds=1", fedx]
    edit(modules, METHOD)
    importlib.import_module("mine")
    if run_before:
        run(compose([*words, "name=a"]))
    (modules / "mine.py").write_text(METHOD.replace("mean", "sum"))
    with pytest.raises(
        UserError, match=r"mine\.py was edited after this process imported it.*start Python"
    ):
        run(compose([*words, "name=b"]))
    assert not compose([*words, "name=b"]).run_folder.exists()


def test_a_method_that_failed_before_the_first_round_may_be_repaired(
    quick: list[str], modules: Path
) -> None:
    """Its folder is there and holds nothing that was trained.

    What clients finished is trained again.
    """
    config = [*quick, "method=mine:Mine"]
    edit(modules, METHOD.replace("return", "assert self.local.client < 2; return"))
    with pytest.raises(AssertionError):
        run(compose(config))
    folder = compose(config).run_folder
    assert (folder / "config.yaml").exists()
    edit(modules, METHOD)
    repaired = run(compose(config))
    forget_modules(modules)
    alone = run(compose([*config, f"run.dir={modules / 'alone'}"]))
    assert [row["loss"] for row in repaired.history] == [row["loss"] for row in alone.history]


def test_a_run_that_does_not_say_which_code_trained_it_is_refused(
    quick: list[str], modules: Path
) -> None:
    """Version 0.1 made such runs; a run with a built-in method needs no record."""
    edit(modules, METHOD)
    config = compose([*quick, "method=mine:Mine", "federation.rounds=1"])
    (run(config).folder / "code.json").unlink()
    with pytest.raises(
        UserError, match=r"does not say which code trained it, and mine\.py may have changed; type"
    ):
        run(config)
    built_in = compose([*quick, "federation.rounds=1"])
    assert not (run(built_in).folder / "code.json").exists()
    assert run(built_in).history


def test_a_start_that_was_killed_before_its_configuration_was_written_starts_again(
    quick: list[str], modules: Path
) -> None:
    edit(modules, METHOD)
    config = compose([*quick, "method=mine:Mine", "federation.rounds=1"])
    config.run_folder.mkdir(parents=True)
    (config.run_folder / "code.json").write_text("{")
    assert run(config).history


def test_a_finished_run_says_so_and_how_to_train_longer(quick: list[str], tmp_path: Path) -> None:
    words = [*quick, f"run.dir={tmp_path / 'run'}"]
    run(compose(words))
    display = Watching()
    run(compose(words), display)
    (note,) = display.notes
    assert "this run is finished, with 2 of 2 rounds" in note
    assert f"type run.dir=ANOTHER federation.rounds=4 --fork {tmp_path / 'run'}" in note
    more = [
        *quick,
        f"run.dir={tmp_path / 'more'}",
        "federation.rounds=4",
        f"fork={tmp_path / 'run'}",
    ]
    assert run(compose(more)).history[-1]["round"] == 4
