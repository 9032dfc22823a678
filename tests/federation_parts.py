"""Small real parts of a federation: images of sites, overrides, a serial reference, processes."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from helpers import PATIENCE, THIN, Watching, fitted
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


def wait_until(true: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Waits until a condition is true."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"{what}: not in {seconds} s"
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether the process is running."""
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
