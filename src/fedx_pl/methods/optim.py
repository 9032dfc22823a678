"""Options of a method's optimizer."""

import math
from dataclasses import dataclass

from fedx_pl.options import Options, option

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True, kw_only=True)
class OptimOptions(Options):
    """SGD, new at every round as in the paper."""

    batch_size: int = option(
        128,
        "images per step; with FedX half of them (fedx.relation_size) are not in B",
        at_least=2,
    )
    lr: float = option(0.01, "learning rate", above=0)
    momentum: float = option(0.9, "SGD momentum", at_least=0, below=1)
    weight_decay: float = option(1e-5, "SGD weight decay", at_least=0)
    schedule: str = option(
        "constant", "constant | cosine over the rounds", choices=("constant", "cosine")
    )
    precision: str = option("auto", " | ".join(PRECISIONS), choices=PRECISIONS)

    def lr_at(self, round_number: int, rounds: int) -> float:
        """Learning rate of a round (1-based): a whole round shares one value."""
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * (round_number - 1) / rounds)) / 2
