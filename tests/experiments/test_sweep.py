"""A sweep resumes interrupted runs, does not repeat finished ones, and names those that fail."""

import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import EXPERIMENTS, METHOD, PATIENCE, definition, forget_modules
from job_folders import evaluated, finished, job_in
from rich.console import Console

from fedx_pl.cli.main import main
from fedx_pl.config import registry
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.experiments.definition import parse_places
from fedx_pl.experiments.jobs import Job
from fedx_pl.experiments.results import changes, evaluation_settings, read_result
from fedx_pl.experiments.sweep import Sweep
from fedx_pl.files import is_locked, lock, sealed
from fedx_pl.provenance.foreign_code import Record, code_of, write_record


@pytest.fixture
def experiment(quick: list[str], tmp_path: Path) -> Path:
    """An experiment of two runs that work and one that does not."""
    what = " ".join(
        word for word in quick if not word.startswith(("run.", "data.root", "data.download"))
    )
    return definition(
        tmp_path / "experiments",
        f"title: mine\nbase: {what}\n"
        "axes:\n  variant: {plain: method=simclr, + FedX: fedx=true, "
        "broken: partition.file=/nowhere.json}\n"
        "baseline: plain\n",
    )


def where(quick: list[str]) -> list[str]:
    return [word for word in quick if word.startswith(("run.root", "data.root", "data.download"))]


def test_a_sweep_continues_after_a_failure_and_runs_nothing_twice(
    experiment: Path, quick: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep",
        str(experiment),
        "profile=paper",
        *where(quick),
        "--definitions",
        str(experiment.parent),
    ]
    assert main([*words, "--jobs", "2"]) == 1
    output = capsys.readouterr().out
    assert "3 runs, 0 finished already, 6 rounds to go, 2 at once" in output
    assert "(broken, seed 0): failed: exit code 2: error: partition.file=/nowhere.json" in output
    results = sorted((experiment.parent / "results" / "paper").glob("*.json"))
    assert len(results) == 2
    plain = json.loads(results[-1].read_text())
    assert [row["round"] for row in plain["rounds"]] == [1, 2]
    assert plain["rounds"][-1]["linear_top1"] >= 0
    assert plain["seconds"] > 0
    assert {"hash", "commit", "seed", "config", "untrained", "machine"} <= plain.keys()

    before = {file: file.stat().st_mtime_ns for file in results}
    assert main([*words, "--only", "variant=plain,+ FedX"]) == 0
    assert "2 runs, 2 finished already, 0 rounds to go" in capsys.readouterr().out
    assert before == {file: file.stat().st_mtime_ns for file in results}

    assert main(["report", str(results[0].parent), "--definitions", str(experiment.parent)]) == 0
    page = (results[0].parent / "report.md").read_text()
    assert f"{plain['rounds'][-1]['linear_top1']:.2f} (1)" in page
    assert "one seed: no statement" in page


