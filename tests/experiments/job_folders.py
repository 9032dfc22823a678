"""Jobs and run folders of made-up runs, as training would leave them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.experiments.jobs import Job
from fedx_pl.experiments.results import evaluation_settings
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.round import GlobalState
from fedx_pl.federation.run_state import RunState


def finished(job: Job, config: Config | None = None, **row: float) -> Job:
    """Writes the run folder of a finished run, as far as a sweep reads it."""
    job.folder.mkdir(parents=True)
    (job.folder / "config.yaml").write_text((config or job.config).to_yaml())
    rounds = range(1, job.config.federation.rounds + 1)
    (job.folder / "metrics.csv").write_text("\n".join(["round", *map(str, rounds), ""]))
    rows = [{"round": number, **(row or {"linear_top1": 12.5})} for number in rounds]
    state = RunState(round=rounds[-1], rows=rows, seconds=3.0)
    Checkpoints(job.folder).commit(state, GlobalState(weights={"w": torch.zeros(1)}))
    (job.folder / "encoder.safetensors").touch()
    return job


def job_in(tmp_path: Path, *words: str, evaluate: Sequence[str] = (), name: str = "run") -> Job:
    """A job of one round whose run folder is `name`."""
    overrides = [f"run.dir={tmp_path / name}", "federation.rounds=1", "run.threads=1", *words]
    return Job(overrides=overrides, config=compose(overrides), evaluate=list(evaluate))


def evaluated(job: Job, kind: str, round_number: int = 1, **settings: object) -> None:
    """Writes an evaluation into the run folder."""
    document = {
        "round": round_number,
        "settings": evaluation_settings(kind, job.config) | settings,
        "results": {"x": 1.0},
    }
    (job.folder / "evaluation").mkdir(exist_ok=True)
    (job.folder / "evaluation" / f"{kind}.json").write_text(json.dumps(document))
