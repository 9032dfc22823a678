"""The distance of honest updates from the bounds that refuse bad ones, as in docs/robustness.md.

``python -m benchmarks.honest [key=value ...]`` trains two short rounds of each method, with and
without FedX, at two learning rates. It prints the extremes over all updates. It takes about five
minutes on two idle cores.
"""

import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.build import build
from fedx_pl.config.compose import compose
from fedx_pl.federation.aggregate import BACKBONE, STATISTICS
from fedx_pl.federation.round import RoundRecord, Update
from fedx_pl.trainer import FederatedTrainer

RATES = (0.1, 0.3)
METHODS = ("simclr", "moco", "byol", "protocl", "fedu")
WORDS = (
    "data=cifar10",
    "profile=cpu",
    "data.limit=600",
    "federation.clients=3",
    "federation.rounds=2",
    "federation.epochs=3",
    "optim.batch_size=16",
    "aggregate.max_growth=0",
    "run.resume=never",
)
LEAST = "kept"  # The smallest value of such a measure counts, of all others the largest.


class Measuring(RoundCallback):
    """Compares each update with the global state that its round started from."""

    def __init__(self) -> None:
        """Starts without updates."""
        self.extremes: dict[str, float] = {}

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """Keeps the extremes."""
        before, after = trainer.global_state.weights, update.state.weights
        for name, value in measures(before, after):
            worse = min if LEAST in name else max
            self.extremes[name] = worse(value, self.extremes.get(name, value))


def measures(before: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Named measures of one update; lengths are in lengths of the global weights.

    Args:
        before: the global weights.
        after: the weights of a client that started from them.
    """
    weights = [
        name
        for name, tensor in before.items()
        if tensor.is_floating_point() and not name.endswith(STATISTICS)
    ]
    yield "length", _length(after, weights) / _length(before, weights)
    change = {name: after[name].double() - before[name].double() for name in weights}
    yield "distance", _length(change, weights) / _length(before, weights)
    yield "kept of the weights", _kept(before, after, weights)
    backbone = [name for name in weights if name.startswith(BACKBONE)]
    yield "kept of the backbone", _kept(before, after, backbone)
    for name in weights:
        if before[name].dim() > 1:  # Scales and shifts of BatchNorm begin at one value each.
            yield "kept of a layer", _kept(before, after, [name])
            yield "length of a layer", _length(after, [name]) / _length(before, [name])
    for end in STATISTICS:
        values = [after[name].abs().max().item() for name in after if name.endswith(end)]
        yield f"largest {end}", max(values, default=0.0)


def _length(state: dict[str, Tensor], names: Sequence[str]) -> float:
    return math.sqrt(sum(state[name].double().square().sum().item() for name in names))


def _kept(before: dict[str, Tensor], after: dict[str, Tensor], names: Sequence[str]) -> float:
    along = sum((after[name].double() * before[name].double()).sum().item() for name in names)
    return along / _length(before, names) ** 2


def train(*words: str) -> dict[str, float]:
    """The extremes of one short run, in a folder that is deleted."""
    measuring = Measuring()
    with tempfile.TemporaryDirectory() as folder:
        config = compose([*WORDS, f"run.dir={folder}/run", *words])
        run = build(config, report=lambda _: None, callbacks=[measuring])
        run.data.images = replace(run.data.images, test=None)  # Nothing is evaluated.
        run.fit()
    return measuring.extremes


def main(overrides: Sequence[str]) -> None:
    """Prints a line for each run, then the extremes for each learning rate."""
    table: dict[str, dict[float, float]] = defaultdict(dict)
    for rate in RATES:
        for method in METHODS:
            for fedx in ("false", "true"):
                words = (f"method={method}", f"fedx={fedx}", f"optim.lr={rate}")
                found = train(*words, *overrides)
                print(*words, *(f"{name}={value:.3g}" for name, value in found.items()), sep="  ")
                sys.stdout.flush()
                for name, value in found.items():
                    worse = min if LEAST in name else max
                    table[name][rate] = worse(value, table[name].get(rate, value))
    for name, values in table.items():
        print(f"{name:24}", *(f"lr={rate}: {value:<10.3g}" for rate, value in values.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
