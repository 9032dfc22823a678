"""Small real parts of a federation: images of sites, overrides, a serial reference, processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from helpers import PATIENCE, THIN, THREADS, Watching, fitted
from helpers import same as same
from PIL import Image
from safetensors.torch import load_file

from fedx_pl.config.compose import compose
from fedx_pl.methods.base import State

# A run of seconds on images of 16 pixels.
WORDS = (
    *THIN,
    *("data=folder", "profile=paper", "data.image_size=16", "federation.epochs=1"),
    *("optim.batch_size=16", "run.keep=9", "seed=3"),
)
BYOL_FEDX = ("method=byol", "fedx=true")  # has private state: the EMA target


def make_images(root: Path, counts: Mapping[str, int]) -> Path:
    """A folder of images for each site; each image has a color of its own."""
    for site, count in counts.items():
        draw = np.random.default_rng(list(site.encode()))
        (root / site).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(40, 215, (1, 1, 3)) + draw.normal(0, 25, (16, 16, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
                root / site / f"{number:03d}.png"
            )
    return root


def serial(images: Path, folder: Path, *words: str) -> Path:
    """The same federation in one process.

    Each sub-folder of images is a client, numbered by name.
    """
    sites = sum(1 for _ in images.iterdir())
    own = ["partition.kind=folders", f"federation.clients={sites}", f"data.root={images}"]
    config = compose(
        [*WORDS, *own, f"data.cache={folder / 'cache'}", f"run.dir={folder / 'run'}", *words]
    )
    fitted(config, Watching())
    return folder / "run"


def weights(run: Path, round: int) -> State:
    """The global weights after a round."""
    return load_file(run / "checkpoints" / f"round_{round:05d}" / "global.safetensors")


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Process:
    """A ``fedx-pl`` command as a process of its own, with its output in a file.

    Ends with its ``with`` block.
    """

    def __init__(self, log: Path, *words: str, code: str = "") -> None:
        """Starts.

        Args:
            log: takes the output.
            words: of the command line.
            code: Python to run before the command, e.g. to make a site misbehave.
        """
        self.log = log
        start = f"{code}\nimport sys; from fedx_pl.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start] if code else [sys.executable, "-m", "fedx_pl"]
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(THREADS),
            "COLUMNS": "200",
        }
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [*command, *words],
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env=environment,
            )
        self.id, self._seen = self._process.pid, 0

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=PATIENCE)

    @property
    def output(self) -> str:
        """So far, or since `look_from_here`."""
        return self.log.read_text(errors="replace")[self._seen :]

    def look_from_here(self) -> None:
        """What it said in an earlier test does not count."""
        self._seen = len(self.log.read_text(errors="replace"))

    def wait_for(self, text: str, *, seconds: float = PATIENCE) -> None:
        """Until it has said something."""
        give_up = time.monotonic() + seconds
        while text not in self.output:
            assert self._process.poll() is None, f"ended without saying {text!r}:\n{self.output}"
            assert time.monotonic() < give_up, (
                f"has not said {text!r} in {seconds} s:\n{self.output}"
            )
            time.sleep(0.02)

    def wait(self, *, seconds: float = PATIENCE) -> int:
        """Until it ends; its exit code."""
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended in {seconds} s:\n{self.output}") from None

    def send(self, number: signal.Signals) -> None:
        """A signal, to this process alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a power cut would."""
        self._process.kill()
        self._process.wait(timeout=PATIENCE)

    def children(self) -> list[int]:
        """Processes that it has started."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(status.read_text().rpartition(")")[2].split()[1]) == self.id:
                    found.append(int(status.parent.name))
        return found


def wait_until(true: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Until something is so."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"{what}: not in {seconds} s"
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def is_free(port: int) -> bool:
    """Whether a coordinator could listen there."""
    try:
        socket.create_server(("0.0.0.0", port)).close()
    except OSError:
        return False
    return True