# Trains two rounds, and the third once the file `gate` exists.
WAITS = """
import time
from pathlib import Path

from fedx_pl.methods import SimCLR

class Waits(SimCLR):
    def __init__(self, backbone, gate: str = "", **simclr):
        super().__init__(backbone, **simclr)
        self.gate = Path(gate)

    def on_round_start(self):
        super().on_round_start()
        while self.local.round == 3 and not self.gate.exists():
            self.gate.with_name("gate.here").touch()
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_an_interrupted_sweep_resumes(quick: list[str], tmp_path: Path) -> None:
    """SIGTERM ends the runs as well; the next sweep resumes after the last finished round."""
    what = " ".join(
        word
        for word in quick
        if not word.startswith(("run.", "data.root", "data.download", "federation.r"))
    )
    (tmp_path / "waits.py").write_text(WAITS)
    words = f"method=waits:Waits method.gate={tmp_path / 'gate'} federation.rounds=4"
    words += " evaluation.knn_every=4"
    axes = f"axes:\n  variant: {{plain: {words}}}"
    path = definition(tmp_path / "experiments", f"title: mine\nbase: {what}\n{axes}\n")
    command = [sys.executable, "-m", "fedx_pl", "sweep", str(path), "profile=paper", *where(quick)]
    command += ["--definitions", str(path.parent), "--yes"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + PATIENCE
    while (
        not (tmp_path / "gate.here").exists()
        and first.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=PATIENCE)
    assert first.returncode == 130, errors
    (table,) = (tmp_path / "runs").glob("*/metrics.csv")
    assert table.read_text().count("\n") - 1 == 2
    assert not list(path.parent.glob("results/*/*.json"))
    lock(table.parent).close()  # No process trains there any more.

    (tmp_path / "gate").touch()
    second = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert second.returncode == 0, second.stdout
    log = next((tmp_path / "runs").glob("*.log")).read_text()
    assert "resuming after round 2 of 4" in log
    assert len(list(path.parent.glob("results/paper/*.json"))) == 1


def test_a_dry_run_lists_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "sweep",
        "regularizers",
        "profile=mini",
        "--definitions",
        str(EXPERIMENTS),
        "--results",
        str(tmp_path),
    ]
    assert main([*words, "--dry-run", "--seeds", "0,1"]) == 0
    output = capsys.readouterr().out
    assert "8 runs, 0 finished already" in output
    lines = [line for line in output.splitlines() if line.startswith("fedx-pl train")]
    assert len(lines) == 8
    assert sum("regularizer=scaffold" in line for line in lines) == 2
    for line in lines:
        compose(line.split()[2:])


def sweep(jobs: list[Job], tmp_path: Path) -> tuple[Sweep, str]:
    output = io.StringIO()
    runner = Sweep(jobs, tmp_path / "results", 1, Console(file=output, width=500))
    runner.run()
    return runner, output.getvalue()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        (lambda _: None, True),
        (lambda result: result["config"]["fedx"].pop("queue_size"), True),  # a newer key
        (lambda result: result["config"]["fedx"].update(tau=0.2), False),  # another default
        (lambda result: result["rounds"].pop(), False),  # interrupted
        (lambda result: result["rounds"].clear(), False),
        (lambda result: result.pop("machine"), False),  # left out by the report
        (lambda result: result.update(format=0), False),
    ],
)
def test_a_result_counts_if_the_report_would_use_it(
    change: Callable[[dict[str, Any]], object], counts: bool, tmp_path: Path
) -> None:
    job = finished(job_in(tmp_path, "federation.rounds=2"))
    sweep([job], tmp_path)
    file = tmp_path / "results" / f"{job.name}.json"
    result = json.loads(file.read_text())
    change(result)
    file.write_text(json.dumps(result))
    assert (Sweep([job], tmp_path / "results", 1, Console()).done == [job]) == counts


def test_a_truncated_result_does_not_count(tmp_path: Path) -> None:
    job = finished(job_in(tmp_path))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / f"{job.name}.json").write_text("{")
    assert Sweep([job], tmp_path / "results", 1, Console()).waiting == [job]


def test_the_expected_time_comes_from_the_rounds_of_earlier_runs(tmp_path: Path) -> None:
    """Three of five rounds are left, a round took 10 s, two runs go at once: 15 s."""
    begun = job_in(tmp_path, "federation.rounds=5", name="begun")
    begun.folder.mkdir()
    (begun.folder / "metrics.csv").write_text("round\n1\n2\n")
    done = finished(job_in(tmp_path, "seed=1", name="done"), round_seconds=10.0)
    console = Console(file=io.StringIO())
    assert Sweep([done, begun], tmp_path / "results", 2, console).expected_seconds() is None
    sweep([done], tmp_path)
    left = Sweep([done, begun], tmp_path / "results", 2, console)
    assert left.rounds_left() == 3
    assert left.expected_seconds() == 15.0
    elsewhere = job_in(tmp_path, "federation.rounds=5", "run.threads=7", name="elsewhere")
    assert Sweep([elsewhere], tmp_path / "results", 2, console).expected_seconds() is None


def test_the_rounds_of_a_failed_run_are_not_left_to_do(tmp_path: Path) -> None:
    """They will not be run, and do not count as done either."""
    bad, good = (
        job_in(tmp_path, "federation.rounds=20", f"seed={i}", name=f"{i}") for i in range(2)
    )
    sweep = Sweep([bad, good], tmp_path / "results", 1, Console(file=io.StringIO()))
    assert sweep.rounds_left() == 40
    sweep.waiting.remove(bad)
    sweep.failed.append(bad)
    assert sweep.rounds_left() == 20


def test_a_sweep_waits_for_a_run_that_another_process_trains(tmp_path: Path) -> None:
    """The runs of a killed sweep keep training; the next sweep uses their results."""
    job = finished(job_in(tmp_path))
    held = lock(job.folder)
    output = io.StringIO()
    runner = Sweep(
        [job], tmp_path / "results", 1, Console(file=output, width=80, force_terminal=True)
    )
    ended = threading.Event()

    def release() -> None:
        while "already" not in output.getvalue() and not ended.wait(0.05):
            pass
        if not ended.is_set():
            held.close()

    other = threading.Thread(target=release)
    other.start()
    try:
        assert runner.run() == []
        assert held.closed  # Another process trained there until then.
    finally:
        ended.set()
        other.join()
    assert runner.done == [job]
    for part in ("%", "ETA unknown", "waiting for the", "already"):  # All of it, on 80 columns.
        assert part in output.getvalue()


def test_checking_a_lock_does_not_take_it(tmp_path: Path) -> None:
    """Two sweeps may check the same folder while a run starts there."""
    lock(tmp_path).close()
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            assert not is_locked(tmp_path)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        assert not any(is_locked(tmp_path) for _ in range(200))
    finally:
        ended.set()
        for thread in asking:
            thread.join()
    with lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_run_starts_while_others_check_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check holds the lock for a moment; a process that starts then is not refused."""
    lock(tmp_path).close()
    asking = open(tmp_path / ".lock")  # noqa: SIM115
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("fedx_pl.files.time.sleep", lambda _: asking.close())
    lock(tmp_path).close()
    assert asking.closed


