"""How far a client's training turns its embeddings: a Lightning callback of the client's `Trainer`."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn

from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.geometry import angles
from fedx_pl.methods.base import SSLMethod

IMAGES = 128  # of a client's own


class Angle(pl.Callback):
    """Compares the embeddings ``f(x)`` of some of a client's images before and after it trains, in degrees."""

    def __init__(self, clients: int) -> None:
        """Measures the first clients only: it costs two forward passes.

        Args:
            clients: how many.
        """
        self.clients = clients
        self._model: SSLMethod | None = None
        self._images: Tensor | None = None
        self._received: Tensor | None = None

    def on_fit_start(self, trainer: pl.Trainer, model: Any) -> None:
        """Embeds the images by the model that was received."""
        self._images = None
        if model.local.client < self.clients:
            self._model, self._images = model, model.local.data.plain_sample(IMAGES)
            self._received = _embed(model, self._images)

    def round_metrics(self) -> dict[str, float]:
        """``angle``, the mean over the images."""
        if self._images is None or self._model is None or self._received is None:
            return {}
        angle = angles(_embed(self._model, self._images), self._received).mean().item()
        self._images = self._received = None
        return {"angle": angle}


def _embed(model: SSLMethod, images: Tensor) -> Tensor:
    """``f(x)`` in eval mode."""
    return extract(nn.Sequential(model.backbone, model.projector), images, lambda batch: batch)
