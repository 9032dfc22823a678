"""How far clients move away from the global weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.federation.aggregate import STATISTICS

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.methods.base import State
    from fedx_pl.trainer import FederatedTrainer


class Drift(RoundCallback):
    """Adds ``drift`` to the metrics of the first clients; for all, it would cost as much as averaging them."""

    def __init__(self, clients: int) -> None:
        """Sets how many clients are measured.

        Args:
            clients: those of smaller numbers.
        """
        self.clients = clients

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """Measures one client."""
        if update.client < self.clients:
            update.metrics["drift"] = drift_of(
                update.state.weights, record.context.global_state.weights
            )


def drift_of(state: State, reference: State) -> float:
    """How far weights are from the reference, in lengths of the reference; BatchNorm's statistics do not count."""
    names = [
        name
        for name in reference
        if reference[name].is_floating_point() and not name.endswith(STATISTICS)
    ]
    before = [reference[name] for name in names]
    steps = torch._foreach_sub([state[name] for name in names], before)
    went, length = (
        torch.stack(torch._foreach_norm(list(t), 2, torch.float64)).norm() for t in (steps, before)
    )
    # Sums depend on the order in memory, which a run that is resumed does not share: not in the first six digits.
    return float(f"{(went / length).item():.6g}")
