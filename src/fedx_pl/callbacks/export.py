"""Saves the encoder's weights of a finished run, and a plot of its accuracy by round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.files import tensor_bytes, write_atomically

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class SaveEncoder(RoundCallback):
    """Writes RUN/encoder.safetensors, the backbone's state dict, and RUN/accuracy.png."""

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        write_atomically(
            trainer.folder / "encoder.safetensors",
            tensor_bytes(trainer.model.backbone.state_dict()),
        )
        if any("_top1" in key for row in trainer.history for key in row):
            from fedx_pl.callbacks import plots  # Here: matplotlib would slow every start down.

            figure = plots.curves(trainer.history, trainer.untrained)
            write_atomically(trainer.folder / "accuracy.png", plots.png(figure))
