"""What a finished run leaves for its user: the encoder's weights, and accuracy by round as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.files import tensor_bytes, write_atomically

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class SaveEncoder(RoundCallback):
    """Writes RUN/encoder.safetensors, a plain state dict of the backbone, and RUN/accuracy.png."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Writes both; the picture only if there is an accuracy."""
        write_atomically(
            trainer.folder / "encoder.safetensors",
            tensor_bytes(trainer.model.backbone.state_dict()),
        )
        if any("_top1" in key for row in trainer.history for key in row):
            from fedx_pl.callbacks import plots  # Here: matplotlib would slow every start down.

            figure = plots.curves(trainer.history, trainer.untrained)
            write_atomically(trainer.folder / "accuracy.png", plots.png(figure))
