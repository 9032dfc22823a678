"""Clocks and facts: interleaved timing, FLOPs, the device's own speed, and what machine this is."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedx_pl.federation.allocator import keep_freed_memory

CPU = torch.device("cpu")


class Lap(NamedTuple):
    """One run of a contender that keeps its own clock, because not all it does counts."""

    images: int
    seconds: float


Contender = Callable[[], int | Lap]  # Returns how many images of the batches B it saw.


def interleave(
    contenders: Mapping[str, Contender],
    repeats: int,
    *,
    device: torch.device = CPU,
    say: Callable[[str], None] = lambda _line: None,
    memory: dict[str, float] | None = None,
) -> dict[str, list[float]]:
    """Runs A, B, C, A, B, C, ..., so that a slow phase of the machine affects all of them.

    Args:
        contenders: by name; each call does some work and returns the number of images it saw.
        repeats: how often each runs.
        device: waited for before the clock is read.
        say: told before each run.
        memory: if given and the device is a GPU, receives each contender's peak in MB, without
            what all of them keep.

    Returns:
        Seconds per image of every repeat, by contender; compare `best` of each.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, run in contenders.items():
            say(f"repeat {repeat + 1}/{repeats}: {name}")
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                resting = torch.cuda.memory_allocated(device)
            started = time.perf_counter()
            done = run()
            synchronize(device)
            lap = done if isinstance(done, Lap) else Lap(done, time.perf_counter() - started)
            times[name].append(lap.seconds / lap.images)
            if memory is not None and device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - resting
                memory[name] = max(memory.get(name, 0.0), peak / 1e6)
    return times


def as_usual(run: Contender) -> Contender:
    """Wraps a contender so that it does not profit from our setting of the C allocator."""

    def wrapped() -> int | Lap:
        keep_freed_memory(False)
        try:
            return run()
        finally:
            keep_freed_memory()

    return wrapped


def best(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The fastest repeat of each contender: noise only ever adds time."""
    return {name: min(values) for name, values in times.items()}


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of one call; a multiply-add counts as two."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def matmul_speed(device: torch.device, dtype: torch.dtype, tries: int = 8) -> float:
    """Measures the FLOP/s of a large matrix product, which is what this device really reaches.

    Args:
        device: CPU or GPU.
        dtype: data type of matrix products during training.
        tries: number of tries, of which the best counts.
    """
    side = 8192 if device.type == "cuda" else 1536
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    seconds = float("inf")
    for _ in range(tries):
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * side**3 / seconds


def matmul_dtype(precision: str) -> torch.dtype:
    """The dtype of matrix products under one of Lightning's precisions."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)


def machine(device: torch.device) -> dict[str, Any]:
    """Describes the machine and the versions that the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "device": str(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def commit() -> str | None:
    """The version of the code, with ``+`` if files differ from it; None outside a repository."""
    folder = Path(__file__).parent
    try:
        found, changed = (
            subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found + ("+" if changed else "")
