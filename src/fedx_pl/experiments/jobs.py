"""The runs of a sweep: what each one is, what is left to do for it, and what is kept of it."""

import contextlib
import dataclasses
import os
import platform
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedx_pl.config.build import brought
from fedx_pl.config.compose import code_words, load
from fedx_pl.config.schema import Config
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import Experiment
from fedx_pl.experiments.results import FORMAT, composed, read_evaluation
from fedx_pl.federation.run_folder import read_run
from fedx_pl.provenance import foreign_code

_START = "# commit "  # begins the line that a log has for each process of a run


@dataclass(eq=False, kw_only=True)
class Job:
    """One run of a sweep."""

    overrides: list[str]  # the arguments of `fedx-pl train`
    config: Config
    evaluate: list[str]  # the evaluations after training
    label: str = ""  # its cell for people, since names of runs may differ by their hash alone
    needs: list[str] = field(default_factory=list)  # hashes of runs that must be finished first
    process: subprocess.Popen[bytes] | None = None
    command: list[str] | None = None  # the command of the process
    log_start: int = 0  # where the process begins in the log

    @property
    def name(self) -> str:
        """The name of its result file, without the suffix."""
        return self.config.run_name

    @property
    def title(self) -> str:
        """The cell and the seed, for people."""
        return f"{self.label or self.config.name}, seed {self.config.seed}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.run_folder

    @property
    def log(self) -> Path:
        """The file with all that the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start_log(self, command: Sequence[str]) -> bytes:
        """The line that begins the log of a process."""
        return f"{_START}{current_commit()}: fedx-pl {' '.join(command)}\n".encode()

    def commits(self) -> str:
        """The commits of the source at each start of a process of this run, read from its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        starts = [line.removeprefix(_START) for line in lines if line.startswith(_START)]
        return ", ".join(dict.fromkeys(start.partition(":")[0] for start in starts))

    def last_message(self) -> str:
        """The error of the last process, or else the last line that it printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        # What earlier processes printed is not its fault.
        lines = text.rpartition(_START)[2].strip().splitlines()[1:]
        errors = [line for line in lines if line.startswith("error:")]
        return [*lines[-1:], *errors[-1:]][-1] if lines else "it printed nothing"

    def rounds_done(self) -> int:
        """The number of finished rounds, read from the run's table, which costs nothing."""
        with contextlib.suppress(OSError):
            return max(0, (self.folder / "metrics.csv").read_bytes().count(b"\n") - 1)
        return 0

    def stage(self) -> str:
        """The current stage of its process."""
        if self.command and self.command[0] == "evaluate":
            return f"evaluating {self.command[2]}"
        return f"{self.rounds_done()}/{self.config.federation.rounds}"

    def trained(self) -> bool:
        """Whether training is finished with this very configuration and the method's current code.

        The hash shows neither a new default nor an edited method.
        """
        rounds = self.config.federation.rounds
        if not (self.folder / "encoder.safetensors").exists() or self.rounds_done() < rounds:
            return False
        trusted = code_words(dataclasses.asdict(self.config))
        before = load(self.folder / "config.yaml", trusted=trusted)
        if before.content() != self.config.content() or self.trained_code() != self.code():
            return False
        with warnings.catch_warnings():
            # Training itself warns of a damaged round, and trains it again.
            warnings.simplefilter("ignore")
            return read_run(self.folder)[0].round >= rounds

    def code(self) -> str:
        """The hash of the method's code as it is now; empty for a method of this package."""
        return foreign_code.hash_of(*brought(self.config))

    def trained_code(self) -> str:
        """The hash of the code that the run folder was trained with."""
        record = foreign_code.read_record(self.folder)
        return record.hash if record else ""

    def next_command(self) -> list[str] | None:
        """The next command for this run, as arguments of ``fedx-pl``; None if it is finished."""
        if not self.trained():
            return ["train", *self.overrides, "--yes"]  # Nobody is there to be asked.
        left = [
            kind
            for kind in self.evaluate
            if read_evaluation(self.folder, kind, self.config) is None
        ]
        if not left:
            return None
        how = [word for word in self.overrides if word.startswith(("run.threads=", "run.device="))]
        if code_words(dataclasses.asdict(self.config)):
            # The sweep's own definition names the code, and it has just trained with it.
            how.append("allow_code=true")
        return ["evaluate", str(self.folder), left[0], *how]


def plan_jobs(
    experiments: Sequence[Experiment],
    profile: str,
    seeds: Sequence[int],
    more: Sequence[str] = (),
    only: Mapping[str, Sequence[str]] | None = None,
) -> list[Job]:
    """Lists all runs of some experiments, each once, the first seed of everything first.

    Args:
        experiments: what to run.
        profile: ``paper``, ``mini``, ...
        seeds: the seeds of the runs.
        more: overrides that say where and how to run; the result must not depend on them.
        only: for some axes, the labels to run.
    """
    jobs: dict[str, Job] = {}

    def add(overrides: list[str], evaluate: Sequence[str], needs: list[str], label: str) -> str:
        config = composed(overrides)
        job = jobs.setdefault(
            config.hash, Job(overrides=overrides, config=config, evaluate=[], label=label)
        )
        job.evaluate += [kind for kind in evaluate if kind not in job.evaluate]
        job.needs += needs
        return config.hash

    for seed in seeds:
        for experiment in experiments:
            for cell in experiment.cells(profile):
                labels = zip(experiment.axes, cell, strict=True)
                if any(label not in (only or {}).get(axis, [label]) for axis, label in labels):
                    continue
                label = " / ".join(cell)
                needed = experiment.needed(cell, profile, seed, more=more).values()
                needs = [
                    add(overrides, [], [], label=f"what {label} builds on") for overrides in needed
                ]
                overrides = experiment.overrides(cell, profile, seed, more=more)
                add(overrides, experiment.evaluate, needs, label=label)
    return list(jobs.values())


def collect(job: Job) -> dict[str, Any]:
    """Collects what is worth keeping of a finished run.

    The numbers are those of the checkpoint, which has a checksum; metrics.json is for people.

    Raises:
        ValueError: the run has fewer rounds than its configuration.
    """
    state, _ = read_run(job.folder)
    if state.round < job.config.federation.rounds:
        raise ValueError(f"its last undamaged round is {state.round}")
    evaluations = {
        kind: _without_details(results)
        for kind in EVALUATIONS
        if (results := read_evaluation(job.folder, kind, job.config)) is not None
    }
    return {
        "format": FORMAT,
        "name": job.config.name,
        "hash": job.config.hash,
        "seed": job.config.seed,
        "profile": job.config.profile,
        "commit": job.commits(),
        "code": job.trained_code(),
        "machine": machine(job.config),
        "seconds": round(state.seconds, 1),
        "config": job.config.content(),
        "untrained": state.untrained,
        "rounds": [{key: _six_digits(value) for key, value in row.items()} for row in state.rows],
        "evaluations": evaluations,
    }


def machine(config: Config) -> str:
    """Names what a run ran on: the same seed gives the same digits only on the same kind."""
    where = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    where += f", threads: {config.run.threads or os.cpu_count()}"
    if config.run.device != "cpu" and torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    return f"{where}, {platform.system()} {platform.machine()}, torch {torch.__version__}"


def current_commit() -> str:
    """The commit of the source, with a + if files have changed since; empty without git."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        result = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if git("status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _without_details(results: dict[str, Any]) -> dict[str, Any]:
    """Drops the accuracies by class and the confusion matrix, which the run folder keeps."""
    kept = {key: value for key, value in results.items() if key not in ("per_class", "confusion")}
    return {
        key: _without_details(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _six_digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