def test_a_sweep_waits_for_a_run_that_another_sweep_has_just_started(tmp_path: Path) -> None:
    class Second(Job):
        """Its process finds the folder locked; later the other process has finished."""

        def next_command(self) -> list[str] | None:
            return None if self.log.exists() else ["train"]

    job = finished(job_in(tmp_path))
    runner = Sweep([], tmp_path / "results", 1, Console(file=(output := io.StringIO()), width=300))
    second = Second(overrides=job.overrides, config=job.config, evaluate=[])
    second.log.write_text(
        f"# commit a: fedx-pl train\nerror: another process is training in {job.folder}; wait\n"
    )
    second.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    second.process.wait()
    runner.running.append(second)
    assert runner.run() == []
    assert "another process trains it; waiting" in output.getvalue()
    assert runner.done == [second]


def test_the_numbers_of_a_result_are_those_with_a_checksum(tmp_path: Path) -> None:
    """metrics.json may be damaged; a damaged evaluation is measured again."""
    job = finished(job_in(tmp_path, evaluate=["knn"]))
    (job.folder / "metrics.json").write_text(
        json.dumps({"rounds": [{"round": 1, "linear_top1": 92.5}]})
    )
    settings = evaluation_settings("knn", job.config)
    document = json.dumps(sealed({"round": 1, "settings": settings, "results": {"knn_top1": 12.5}}))
    (job.folder / "evaluation").mkdir()
    (job.folder / "evaluation" / "knn.json").write_text(document.replace("12.5", "92.5"))
    assert job.next_command()[:3] == ["evaluate", str(job.folder), "knn"]
    (job.folder / "evaluation" / "knn.json").write_text(document)
    _, output = sweep([job], tmp_path)
    assert "done, linear 12.50" in output
    assert (
        read_result(tmp_path / "results" / f"{job.name}.json").evaluations["knn"]["knn_top1"]
        == 12.5
    )


def test_a_failure_shows_the_error_of_the_process_that_failed(tmp_path: Path) -> None:
    class Killed(Job):
        def next_command(self) -> list[str]:
            return ["train", "nonsense=1"]

    job = job_in(tmp_path)
    job.log.parent.mkdir(exist_ok=True)
    job.log.write_text("# commit abc: fedx-pl train\nerror: of an earlier try\n")
    _, output = sweep([Killed(overrides=job.overrides, config=job.config, evaluate=[])], tmp_path)
    assert "nonsense" in output
    assert "an earlier try" not in output


