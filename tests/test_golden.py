"""Weights, private states and metrics of tiny federations equal those in golden.json.

The digits depend on the CPU's kernels. On a kind of machine that is in golden.json, weights and
private states must be bit-identical; on any other, the numbers must be close.
`python tests/test_golden.py` measures again and adds this kind of machine. The earlier numbers must
then be close to the new ones; otherwise the file is not changed.
Remove golden.json first only where results are meant to change, and say why in the commit.
"""

import hashlib
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from conftest import write_tiny_root  # Before torch: it says which kernels the tests have.

import pytest
import torch
from helpers import tiny_federation
from safetensors.torch import load_file

from fedx_pl import federate

FILE = Path(__file__).with_name("golden.json")
METHODS = ("simclr", "moco", "byol", "protocl", "fedu")
FEDX = {
    "plain": ["fedx=false"],
    "fedx": ["fedx=true"],
    "queue": ["fedx=true", "fedx.relation=queue"],
}
HELD = {
    "none": [],
    "fedprox": ["regularizer=fedprox"],
    "scaffold": ["regularizer=scaffold"],
    "moon": ["moon=true"],
}
RULES = {
    rule: [f"aggregate={rule}", "federation.clients=3"] for rule in ("clip", "median", "trimmed")
}
# The learning rate is small: with a large one, round 2 amplifies differences in the last digit
# between the kernels of different CPUs.
SMALL = [
    "data.limit=96",
    "evaluation.labels=limit",
    "federation.clients=2",
    "optim.batch_size=16",
    "optim.lr=0.002",
    "run.threads=1",
]
OTHERS = {
    "simclr, krum": [
        "aggregate=krum",
        "aggregate.byzantine=0",
        "federation.clients=3",
        "federation.min_clients=3",
    ],
    "byol, fedx, privacy": ["method=byol", "fedx=true", "privacy.clip=1", "privacy.noise=0.1"],
    "simclr, fedx, clipped": ["fedx=true", "privacy.clip=1"],
    "byol, fedx, local BatchNorm": ["method=byol", "fedx=true", "federation.batchnorm=local"],
    "simclr, fedx, two of three clients": [
        "fedx=true",
        "federation.clients=3",
        "federation.fraction=0.7",
    ],
    **{
        f"byol, fedx, {rule}": ["method=byol", "fedx=true", *words] for rule, words in RULES.items()
    },
}
SOON = (
    "simclr, plain, none",
    "protocl, fedx, fedprox",
    "moco, fedx, scaffold",
    "fedu, queue, moon",
    *OTHERS,
)
ON_RAY = ("byol, fedx, none", "moco, queue, scaffold", "simclr, plain, moon", "fedu, fedx, fedprox")
TIMES = re.compile(r"seconds|per_second")


def cases() -> dict[str, list[str]]:
    """Every federation by its name."""
    found = {}
    for method, fedx, held in itertools.product(METHODS, FEDX, HELD):
        found[f"{method}, {fedx}, {held}"] = [f"method={method}", *FEDX[fedx], *HELD[held]]
    return found | OTHERS


def machine() -> str:
    """What the last digits depend on: torch, its kernels, and the CPU with its cache sizes."""
    lines = (
        Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        if Path("/proc/cpuinfo").exists()
        else []
    )
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    cpu = ", ".join(
        fields.get(key, "?") for key in ("model name", "cpu family", "model", "cache size")
    )
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {isa}, {cpu}"


def measure(words: list[str], root: Path, folder: Path) -> dict[str, Any]:
    """Runs a federation; returns digests of its tensors, and numbers to compare approximately."""
    threads = torch.get_num_threads()
    try:
        words = [*tiny_federation(root, folder), *SMALL, *words]
        found = federate("", *words, quiet=True)
    finally:
        torch.set_num_threads(threads)
    shared = load_file(found.folder / "checkpoints" / "round_00002" / "global.safetensors")
    private = [
        tensor
        for file in sorted((found.folder / "clients").glob("*"))
        for tensor in load_file(file).values()
    ]
    rows = [
        {key: value for key, value in row.items() if not TIMES.search(key)}
        for row in found.trainer.history
    ]
    close = {
        f"{key} of round {row['round']}": row[key]
        for row in rows
        for key in row
        if key.startswith("loss")
    }
    close["length of the weights"] = _length([*shared.values()])
    close["length of the private states"] = _length(private)
    return {
        "weights": _digest([*shared.values()]),
        "private": _digest(private),
        "metrics": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16],
        "numbers": {key: float(f"{value:.6g}") for key, value in close.items()},
    }


def _length(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(
        sum(
            tensor.double().square().sum().item()
            for tensor in tensors
            if tensor.is_floating_point()
        )
    )


def _digest(tensors: list[torch.Tensor]) -> str:
    """A digest of the values that ignores their names and their order in a file."""
    each = sorted(
        hashlib.sha256(
            f"{t.dtype} {tuple(t.shape)}".encode() + t.contiguous().numpy().tobytes()
        ).digest()
        for t in tensors
    )
    return hashlib.sha256(b"".join(each)).hexdigest()[:16]


def differences(name: str, found: dict[str, Any], golden: dict[str, Any]) -> Iterator[str]:
    """The differences from the saved results."""
    digests = golden["machines"].get(machine(), {}).get(name)
    for part in ("weights", "private", "metrics") if digests else ():
        if found[part] != digests[part]:
            yield f"{part} differ in some bits"
    numbers = golden["numbers"][name]
    if numbers.keys() != found["numbers"].keys():
        yield f"other numbers: {sorted(numbers.keys() ^ found['numbers'].keys())}"
    for key in numbers.keys() & found["numbers"].keys():
        if not math.isclose(numbers[key], found["numbers"][key], rel_tol=0.05, abs_tol=2e-3):
            yield f"{key} is {found['numbers'][key]}, and was {numbers[key]}"


@pytest.mark.parametrize(
    "name",
    [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in cases()],
)
def test_the_mathematics_is_as_it_was(name: str, tiny_root: Path, tmp_path: Path) -> None:
    golden = json.loads(FILE.read_text())
    assert list(differences(name, measure(cases()[name], tiny_root, tmp_path), golden)) == []


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("name", ON_RAY)
def test_ray_computes_the_same(name: str, tiny_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray")
    golden = json.loads(FILE.read_text())
    words = [*cases()[name], "engine=ray", "engine.workers=1"]
    assert list(differences(name, measure(words, tiny_root, tmp_path), golden)) == []


def write(root: Path) -> None:
    """Measures every case and keeps it."""
    golden = json.loads(FILE.read_text()) if FILE.exists() else {"numbers": {}, "machines": {}}
    here: dict[str, Any] = {}
    for name, words in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(words, root, Path(folder))
        golden["numbers"].setdefault(name, found["numbers"])
        here[name] = {part: found[part] for part in ("weights", "private", "metrics")}
        golden["machines"].pop(machine(), None)
        if wrong := list(differences(name, found, golden)):
            sys.exit(f"{name}: {'; '.join(wrong)}")
        print(name, flush=True)
    golden["machines"][machine()] = here
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write(write_tiny_root(Path(temporary)))
