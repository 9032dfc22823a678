"""Targets of the measurements on a machine with two cores; rows find their target by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A bound on one measured number."""

    name: str  # of the row it belongs to
    value: float
    sign: str  # ">=" or "<="
    unit: str = "x"

    def met(self, measured: float) -> bool:
        """Whether a measurement is on the right side; NaN is not."""
        return measured >= self.value if self.sign == ">=" else measured <= self.value

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g} {self.unit}"


def _training(network: str, default: float, queue: float) -> list[Target]:
    """Targets of one network and batch.

    They are the speed-up over the reference, the share of the bound, and the cost over plain.
    """
    return [
        Target(f"{network}: FedX against reference", default, ">="),
        Target(f"{network}: FedX queue against reference", queue, ">="),
        *(
            Target(f"{network}: {name} / bound", 0.93, ">=")
            for name in ("FedX", "FedX queue", "plain")
        ),
        Target(f"{network}: FedX, cost over plain", 1.85, "<="),
        Target(f"{network}: FedX queue, cost over plain", 1.2, "<="),
    ]


OVERHEAD = ("thin", "thin FedX", "thin BYOL", "resnet18", "resnet18 FedX")

_ALL = [
    *_training("resnet18 64+64", 1.7, 2.8),
    *_training("thin 64+64", 2.5, 3.5),
    *_training("thin 32+32", 2.5, 3.5),
    *_training("thin-cifar 64+64", 2.5, 3.5),
    Target("whole round against reference", 5.0, ">="),
    Target("resnet18: SimCLR against lightly", 1.2, ">="),
    Target("thin: SimCLR against lightly", 2.0, ">="),
    Target("linear probe against reference", 10.0, ">="),
    # The probes shuffle differently, so that the same accuracy means one within a point.
    Target("linear probe, accuracy apart from the reference's", 1.0, "<=", "points"),
    *(Target(f"{case}: overhead per client", 40.0, "<=", "ms") for case in OVERHEAD),
    Target("peak memory, many clients / few", 1.15, "<="),
    Target("round time per client, many clients / few", 1.1, "<="),
    Target("Ray against serial", 1.0, ">="),
    Target("Ray: overhead per client", 15.0, "<=", "ms"),
]
TARGETS = {target.name: target for target in _ALL}
