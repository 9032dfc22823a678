"""A run that is killed again and again ends as one that was not interrupted.

This holds for weights, metrics, curves and private state.

FEDX_KILLS=300 pytest -m slow tests/federation/test_kills.py      # more than CI has time for
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METHODS = [
    (method, fedx)
    for method in ("simclr", "moco", "byol", "protocl", "fedu")
    for fedx in ("false", "true")
]
KILLS = int(os.environ.get("FEDX_KILLS", "30"))  # in all
TIMES = {
    "train_seconds",
    "round_seconds",
    "images_per_second",
    "data_seconds",
    "step_seconds",
    "aggregate_seconds",
    "evaluate_seconds",
}


class Nursery:
    """Runs federations in forked children, one at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).parents[1] / "nursery.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, words: list[str], fault: dict[str, Any] | None = None) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"words": words, "fault": fault}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> int:
        return self._line()

    def run(self, words: list[str], fault: dict[str, Any] | None = None) -> int:
        self.start(words, fault)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery is gone"
        return int(line)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.fixture
def small(tiny: list[str]) -> list[str]:
    return [
        *tiny,
        "data.limit=90",
        "federation.rounds=3",
        "federation.fraction=0.67",
        "optim.batch_size=16",
        "evaluation.linear.epochs=2",
        "evaluation.linear_every=1",
        "data.test_limit=30",
        "run.keep=1",
    ]


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves behind, except times."""
    (newest,) = (folder / "checkpoints").glob("round_*")
    state = json.loads((newest / "state.json").read_text())
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in state["rows"]]
    metrics = json.loads((folder / "metrics.json").read_text())["rounds"]
    best = json.loads((folder / "checkpoints" / "best" / "state.json").read_text())["round"]
    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False
    )
    events.Reload()
    curves = {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(
            ("system/share_", "system/memory_", "system/images_", "system/round_")
        )
    }
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.safetensors")}
    weights = {
        name: {key: t.tolist() for key, t in load_file(file).items()}
        for name, file in files.items()
    }
    return {
        "rows": rows,
        "csv": len((folder / "metrics.csv").read_text().splitlines()),
        "metrics": [
            {key: value for key, value in row.items() if key not in TIMES} for row in metrics
        ],
        "untrained": state["untrained"],
        "clients": state["clients"],
        "best": best,
        "curves": curves,
        "projector": {
            file.name: file.read_bytes()
            for file in (folder / "tensorboard" / "00000").rglob("*")
            if file.is_file()
        },
        "weights": weights,
        "left over": sorted(p.name for p in folder.rglob("*.tmp"))
        + sorted(p.name for p in folder.glob("pending")),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part, value in expected.items():
        assert found[part] == value, part
    for tag, points in found["curves"].items():
        assert len({step for step, _ in points}) == len(points), f"{tag} has a point twice"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "fedx"), METHODS)
def test_a_killed_run_ends_like_an_uninterrupted_one(
    nursery: Nursery, small: list[str], tmp_path: Path, method: str, fedx: str
) -> None:
    """Killed at random moments, and at random calls of fsync and rename within a checkpoint."""
    words = [*small, f"method={method}", f"fedx={fedx}"]
    started = time.monotonic()
    assert nursery.run([*words, f"run.dir={tmp_path / 'peace'}"]) == 0
    whole = time.monotonic() - started
    expected = outcome(tmp_path / "peace")
    assert len(expected["rows"]) == 3
    assert expected["curves"]["accuracy/knn_top1"][0][0] == 0

    draw = random.Random(f"{method} {fedx}")
    kills, again = 0, 0
    while kills < max(1, round(KILLS / len(METHODS))):
        folder = tmp_path / f"killed-{again}"
        disturbed, again = [*words, f"run.dir={folder}"], again + 1
        status = 1
        while status != 0:
            if draw.random() < 0.5:
                pid = nursery.start(disturbed)
                time.sleep(draw.uniform(0.02, 0.9) * whole)
                with_signal = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
                with suppress(ProcessLookupError):  # It was quicker.
                    os.kill(pid, with_signal)
                status = nursery.end()
            else:
                call, how = draw.choice(["fsync", "replace"]), draw.choice(["kill", "kill after"])
                status = nursery.run(
                    disturbed, {"call": call, "number": draw.randint(1, 45), "how": how}
                )
            assert status in (0, -signal.SIGKILL, -signal.SIGTERM, 3), status
            kills += status != 0
        assert_same(outcome(folder), expected)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_nothing_is_lost(
    nursery: Nursery, small: list[str], tmp_path: Path
) -> None:
    words = [*small, "method=byol"]
    assert nursery.run([*words, f"run.dir={tmp_path / 'peace'}"]) == 0
    folder = tmp_path / "full"
    for number in range(4, 60, 5):
        fault = {"call": "fsync", "number": number, "how": "full"}
        assert nursery.run([*words, f"run.dir={folder}"], fault) in (0, 4)
    assert nursery.run([*words, f"run.dir={folder}"]) == 0
    assert_same(outcome(folder), outcome(tmp_path / "peace"))


@pytest.mark.slow
def test_a_run_resumes_after_the_last_finished_client(
    nursery: Nursery, small: list[str], tmp_path: Path
) -> None:
    """Killed when two clients of the first round have saved their updates.

    Only the third trains again.
    """
    words = [
        *small,
        "method=byol",
        "federation.fraction=1",
        "federation.rounds=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    fault = {"call": "replace", "file": "pending/00002", "number": 1, "how": "kill"}
    assert nursery.run(words, fault) == -signal.SIGKILL
    assert len(list((tmp_path / "run" / "pending").glob("[0-9]*"))) == 2
    before = {
        file.name: file.stat().st_mtime_ns for file in (tmp_path / "run" / "clients").iterdir()
    }
    assert nursery.run(words) == 0
    after = {
        file.name: file.stat().st_mtime_ns for file in (tmp_path / "run" / "clients").iterdir()
    }
    assert len(before) == len(after) == 3
    assert [name for name in sorted(before) if before[name] != after[name]] == [sorted(before)[2]]
