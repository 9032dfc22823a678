"""Real commands on real CIFAR-10, from data to summary, as a new user runs them; slow."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def fedx_pl(*arguments: str, timeout: int) -> str:
    command = [sys.executable, "-m", "fedx_pl", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_byol_with_fedx_learns_on_cifar10_in_the_cpu_profile(tmp_path: Path) -> None:
    overrides = [
        "data=cifar10",
        "method=byol",
        "fedx=true",
        "profile=cpu",
        "federation.rounds=16",  # half of them: enough to learn
        f"run.dir={tmp_path / 'run'}",
    ]
    out = fedx_pl("train", *overrides, timeout=7200)
    assert "profile cpu" in out
    assert "PROFILE=paper" in out
    assert re.search(r"about \d+ (min|s)", out)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    gain = metrics["rounds"][-1]["linear_top1"] - metrics["untrained"]["linear_top1"]
    assert gain > 4, f"linear accuracy gained only {gain:.2f} points over the untrained network"
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert [int(row["round"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(
        bool(row["knn_top1"]) == (int(row["round"]) % 8 == 0) for row in rows
    )  # evaluation.knn_every