def test_overrides_of_a_sweep_cannot_change_the_experiment() -> None:
    assert parse_places(["run.root=a", "data.root=b"], workers=1) == ["run.root=a", "data.root=b"]
    with pytest.raises(UserError, match=r"federation.rounds=2 would change the experiment"):
        parse_places(["federation.rounds=2"], workers=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table1", "--only", "data=SVHN"], "profile mini has no such run"),
        (["table1", "--seeds=-1"], "--seeds -1 are not whole numbers"),
        (["table1", "--seeds", "0,x"], "--seeds 0,x are not whole numbers"),
    ],
)
def test_a_sweep_of_nothing_is_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["profile=mini", "--definitions", str(EXPERIMENTS), "--dry-run"]
    assert main(["sweep", *words, *where]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_run_fails_alone(tmp_path: Path) -> None:
    bad = finished(job_in(tmp_path, "seed=1", name="a"))
    good = finished(job_in(tmp_path, "seed=2", name="b"))
    (bad.folder / "checkpoints" / "round_00001" / "state.json").write_text("{")
    runner, output = sweep([bad, good], tmp_path)
    assert runner.failed == [bad]
    assert runner.done == [good]
    assert f"{bad.folder} cannot be read" in output
    assert "done, linear 12.50" in output


def test_a_run_that_succeeds_without_doing_anything_fails(tmp_path: Path) -> None:
    class Idle(Job):
        def next_command(self) -> list[str]:
            return ["--help"]

    overrides = [f"run.dir={tmp_path / 'run'}"]
    job = Idle(overrides=overrides, config=compose(overrides), evaluate=[])
    runner, output = sweep([job], tmp_path)
    assert runner.failed == [job]
    assert "failed: exit code 0" in output
    assert job.log.read_text().count("# commit") == 1
    assert job.process is not None
    assert job.process.poll() == 0


def test_a_run_that_builds_on_a_failed_one_fails(tmp_path: Path) -> None:
    base = finished(job_in(tmp_path, "seed=1", name="a"))
    user = job_in(tmp_path, "seed=2", name="b")
    (base.folder / "checkpoints" / "round_00001" / "state.json").write_text("{")
    user.needs = [base.config.hash]
    runner, output = sweep([base, user], tmp_path)
    assert runner.failed == [base, user]
    assert "a run that it builds on failed" in output


def test_a_needed_run_must_still_have_its_folder(tmp_path: Path) -> None:
    base = finished(job_in(tmp_path, "seed=1", name="a"))
    user = finished(job_in(tmp_path, "seed=2", name="b"))
    sweep([base], tmp_path)
    user.needs = [base.config.hash]
    assert base in Sweep([base, user], tmp_path / "results", 1, Console()).done
    shutil.rmtree(base.folder)
    assert base in Sweep([base, user], tmp_path / "results", 1, Console()).waiting
    assert base in Sweep([base], tmp_path / "results", 1, Console()).done


def test_evaluations_stay_in_a_result_without_its_run_folder(tmp_path: Path) -> None:
    job = finished(job_in(tmp_path, evaluate=["semi"]))
    evaluated(job, "semi")
    sweep([job], tmp_path)
    shutil.rmtree(job.folder)
    again = finished(job_in(tmp_path, evaluate=["semi", "geometry"]))
    evaluated(again, "semi")
    evaluated(again, "geometry")
    (again.folder / "evaluation" / "semi.json").unlink()
    again.evaluate = ["geometry"]
    sweep([again], tmp_path)
    result = json.loads((tmp_path / "results" / f"{job.name}.json").read_text())
    assert result["evaluations"] == {"semi": {"x": 1.0}, "geometry": {"x": 1.0}}


def test_a_result_names_every_commit_that_trained_it(tmp_path: Path) -> None:
    job = finished(job_in(tmp_path))
    job.log.write_text(
        "# commit abc1234: fedx-pl train\nround 1\n"
        "# commit def5678: fedx-pl train\n# commit def5678: x\n"
    )
    sweep([job], tmp_path)
    assert (
        json.loads((tmp_path / "results" / f"{job.name}.json").read_text())["commit"]
        == "abc1234, def5678"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile=mini"], "which experiment"),
        (["table1", "--jobs", "0"], "--jobs 0 runs nothing"),
        (["table1", "run.dir=x"], "type run.root=x"),
        (["tabel1"], "no experiment tabel1; did you mean table1.*ablation, "),
        (["table1", "--seeds", "a"], "type --seeds 0,1,2"),
    ],
)
def test_an_error_says_what_to_type(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *words, "--definitions", str(EXPERIMENTS)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_result_of_other_code_does_not_count(modules: Path, tmp_path: Path) -> None:
    """Its run folder does not count either. With the old code both count again.

    A file without a hash stays readable.
    """
    (modules / "mine.py").write_text(METHOD)
    job = finished(job_in(tmp_path, "method=mine:Mine", evaluate=["semi"]))
    assert job.next_command() == [
        "train",
        *job.overrides,
        "--yes",
    ]  # No record says what trained it.
    write_record(job.folder, Record(code_of(registry.find(registry.METHOD, "mine:Mine"))))
    assert job.next_command()[:3] == ["evaluate", str(job.folder), "semi"]
    assert "allow_code=true" in job.next_command()
    evaluated(job, "semi")
    sweep([job], tmp_path)
    results = tmp_path / "results"
    file = results / f"{job.name}.json"
    assert len(json.loads(file.read_text())["code"]) == 16
    assert Sweep([job], results, 1, Console()).done == [job]

    (modules / "mine.py").write_text(METHOD.replace("mean()", "sum()"))
    forget_modules(modules)
    assert Sweep([job], results, 1, Console()).waiting == [job]
    assert job.next_command() == ["train", *job.overrides, "--yes"]
    (difference,) = changes(read_result(file), job.config)
    assert difference.startswith("the code of method=mine:Mine was ")

    (modules / "mine.py").write_text(METHOD)
    forget_modules(modules)
    assert Sweep([job], results, 1, Console()).done == [job]
    content = json.loads(file.read_text())
    del content["code"]
    file.write_text(json.dumps(content))
    assert changes(read_result(file), job.config) == []
    assert Sweep([job], results, 1, Console()).waiting == [job]


def test_a_result_of_a_method_of_the_package_needs_no_code(tmp_path: Path) -> None:
    job = finished(job_in(tmp_path))
    sweep([job], tmp_path)
    file = tmp_path / "results" / f"{job.name}.json"
    content = json.loads(file.read_text())
    assert content.pop("code") == ""
    file.write_text(json.dumps(content))
    assert Sweep([job], tmp_path / "results", 1, Console()).done == [job]
