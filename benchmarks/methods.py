"""Methods whose training costs nothing, to measure everything around it.

The command line finds them by module and name.
"""

from typing import Any

from torch import Tensor

from fedx_pl import SSLMethod
from fedx_pl.methods import BYOL, SimCLR
from fedx_pl.methods.base import Views


class _Empty(SSLMethod):
    """Replaces the whole step: no forward pass, a gradient of zero for one small parameter."""

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        """A loss of 0."""
        smallest = min((p for p in self.parameters() if p.requires_grad), key=lambda p: p.numel())
        total = smallest.sum() * 0.0
        self.term_names = ("nothing",)
        self._terms.append(total.detach().repeat(2))
        return total

    def on_train_batch_end(self, outputs: Any, batch: Views, batch_idx: int) -> None:
        """No moving averages: they belong to a step."""


class EmptySimCLR(_Empty, SimCLR):
    """SimCLR's state, nobody's training."""


class EmptyBYOL(_Empty, BYOL):
    """BYOL's state, private target included."""
