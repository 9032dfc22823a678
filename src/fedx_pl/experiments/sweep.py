"""Runs experiments, each run in a process of its own; finished runs are not run again.

A finished run leaves one small file in the results folder, ``NAME-sSEED-HASH.json``, which is all
that the report needs; its run folder stays where it is. An interrupted run resumes after its last
finished round.
"""

import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedx_pl.display import Display
from fedx_pl.errors import UserError, for_terminal
from fedx_pl.experiments.jobs import Job, collect, machine
from fedx_pl.experiments.results import changes, read_result, read_results
from fedx_pl.files import is_locked, write_atomically
from fedx_pl.printing import measured


class _Display(Display):
    """The display of a sweep, with what is being done in a line of its own."""

    now = ""

    def below(self) -> list[Text]:
        return [Text(for_terminal(self.now))] if self.now else []


class Sweep:
    """Runs jobs, several at once, and writes a result file for each."""

    def __init__(self, jobs: Sequence[Job], results: Path, workers: int, console: Console) -> None:
        """Finds out which jobs are finished.

        Args:
            jobs: from `plan_jobs`.
            results: the folder of the result files.
            workers: how many runs go at once.
            console: where to print.
        """
        self.jobs = list(jobs)
        self.results = results
        self.workers = workers
        self.console = console
        left = [job for job in jobs if not self._is_done(job)]
        # A run that others build on must be there with its weights, not only with its result.
        needed = {run_hash for job in left for run_hash in job.needs}
        self.waiting = [
            job for job in jobs if job in left or (job.config.hash in needed and not job.trained())
        ]
        self.done = [job for job in jobs if job not in self.waiting]
        self._todo = [*self.waiting]
        self.running: list[Job] = []
        self.failed: list[Job] = []

    def run(self) -> list[Job]:
        """Runs all that is left; returns the jobs that failed."""
        # As Ctrl-C: the runs must not outlive the sweep.
        previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with _Display(self.console, "starting") as display:
                while self.waiting or self.running:
                    done = self._rounds_done()
                    total = max(1, done + self.rounds_left())
                    runs = f"{len(self.done)} of {len(self.jobs)} runs"
                    display.now = self._now()
                    line = f"{runs}: {display.now}" if display.now else runs
                    display.update(done, total, runs, line=line)
                    self._start()
                    time.sleep(0.5)
                    self._check_processes()
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, previous_handler)
        return self.failed

    def rounds_left(self) -> int:
        """The rounds left of all runs that did not fail; an interrupted run keeps its rounds."""
        return sum(
            job.config.federation.rounds - job.rounds_done()
            for job in [*self.waiting, *self.running]
        )

    def expected_seconds(self) -> float | None:
        """The time left by the median round of earlier results on such a machine; None without."""
        try:
            results, _ = read_results(self.results)
        except UserError:
            return None
        machines = {machine(job.config) for job in self._todo}
        rows = (row for result in results if result.machine in machines for row in result.rows)
        seconds = [row["round_seconds"] for row in rows if "round_seconds" in row]
        return statistics.median(seconds) * self.rounds_left() / self.workers if seconds else None

    def _now(self) -> str:
        """Describes the jobs that run now."""
        if not self.running:
            locked = [job.title for job in self.waiting if is_locked(job.folder)]
            if locked:
                return f"waiting for the processes that train {'; '.join(locked)} already"
        more = ["evaluations come on top"] if any(job.evaluate for job in self._todo) else []
        return ", ".join([*(f"{job.title} {job.stage()}" for job in self.running), *more])

    def _rounds_done(self) -> int:
        """The rounds of all jobs that were to do at the start; a finished run counts in full."""
        unfinished = {id(job) for job in [*self.waiting, *self.running, *self.failed]}
        return sum(
            job.rounds_done() if id(job) in unfinished else job.config.federation.rounds
            for job in self._todo
        )

    def _is_done(self, job: Job) -> bool:
        """Whether its result is complete, and made with the current defaults and code."""
        evaluations = self._evaluations(job)
        return evaluations is not None and all(kind in evaluations for kind in job.evaluate)

    def _evaluations(self, job: Job) -> Mapping[str, Any] | None:
        """The evaluations in its result; None without a result that counts."""
        with contextlib.suppress(OSError, ValueError):
            result = read_result(self.results / f"{job.name}.json")
            if not changes(result, job.config) and result.code == job.code():
                return result.evaluations
        return None

    def _start(self) -> None:
        """Starts as many jobs as there are free workers; fails those that build on a failed one."""
        failed = {job.config.hash for job in self.failed}
        for job in [job for job in self.waiting if failed & set(job.needs)]:
            self.waiting.remove(job)
            self._fail(job, "a run that it builds on failed")
        unfinished = {job.config.hash for job in [*self.waiting, *self.running]}
        # A locked run is trained by another sweep, or by a process that outlived a killed one.
        ready = (
            job
            for job in self.waiting
            if not unfinished & set(job.needs) and not is_locked(job.folder)
        )
        for job in list(itertools.islice(ready, self.workers - len(self.running))):
            self.waiting.remove(job)
            self.running.append(job)
            self._launch(job)

    def _launch(self, job: Job) -> None:
        """Starts the next process of a run, or writes its result if none is left."""
        try:
            command = job.next_command()
            if command is None:
                self._write_result(job)
                return
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            self.running.remove(job)
            self._fail(job, f"{job.folder} cannot be read ({error}); delete it to run it again")
            return
        if command == job.command:
            # It ended well and left the same to do, which would repeat forever.
            self.running.remove(job)
            self._fail(job, f"exit code 0: {job.last_message()}")
            return
        job.command = command
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab") as log:
            job.log_start = log.tell()
            log.write(job.start_log(command))
            log.flush()
            job.process = subprocess.Popen(
                [sys.executable, "-m", "fedx_pl", *command], stdout=log, stderr=subprocess.STDOUT
            )

    def _write_result(self, job: Job) -> None:
        """Writes the result of a finished run; keeps evaluations whose run folder is gone."""
        result = collect(job)
        result["evaluations"] = {**(self._evaluations(job) or {}), **result["evaluations"]}
        write_atomically(self.results / f"{job.name}.json", json.dumps(result, indent=1).encode())
        self.running.remove(job)
        self.done.append(job)
        accuracies = [row["linear_top1"] for row in result["rounds"] if "linear_top1" in row]
        accuracy = f", linear {measured(float(accuracies[-1]))}" if accuracies else ""
        self._print(job, f"done{accuracy}")

    def _check_processes(self) -> None:
        """Starts what follows a process that has ended; notes those that failed."""
        for job in [*self.running]:
            assert job.process is not None
            code = job.process.poll()
            if code is None:
                continue
            if code == 0:
                self._launch(job)
                continue
            self.running.remove(job)
            if self._is_trained_elsewhere(job):
                job.command = None
                self.waiting.append(job)
                self._print(job, "another process trains it; waiting")
            else:
                self._fail(job, f"exit code {code}: {job.last_message()}")

    def _is_trained_elsewhere(self, job: Job) -> bool:
        """Whether its process failed because another sweep had just started the same run."""
        output = job.log.read_bytes()[job.log_start :].decode(errors="replace")
        return f"error: another process is training in {job.folder}" in output

    def _fail(self, job: Job, reason: str) -> None:
        self.failed.append(job)
        self._print(job, f"failed: {reason}")

    def _print(self, job: Job, message: str) -> None:
        self.console.print(f"{job.name} ({job.title}): {message}", soft_wrap=True)

    def _stop(self) -> None:
        """Ends the runs that are still going; each loses at most its current round."""
        processes = [job.process for job in self.running if job.process is not None]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
