"""The jobs of a sweep: what is left to do for a run."""

from pathlib import Path

import torch
from job_folders import evaluated, finished, job_in

from fedx_pl.config.compose import compose
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.round import GlobalState
from fedx_pl.federation.run_state import RunState
from fedx_pl.provenance.foreign_code import Record, write_record


def test_a_run_whose_newest_round_is_damaged_is_resumed(tmp_path: Path) -> None:
    job = job_in(tmp_path, "federation.rounds=2")
    finished(job)
    Checkpoints(job.folder).commit(
        RunState(round=1, rows=[{"round": 1}], seconds=1.0),
        GlobalState(weights={"w": torch.zeros(1)}),
    )
    assert job.next_command() is None
    state = job.folder / "checkpoints" / "round_00002" / "state.json"
    state.write_text(state.read_text().replace("12.5", "92.5"))
    (job.folder / "metrics.csv").write_bytes(b"round\n\xff1\n2\n")
    assert job.next_command() == ["train", *job.overrides, "--yes"]


def test_other_records_beside_the_code_do_not_train_a_run_again(
    tmp_path: Path,
) -> None:
    """One is the weights of FedCA's base: `train` itself compares them."""
    job = finished(job_in(tmp_path))
    write_record(job.folder, Record(objects={"weights of fedca.base": "0" * 64}))
    assert job.next_command() is None


def test_a_run_is_finished_when_all_its_evaluations_are(tmp_path: Path) -> None:
    """Training comes first, then each kind of evaluation that has no file yet.

    A file of an earlier round, or made with other settings, is not the experiment's.
    """
    job = job_in(tmp_path, evaluate=["semi", "geometry"])
    assert job.next_command() == ["train", *job.overrides, "--yes"]
    finished(job)
    first = ["evaluate", str(tmp_path / "run"), "semi", "run.threads=1"]
    assert job.next_command() == first
    evaluated(job, "semi", round_number=0)
    assert job.next_command() == first
    evaluated(job, "semi", epochs=1)
    assert job.next_command() == first
    evaluated(job, "semi")
    assert job.next_command() == ["evaluate", str(tmp_path / "run"), "geometry", "run.threads=1"]
    evaluated(job, "geometry")
    assert job.next_command() is None


def test_a_finished_run_of_another_default_does_not_count(tmp_path: Path) -> None:
    """A default may change without the hash; `train` then refuses the folder."""
    job = job_in(tmp_path)
    finished(job, compose([*job.overrides, "fedx.tau=0.2"]))
    assert job.next_command() == ["train", *job.overrides, "--yes"]
