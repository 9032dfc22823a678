"""Runs the experiments: each run is a process of its own, and what is finished is not run again.

A finished run leaves one small file in the results folder, ``NAME-sSEED-HASH.json``, which is all that the report
needs; its run folder stays where it is. A run that was cut off goes on from its last round.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from fedx_pl.config.build import brought
from fedx_pl.config.compose import code_words, compose, load
from fedx_pl.config.schema import Config
from fedx_pl.display import Display
from fedx_pl.errors import UserError, for_terminal
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import Experiment
from fedx_pl.experiments.results import FORMAT, changes, read_evaluation, read_result, read_results
from fedx_pl.federation.run_folder import read_run
from fedx_pl.files import is_locked, write_atomically
from fedx_pl.provenance import foreign_code

_START = "# commit "  # Begins the line that a log has for each process of a run.


@dataclass(eq=False, kw_only=True)
class Job:
    """One run of a sweep."""

    overrides: list[str]  # of `fedx-pl train`
    config: Config
    evaluate: list[str]  # measured after training
    label: str = ""  # of its cell, for people: names of runs may be alike but for the hash
    needs: list[str] = field(default_factory=list)  # hashes of runs that must be finished first
    process: subprocess.Popen[bytes] | None = None
    command: list[str] | None = None  # of the process
    log_start: int = 0  # where the process begins in the log

    @property
    def name(self) -> str:
        """Of its result."""
        return self.config.run_name

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.label or self.config.name}, seed {self.config.seed}"

    @property
    def folder(self) -> Path:
        """Of its run."""
        return self.config.run_folder

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def commits(self) -> str:
        """Of the source, whenever a process of this run was started: they are in its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        starts = [
            line.removeprefix(_START).partition(":")[0] for line in lines if line.startswith(_START)
        ]
        return ", ".join(dict.fromkeys(starts))

    def rounds_done(self) -> int:
        """Read from the run's own table, so that it costs nothing to follow."""
        with contextlib.suppress(OSError):
            return max(0, (self.folder / "metrics.csv").read_bytes().count(b"\n") - 1)
        return 0

    def stage(self) -> str:
        """What its process is doing."""
        if self.command and self.command[0] == "evaluate":
            return f"evaluating {self.command[2]}"
        return f"{self.rounds_done()}/{self.config.federation.rounds}"

    def trained(self) -> bool:
        """Whether training has come to its end, with this very configuration and with today's code of the method.

        The hash shows neither a new default nor an edited method.
        """
        if (
            not (self.folder / "encoder.safetensors").exists()
            or self.rounds_done() < self.config.federation.rounds
        ):
            return False
        before = load(
            self.folder / "config.yaml", trusted=code_words(dataclasses.asdict(self.config))
        )
        if before.content() != self.config.content() or self.trained_code() != self.code():
            return False
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Training tells of a damaged round, and trains it again.
            return read_run(self.folder)[0].round >= self.config.federation.rounds

    def code(self) -> str:
        """The hash of the method's code as it is now; empty for a method of this package."""
        return foreign_code.hash_of(*brought(self.config))

    def trained_code(self) -> str:
        """The hash of the code that the run folder was trained with."""
        record = foreign_code.read_record(self.folder)
        return record.hash if record else ""

    def next_command(self) -> list[str] | None:
        """What is still to be done for this run, as arguments of ``fedx-pl``."""
        if not self.trained():
            return ["train", *self.overrides, "--yes"]  # Nobody is there to be asked.
        left = [
            kind
            for kind in self.evaluate
            if read_evaluation(self.folder, kind, self.config) is None
        ]
        how = [word for word in self.overrides if word.startswith(("run.threads=", "run.device="))]
        if code_words(dataclasses.asdict(self.config)):
            how.append(
                "allow_code=true"
            )  # The sweep's own definition names it, and it has just trained.
        return ["evaluate", str(self.folder), left[0], *how] if left else None


