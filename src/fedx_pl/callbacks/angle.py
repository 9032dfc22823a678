"""The angle by which local training turns a client's embeddings, as a Lightning callback."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from typing_extensions import override

from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.geometry import angles
from fedx_pl.methods.base import SSLMethod

IMAGES = 128  # of the client that are compared


class Angle(pl.Callback):
    """Compares embeddings ``f(x)`` of a client's images before and after training, in degrees."""

    def __init__(self, clients: int) -> None:
        """Sets how many clients are measured, since it costs two forward passes.

        Args:
            clients: clients with smaller numbers are measured.
        """
        self.clients = clients
        self._model: SSLMethod | None = None
        self._images: Tensor | None = None
        self._received: Tensor | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, model: Any) -> None:
        self._images = None
        if model.local.client < self.clients:
            self._model = model
            self._images = model.local.data.plain_sample(IMAGES)
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
