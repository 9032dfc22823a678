"""Fixtures that many tests share: one thread per worker, and a small CIFAR-10."""

import io
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Some virtual machines announce AMX and then trap on its instructions; bf16 has other kernels. Read
# when torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The processes that tests start have no more threads than the tests themselves (see
# `helpers.THREADS`).
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("FEDX_TEST_THREADS", "1"))
# Two threads that wait for each other would spin, and take the core from the other worker of
# `pytest -n 2`.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# torch.compile keeps its kernels there. It does not tell them apart by ATEN_CPU_CAPABILITY: those
# of one setting of `make test-cpus` gave NaN in another.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/fedx-pl-compiled-{os.environ.get('ATEN_CPU_CAPABILITY')}-{os.environ['ONEDNN_MAX_CPU_ISA']}",
)

import numpy as np
import pytest
import torch
from helpers import THREADS, forget_modules, tiny_federation
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "new_method"))
torch.set_num_threads(THREADS)
# A loaded machine takes its time, and no example is wrong because of that.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
# Whoever runs the tests, on whatever terminal, what they look at is drawn alike.
os.environ["TERM"] = "xterm"
for key in (
    "CI",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
):
    os.environ.pop(key, None)
# A job that a shell started in the background ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

TRAIN, TEST = 240, 60


LONGEST = ("test_end_to_end", "test_doc_notebook", "test_kills", "test_compile")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the longest tests; keeps slow tests that share something on one worker."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`write_tiny_root` for all tests."""
    return write_tiny_root(tmp_path_factory.mktemp("tiny-cifar10"))


def write_tiny_root(root: Path) -> Path:
    """240 + 60 images as cifar-10-binary.tar.gz.

    Each class has its own color, so there is something to learn.
    """
    rng = np.random.default_rng(0)
    colors = rng.integers(40, 215, (10, 3, 1, 1))

    def records(count: int) -> bytes:
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.clip(colors[labels] + rng.normal(0, 25, (count, 3, 32, 32)), 0, 255).astype(
            np.uint8
        )
        return np.concatenate([labels[:, None], images.reshape(count, -1)], axis=1).tobytes()

    files = {f"data_batch_{i}.bin": records(TRAIN // 5) for i in range(1, 6)} | {
        "test_batch.bin": records(TEST)
    }
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return root


@pytest.fixture
def tiny(tiny_root: Path, tmp_path: Path) -> list[str]:
    """`tiny_federation` for one test."""
    return tiny_federation(tiny_root, tmp_path / "runs")


@pytest.fixture
def quick(tiny: list[str]) -> list[str]:
    """`tiny` without a dashboard, which takes half of its time."""
    return [*tiny, "logger=[]"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import a user's modules from; they are unloaded afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget_modules(tmp_path)