def plan_jobs(
    experiments: Sequence[Experiment],
    profile: str,
    seeds: Sequence[int],
    more: Sequence[str] = (),
    only: Mapping[str, Sequence[str]] | None = None,
) -> list[Job]:
    """All runs of some experiments, each once, the first seed of everything first.

    Args:
        experiments: what to run.
        profile: ``paper``, ``mini``, ...
        seeds: of the runs.
        more: overrides that say where and how to run; the result must not depend on them.
        only: for some axes, the labels to run.
    """
    found: dict[str, Job] = {}

    def add(overrides: list[str], evaluate: Sequence[str], needs: list[str], label: str) -> str:
        config = compose(overrides)
        job = found.setdefault(
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
                needed = experiment.needed(cell, profile, seed, more=more).values()
                label = " / ".join(cell)
                needs = [
                    add(overrides, [], [], label=f"what {label} builds on") for overrides in needed
                ]
                add(
                    experiment.overrides(cell, profile, seed, more=more),
                    experiment.evaluate,
                    needs,
                    label=label,
                )
    return list(found.values())


def collect(job: Job) -> dict[str, Any]:
    """What is worth keeping of a finished run.

    The numbers are the checkpoint's, which has a checksum; metrics.json, which has the same, is for people.
    """
    state, _ = read_run(job.folder)
    if state.round < job.config.federation.rounds:
        raise ValueError(f"round {state.round} is the last that is whole")
    found = {kind: read_evaluation(job.folder, kind, job.config) for kind in EVALUATIONS}
    evaluations = {
        kind: _without_details(results) for kind, results in found.items() if results is not None
    }
    return {
        "format": FORMAT, "name": job.config.name, "hash": job.config.hash, "seed": job.config.seed,
        "profile": job.config.profile, "commit": job.commits(), "code": job.trained_code(),
        "machine": machine(job.config),
        "seconds": round(state.seconds, 1), "config": job.config.content(), "untrained": state.untrained,
        "rounds": [{key: _short(value) for key, value in row.items()} for row in state.rows],
        "evaluations": evaluations,
    }  # fmt: skip


class _Display(Display):
    """The display of a sweep, with what is being done in a line of its own."""

    now = ""

    def below(self) -> list[Text]:
        return [Text(for_terminal(self.now))] if self.now else []


class Sweep:
    """Runs jobs, several at once, and writes a result file for each."""

    def __init__(self, jobs: Sequence[Job], results: Path, workers: int, console: Console) -> None:
        """Sorts out what is finished.

        Args:
            jobs: from `plan_jobs`.
            results: folder of the result files.
            workers: runs at once.
            console: where to write.
        """
        self.results, self.workers, self.console = results, workers, console
        self.jobs = list(jobs)
        left = [job for job in jobs if not self._is_done(job)]
        needed = {
            name for job in left for name in job.needs
        }  # These must be there with their weights.
        self.waiting = [
            job for job in jobs if job in left or (job.config.hash in needed and not job.trained())
        ]
        self.done = [job for job in jobs if job not in self.waiting]
        self._todo = [*self.waiting]
        self.running: list[Job] = []
        self.failed: list[Job] = []

    def run(self) -> list[Job]:
        """Runs all that is left; returns the runs that failed."""
        # As Ctrl-C: the runs must not outlive the sweep.
        usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with _Display(self.console, "starting") as display:
                while self.waiting or self.running:
                    done = self._rounds()
                    total = max(1, done + self.rounds_left())
                    runs = f"{len(self.done)} of {len(self.jobs)} runs"
                    display.now = self._now()
                    line = f"{runs}: {display.now}" if display.now else runs
                    display.update(done, total, runs, line=line)
                    self._start()
                    time.sleep(0.5)
                    self._look_after()
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, usual)
        return self.failed

    def rounds_left(self) -> int:
        """Of all runs that did not fail; what an interrupted run has done is done."""
        return sum(
            job.config.federation.rounds - job.rounds_done()
            for job in [*self.waiting, *self.running]
        )

    def expected_seconds(self) -> float | None:
        """By the median round of the results that a machine like this one has left here; None if there are none."""
        try:
            results, _ = read_results(self.results)
        except UserError:
            return None
        here = {machine(job.config) for job in self._todo}
        rows = (row for result in results if result.machine in here for row in result.rows)
        seconds = [row["round_seconds"] for row in rows if "round_seconds" in row]
        return statistics.median(seconds) * self.rounds_left() / self.workers if seconds else None

    def _now(self) -> str:
        """What is being done."""
        if not self.running:
            busy = [job.title for job in self.waiting if is_locked(job.folder)]
            if busy:
                return f"waiting for the processes that train {'; '.join(busy)} already"
        more = ["evaluations come on top"] if any(job.evaluate for job in self._todo) else []
        return ", ".join([*(f"{job.title} {job.stage()}" for job in self.running), *more])

    def _rounds(self) -> int:
        """Rounds of all runs that were waiting at the start; a finished run counts in full."""
        open_jobs = {id(job) for job in [*self.waiting, *self.running, *self.failed]}
        return sum(
            j.rounds_done() if id(j) in open_jobs else j.config.federation.rounds
            for j in self._todo
        )

    def _is_done(self, job: Job) -> bool:
        """Whether its result is there, whole, with all evaluations, and made with today's defaults and code."""
        found = self._evaluations(job)
        return found is not None and all(kind in found for kind in job.evaluate)

    def _evaluations(self, job: Job) -> Mapping[str, Any] | None:
        """Those in its result; None without a result that counts."""
        with contextlib.suppress(OSError, ValueError):
            result = read_result(self.results / f"{job.name}.json")
            return (
                None
                if changes(result, job.config) or result.code != job.code()
                else result.evaluations
            )
        return None

    def _start(self) -> None:
        failed = {job.config.hash for job in self.failed}
        for job in [job for job in self.waiting if failed & set(job.needs)]:
            self.waiting.remove(job)
            self._fail(job, "a run that it builds on failed")
        unfinished = {job.config.hash for job in [*self.waiting, *self.running]}
        ready = [job for job in self.waiting if not unfinished & set(job.needs)]
        free = self.workers - len(self.running)
        # A locked one is trained by another sweep, or by a process that outlived one that was killed: it can wait.
        for job in itertools.islice((job for job in ready if not is_locked(job.folder)), free):
            self.waiting.remove(job)
            self.running.append(job)
            self._launch(job)

    def _fail(self, job: Job, why: str) -> None:
        self.failed.append(job)
        self.console.print(f"{job.name} ({job.title}): failed: {why}", soft_wrap=True)

    def _launch(self, job: Job) -> None:
        """The next process of a run; without one left, its result is written."""
        try:
            command = job.next_command()
            if command is None:
                self._keep(job)
                return
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            UserError,
        ) as error:  # A damaged file in its folder.
            self.running.remove(job)
            self._fail(job, f"{job.folder} cannot be read ({error}); delete it to run it again")
            return
        if (
            command == job.command
        ):  # It ended well and left the same to do: that would go on for ever.
            self.running.remove(job)
            self._fail(job, f"exit code 0: {_last_words(job.log)}")
            return
        job.command = command
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab") as log:
            job.log_start = log.tell()
            log.write(f"{_START}{current_commit()}: fedx-pl {' '.join(job.command)}\n".encode())
            log.flush()
            job.process = subprocess.Popen(
                [sys.executable, "-m", "fedx_pl", *job.command],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _keep(self, job: Job) -> None:
        """Writes the result of a finished run; evaluations whose run folder is gone stay in it."""
        result = collect(job)
        result["evaluations"] = {**(self._evaluations(job) or {}), **result["evaluations"]}
        write_atomically(self.results / f"{job.name}.json", json.dumps(result, indent=1).encode())
        self.running.remove(job)
        self.done.append(job)
        last = [row["linear_top1"] for row in result["rounds"] if "linear_top1" in row]
        accuracy = f", linear {last[-1]:.2f}" if last else ""
        self.console.print(f"{job.name} ({job.title}): done{accuracy}", soft_wrap=True)

    def _look_after(self) -> None:
        for job in [*self.running]:
            assert job.process is not None
            code = job.process.poll()
            if code is None:
                continue
            if code == 0:
                self._launch(job)
                continue
            self.running.remove(job)
            if self._came_second(job):
                job.command = None
                self.waiting.append(job)
                self.console.print(
                    f"{job.name} ({job.title}): another process trains it; waiting", soft_wrap=True
                )
            else:
                self._fail(job, f"exit code {code}: {_last_words(job.log)}")

    def _came_second(self, job: Job) -> bool:
        """Whether a process failed because one of another sweep had taken up the same run a moment before."""
        said = job.log.read_bytes()[job.log_start :].decode(errors="replace")
        return f"error: another process is training in {job.folder}" in said

    def _stop(self) -> None:
        """Ends the runs that are still going; each loses at most the round it was in."""
        processes = [job.process for job in self.running if job.process is not None]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def machine(config: Config) -> str:
    """On what a run ran: the same seed gives the same digits only with the same kernels and threads."""
    cuda = config.run.device != "cpu" and torch.cuda.is_available()
    cpu = f"CPU with {torch.backends.cpu.get_cpu_capability()}, threads: {config.run.threads or os.cpu_count()}"
    where = torch.cuda.get_device_name() if cuda else cpu
    return f"{where}, {platform.system()} {platform.machine()}, torch {torch.__version__}"


def current_commit() -> str:
    """Of the source, with a + if it has been changed since; empty if there is no git."""
    here = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "--", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


def resolve_profile(name: str) -> str:
    """``auto``: the paper's with a GPU, else `mini`."""
    return ("paper" if torch.cuda.is_available() else "mini") if name == "auto" else name


def places(words: Sequence[str], workers: int) -> list[str]:
    """Overrides that say where and how to run; what is run is the definition's business."""
    if workers < 1:
        raise UserError(f"--jobs {workers} runs nothing; type --jobs 1 or more")
    for word in words:
        if word.startswith("run.dir="):
            raise UserError(
                f"{word} would put all runs into one folder; type run.root={word.partition('=')[2]}"
            )
        if not word.startswith(
            ("run.", "data.root=", "data.cache=", "data.download=", "data.workers=")
        ):
            raise UserError(
                f"{word} would change the experiment; write it into its YAML file, or use fedx-pl train"
            )
    threads = max(1, (os.cpu_count() or 1) // workers)
    shared = [f"run.threads={threads}"] if workers > 1 else []
    return [*shared, *words]


def _without_details(results: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without its accuracies by class and its confusion matrix, which the run folder keeps."""
    kept = {key: value for key, value in results.items() if key not in ("per_class", "confusion")}
    return {
        key: _without_details(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _last_words(log: Path) -> str:
    """What a failed process of a run said: its error if there is one, else its last line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = (
        text.rpartition(_START)[2].strip().splitlines()[1:]
    )  # What earlier processes said is not its fault.
    errors = [line for line in lines if line.startswith("error:")]
    return [*lines[-1:], *errors[-1:]][-1] if lines else "it printed nothing"
