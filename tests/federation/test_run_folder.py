"""What a run folder must have before a run starts, and what it keeps."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Watching
from test_orchestrator import run

from fedx_pl.config import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints, ClientRecord, RunState
from fedx_pl.federation.client import ClientMemory, Update
from fedx_pl.federation.pending import Pending
from fedx_pl.reporting.tensorboard import RunWriter


def test_too_little_space_is_told_before_training(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    display = Watching()
    with pytest.raises(UserError, match=r"has 0.01 GB free, and this run needs about 0.05 GB; .*run.root=ANOTHER"):
        run(compose([*tiny, f"run.dir={tmp_path / 'run'}"]), display)
    assert display.steps == 0


def test_the_best_round_is_kept_beside_the_newest(tmp_path: Path) -> None:
    """Linear accuracy counts; kNN only where nothing else was measured."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    rows = []
    for round, linear in ((1, 30.0), (2, 50.0), (3, 40.0), (4, None)):
        rows.append({"round": round, "knn_top1": 10.0 * round} | ({"linear_top1": linear} if linear else {}))
        checkpoints.commit(RunState(round, list(rows)), {"w": torch.tensor(float(round))})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "round_00004"]
    state, weights = checkpoints.read(2)
    assert (state.round, weights["w"].item()) == (2, 2.0)
    with pytest.raises(UserError, match="no checkpoint of round 3"):
        checkpoints.read(3)


def test_an_update_is_pending_only_if_saving_it_is_cheaper_than_training_it_again(tmp_path: Path) -> None:
    """4 MB at 400 MB/s take 0.01 s; ten times that is 0.1 s."""
    update = Update(2, 7, {"w": torch.ones(1_000_000)}, ClientMemory({}), torch.zeros(3, 1), ("total",), 9)
    record, pending = ClientRecord(1, 3, 1, "", 7), Pending(tmp_path)
    pending.save(1, replace(update, seconds=0.09), record)
    assert list(pending.load(1)) == []
    pending.save(1, replace(update, seconds=0.11), record)
    pending.save(1, replace(update, seconds=0.11), record)  # Trained again after a power loss: folded in once.
    ((found, kept),) = pending.load(1)
    assert torch.equal(found.state["w"], update.state["w"])
    assert (found.client, found.num_images, found.images_seen, kept) == (2, 7, 9, record)
    assert list(pending.load(2)) == []
    pending.clear()
    assert list(pending.load(1)) == []


def test_what_was_logged_after_the_last_checkpoint_is_cut_off(tmp_path: Path) -> None:
    """Two writers as two processes would: what the second finds beyond the known length is gone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunWriter(tmp_path) as writer:
        writer.round(1, {"a": 1.0})
        known = writer.lengths()
        writer.round(2, {"a": 2.0})
    with RunWriter(tmp_path, known=known) as writer:
        writer.round(2, {"a": 2.5})
    events = EventAccumulator(str(tmp_path), purge_orphaned_data=False)
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("a")] == [(1, 1.0), (2, 2.5)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_of_the_cluster_ends_the_run_well(tiny: list[str], tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "fedx_pl", "train", *tiny, "federation.rounds=500", f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run/checkpoints/round_*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, getattr(signal, name))
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert f"stopped by {name}; the same command goes on after the last finished client: fedx-pl train" in error
    assert "Traceback" not in error


def test_a_run_that_was_cut_off_while_it_tidied_up_is_tidy_at_the_next_start(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round is committed, and what it replaces is still there."""
    config = compose([*tiny, "method=byol", "run.keep=1", f"run.dir={tmp_path / 'run'}"])
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
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").glob("round_*")] == ["round_00002"]
    best = Checkpoints(tmp_path / "run").latest()[0].best
    files = {file.name for file in (tmp_path / "run" / "clients").iterdir()}
    assert files == {f"{client:05d}_round_{n:05d}.safetensors" for client in range(3) for n in {best, 2}}
    assert not (tmp_path / "run" / "pending").exists()
