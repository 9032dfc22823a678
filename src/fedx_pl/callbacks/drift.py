"""The drift of clients: their distance from the global weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.federation.aggregate import STATISTICS

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.methods.base import State
    from fedx_pl.trainer import FederatedTrainer


class Drift(RoundCallback):
    """Adds ``drift`` to the metrics of the first `clients`; for all, it would cost too much."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    @override
    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        if update.client < self.clients:
            update.metrics["drift"] = drift_of(
                update.state.weights, record.context.global_state.weights
            )


def drift_of(state: State, reference: State) -> float:
    """The distance of weights from the reference, in lengths of the reference.

    BatchNorm's statistics do not count.
    """
    before = {
        name: tensor
        for name, tensor in reference.items()
        if tensor.is_floating_point() and not name.endswith(STATISTICS)
    }
    distance = _norm([state[name] - tensor for name, tensor in before.items()])
    # Sums depend on the order in memory, which a resumed run does not share: but not in the first
    # six digits.
    return float(f"{(distance / _norm(before.values())).item():.6g}")


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of all tensors together."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    total: Tensor = torch.stack(norms).norm()
    return total
