"""``fedx-pl`` commands in processes of their own.

They are forked from a server that has torch and Lightning imported: importing them anew takes
seconds, a fork takes none. A test of the imports themselves, or of what Python does before them,
starts ``python -m fedx_pl`` instead.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path

from helpers import PATIENCE, THREADS

# Python reads PYTHONPATH when the server starts; a preloaded module is found nowhere else.
PRELOADED = [
    "commands",
    "fedx_pl.cli.main",
    "fedx_pl.cli.train",
    "fedx_pl.cli.sites",
    "fedx_pl.trainer",
    "torch.utils.tensorboard",
    "flwr.client",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


def _run(
    words: list[str], cwd: str, environment: dict[str, str], files: list[str], code: str
) -> None:
    """Runs one command in the forked child, as ``python -m fedx_pl`` would in a new process."""
    for descriptor, file in enumerate(files, start=1):
        target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(target, descriptor)
        os.close(target)
    sys.stdout = TextIOWrapper(FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = TextIOWrapper(FileIO(2, "w", closefd=False), write_through=True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path.insert(0, cwd)
    sys.argv = ["fedx-pl", *words]
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    from fedx_pl.cli.main import main

    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


class Command:
    """A running ``fedx-pl`` command. Ends with its ``with`` block.

    Args:
        log: takes the output; errors too, unless ``errors`` is given.
        words: the command line.
        errors: takes what is written to stderr.
        cwd: the current folder of the command; the log's by default.
        environment: variables to add to those of this process.
        code: Python to run before the command, e.g. to make a site misbehave.
    """

    def __init__(
        self,
        log: Path,
        *words: str,
        errors: Path | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        self.log = log
        variables = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(THREADS),
            "COLUMNS": "200",
            **(environment or {}),
        }
        files = [str(log), str(errors or log)]
        _start_server()
        self._process = _CONTEXT.Process(
            target=_run, args=(list(words), str(cwd or log.parent), variables, files, code)
        )
        self._process.start()
        assert self._process.pid is not None
        self.id = self._process.pid
        self._seen = 0

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What it has written so far, or since `look_from_here`."""
        if not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")[self._seen :]

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def look_from_here(self) -> None:
        """Leaves what was written so far out of `output`."""
        self._seen = len(self.output) + self._seen

    def wait_for(self, text: str, *, seconds: float = PATIENCE) -> None:
        """Waits until the output contains a text."""
        give_up = time.monotonic() + seconds
        while text not in self.output:
            assert self.running or text in self.output, (
                f"ended without saying {text!r}:\n{self.output}"
            )
            assert time.monotonic() < give_up, (
                f"has not said {text!r} in {seconds} s:\n{self.output}"
            )
            time.sleep(0.02)

    def wait(self, *, seconds: float = PATIENCE) -> int:
        """Waits for the end and returns the exit code; minus the signal that killed it."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"has not ended in {seconds} s:\n{self.output}"
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        os.kill(self.id, number)

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._process.kill()
        self._process.join(PATIENCE)

    def children(self) -> list[int]:
        """The processes that it has started."""
        started = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == self.id:
                    started.append(int(status.parent.name))
        return started


def fedx_pl(
    *words: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns stdout and stderr separately."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        err = Path(folder) / "err"
        place = cwd or Path.cwd()
        environment = {"COLUMNS": "80", **(environment or {})}
        with Command(out, *words, errors=err, cwd=place, environment=environment) as command:
            code = command.wait(seconds=timeout)
        return subprocess.CompletedProcess(
            words, code, out.read_text(errors="replace"), err.read_text(errors="replace")
        )


def _start_server() -> None:
    from multiprocessing import forkserver

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
