"""Parts ``training-resnet18`` and ``training-thin``: local training and averaging alone."""

from typing import Any

from benchmarks.bound import Bound
from benchmarks.measure import (
    Contender,
    as_usual,
    best,
    flops,
    interleave,
    matmul_dtype,
    matmul_speed,
)
from benchmarks.reference import Reference
from benchmarks.report import Part, Row
from benchmarks.rounds import VARIANTS, Setting, backbone, training_round, variant

CLIENTS = 2


def resnet18(setting: Setting) -> Part:
    """Measures the paper's network and batch."""
    return measure(setting, "resnet18", batch=64, steps=1)


def thin(setting: Setting) -> Part:
    """Measures the network of the cpu profile.

    It runs with the paper's batch, with the profile's own batch, and with the CIFAR stem.
    """
    steps = setting.few(30, 2)  # As in the profile: 1,000 images, two epochs.
    part = measure(setting, "thin", batch=64, steps=steps)
    for network, batch in (("thin", 32), ("thin-cifar", 64)):
        more = measure(setting, network, batch=batch, steps=steps)
        part.rows += more.rows
        part.contenders += more.contenders
        part.times |= more.times
        part.facts |= more.facts
    return part


def measure(setting: Setting, network: str, *, batch: int, steps: int) -> Part:
    """Reference, ours, plain and their bounds on the same images.

    Args:
        setting: of the benchmark.
        network: see `backbone`.
        batch: images in ``B``, and in ``B_r`` where there is one.
        steps: of each client in a repeat.
    """
    label = f"{network} {batch}+{batch}"
    size = [f"data.limit={CLIENTS * steps * batch}", f"federation.clients={CLIENTS}"]
    once = ["federation.rounds=1", "federation.epochs=1"]
    runs = {
        name: setting.build(*variant(name, batch), *backbone(network), *size, *once)
        for name in VARIANTS
    }
    bounds = {name: Bound(run, CLIENTS * steps) for name, run in runs.items()}
    contenders: dict[str, Contender] = {"reference": as_usual(Reference(runs["FedX"]))}
    for name, run in runs.items():
        contenders |= {name: lambda run=run: training_round(run), f"bound {name}": bounds[name]}  # type: ignore[misc]
    memory: dict[str, float] = {}
    times = interleave(
        contenders,
        setting.few(2, 1) * setting.repeats,  # Short laps, more of them: noise comes in bursts.
        device=setting.device,
        memory=memory,
        say=lambda line: setting.say(f"{label}, {line}"),
    )
    part = Part(
        _rows(label, best(times)), {f"{label}: {name}": values for name, values in times.items()}
    )
    part.facts = {
        f"{label}: FLOPs of a step": {name: flops(bound.step) for name, bound in bounds.items()}
    }
    part.contenders = _contenders(label, bounds, best(times), memory, part.facts)
    return part


def _rows(label: str, seconds: dict[str, float]) -> list[Row]:
    """Ratios of the best times."""
    fedx = [name for name in seconds if name.startswith("FedX")]
    against = [
        Row(f"{label}: {name} against reference", seconds["reference"] / seconds[name])
        for name in fedx
    ]
    bound = [
        Row(f"{label}: {name} / bound", seconds[f"bound {name}"] / seconds[name])
        for name in [*fedx, "plain"]
    ]
    cost = [
        Row(f"{label}: {name}, cost over plain", seconds[name] / seconds["plain"]) for name in fedx
    ]
    return against + bound + cost


def _contenders(
    label: str,
    bounds: dict[str, Bound],
    seconds: dict[str, float],
    memory: dict[str, float],
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    """A table with the speed of each contender.

    Its MFU is the FLOP/s that its steps need, divided by those of a large matrix product.
    """
    bound = bounds["FedX"]
    peak = matmul_speed(bound.device, matmul_dtype(bound.precision))
    facts[f"{label}: matrix product, FLOP/s"] = peak
    needed: dict[str, int] = facts[f"{label}: FLOPs of a step"]
    table = []
    for name, per_image in seconds.items():
        variant_name = "FedX" if name == "reference" else name.removeprefix("bound ")
        per_step = per_image * bounds[variant_name].batch
        table.append(
            {
                "contender": f"{label}: {name}",
                "ms per step": 1e3 * per_step,
                "images/s": 1 / per_image,
                "MFU, % of own matmul speed": 100 * needed[variant_name] / per_step / peak,
                "GPU MB in use": memory.get(name),
            }
        )
    return table
