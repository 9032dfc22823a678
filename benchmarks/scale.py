"""Part ``scale``: a thousand clients against ten, in memory and in time per client.

``python -m benchmarks.scale CLIENTS ROUNDS [key=value ...]`` prints the peak memory of such a run.
Each is measured in its own process, since the peak of a process never falls.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.report import Part, Row
from benchmarks.rounds import Setting, backbone, train, variant
from fedx_pl.config.build import Run
from fedx_pl.engines.base import MemoryOf
from fedx_pl.engines.local import SerialEngine
from fedx_pl.federation.round import RoundContext, Update

FEW = 10
PER_ROUND = 10
ROUNDS = 3
IMAGES_EACH = 50  # of a client in the comparison of times


class OneStep(SerialEngine):
    """Trains clients on their first batch only, since one step reaches the peak of memory."""

    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update]:
        """Trains on the first images of each client."""
        for client in clients:
            data = self.trainer.client_data(client, context.round)
            first = replace(data, index=data.index[: data.views_size])
            yield self.local.run(context, client=client, data=first, memory=memory_of(client))


def measure(setting: Setting) -> Part:
    """Measures memory and time."""
    part = Part()
    many = setting.few(1000, 40)
    _memory(setting, part, many)
    _time(setting, part, many)
    return part


def _memory(setting: Setting, part: Part, many: int) -> None:
    """Compares the peak memory of few and many clients that share the same images.

    Ten clients train in a round, with BYOL and its private targets. The smaller of two peaks
    counts.
    """
    found: dict[int, list[dict[str, float]]] = {FEW: [], many: []}
    for _ in range(setting.few(2, 1)):
        for clients, runs in found.items():
            setting.say(f"peak memory of {clients} clients")
            runs.append(_in_a_process(setting, clients))
    part.facts["peak memory"] = {f"{clients} clients": runs for clients, runs in found.items()}
    peaks = {clients: min(run["peak_mb"] for run in runs) for clients, runs in found.items()}
    part.rows.append(Row("peak memory, many clients / few", peaks[many] / peaks[FEW]))
    part.notes.append(
        f"many: {many} clients, peak {peaks[many]:.0f} MB; few: {FEW} clients, {peaks[FEW]:.0f} MB"
    )


def _in_a_process(setting: Setting, clients: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        __name__,
        str(clients),
        str(ROUNDS),
        *setting.overrides,
        f"run.device={setting.device}",
    ]
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def peak_memory(clients: int, rounds: int, overrides: Sequence[str]) -> dict[str, float]:
    """Runs a few rounds of BYOL without evaluation; returns the peak memory in MB."""
    device = torch.device(
        next(o for o in overrides if o.startswith("run.device=")).partition("=")[2]
    )
    run = Setting(device, overrides=tuple(overrides)).build(
        "method=byol",
        *backbone("thin"),
        "optim.batch_size=32",
        f"federation.clients={clients}",
        f"federation.fraction={PER_ROUND / clients}",
        f"federation.rounds={rounds}",
        "federation.epochs=1",
    )
    train(run, engine=OneStep)
    gpu = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    return {"peak_mb": _peak_mb(), "gpu_mb": gpu}


def _peak_mb() -> float:
    """The peak memory of this process; on Linux, `getrusage` would include its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS


def _time(setting: Setting, part: Part, many: int) -> None:
    """Compares the time per client in short rounds of few clients and a long round of many.

    All clients train FedX on SimCLR, with 50 images each. The tenths of the long round are timed
    separately, to show whether clients become slower.
    """

    def build(clients: int) -> Run:
        size = [
            f"data.limit={clients * IMAGES_EACH}",
            f"federation.clients={clients}",
            "federation.rounds=1",
        ]
        return setting.build(
            *variant("FedX", batch=16), *backbone("thin"), *size, "federation.epochs=1"
        )

    few = f"{FEW} clients"
    runs = {clients: build(clients) for clients in (FEW, many)}
    times: dict[str, list[float]] = {few: [], f"{many} clients": []}
    around = setting.few(8, 1)
    for clients in [FEW] * around + [many] + [FEW] * around:
        setting.say(f"a round of {clients} clients")
        rows, display = train(runs[clients])
        if clients == FEW:
            times[few].append(rows[-1]["train_seconds"] / clients)
        else:
            tenth = max(1, many // 10)
            marks = display.clients[::tenth]
            times[f"{many} clients"] += [(end - start) / tenth for start, end in pairwise(marks)]
    part.times |= times
    # Medians: the long round cannot choose its quiet moments, so the short ones must not either.
    seconds = {name: statistics.median(values) for name, values in times.items()}
    part.rows.append(
        Row("round time per client, many clients / few", seconds[f"{many} clients"] / seconds[few])
    )
    part.contenders = [
        {"contender": name, "ms per client": 1e3 * value} for name, value in seconds.items()
    ]


if __name__ == "__main__":
    print(json.dumps(peak_memory(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
