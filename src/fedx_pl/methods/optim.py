"""How a method is optimized."""

import math
from dataclasses import dataclass, field

from fedx_pl.errors import require


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """SGD, new at every round as in the paper."""

    batch_size: int = field(
        default=128,
        metadata={
            "help": "images per step; with FedX half of them (fedx.relation_size) are not in B"
        },
    )
    lr: float = field(default=0.01, metadata={"help": "learning rate"})
    momentum: float = field(default=0.9, metadata={"help": "SGD momentum"})
    weight_decay: float = field(default=1e-5, metadata={"help": "SGD weight decay"})
    schedule: str = field(
        default="constant", metadata={"help": "constant | cosine over the rounds"}
    )
    precision: str = field(
        default="auto", metadata={"help": "auto | 32-true | bf16-mixed | 16-mixed"}
    )

    def __post_init__(self) -> None:
        require(
            "optim.batch_size",
            self.batch_size,
            self.batch_size >= 2,
            instead="optim.batch_size=2 or more",
        )
        require(
            "optim.lr",
            self.lr,
            0 < self.lr < math.inf,
            instead="a positive number; the paper's is optim.lr=0.01",
        )
        require(
            "optim.momentum", self.momentum, 0 <= self.momentum < 1, instead="optim.momentum=0.9"
        )
        require(
            "optim.weight_decay",
            self.weight_decay,
            0 <= self.weight_decay < math.inf,
            instead="optim.weight_decay=1e-5",
        )
        known = self.schedule in ("constant", "cosine")
        require("optim.schedule", self.schedule, known, instead="optim.schedule=constant or cosine")
        known = self.precision in ("auto", "32-true", "bf16-mixed", "16-mixed")
        require(
            "optim.precision",
            self.precision,
            known,
            instead="auto, 32-true, bf16-mixed or 16-mixed",
        )

    def lr_at(self, round_number: int, rounds: int) -> float:
        """Learning rate of a round (1-based): a whole round shares one value."""
        return (
            self.lr
            if self.schedule == "constant"
            else self.lr * (1 + math.cos(math.pi * (round_number - 1) / rounds)) / 2
        )
