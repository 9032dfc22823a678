"""Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""

from typing import TYPE_CHECKING, Any

from fedx_pl.methods import Embeddings, Loss, SSLMethod, Views
from fedx_pl.mixins import FedCAMixin, FedXMixin, FedXOptions, MoonMixin

if TYPE_CHECKING:
    from fedx_pl.api import Federation, federate
    from fedx_pl.encoder import Encoder

__all__ = [
    "Embeddings", "Encoder", "FedCAMixin", "FedXMixin", "FedXOptions", "Federation", "Loss", "MoonMixin", "SSLMethod",
    "Views", "federate",
]  # fmt: skip

_LATER = {"Encoder": "fedx_pl.encoder", "Federation": "fedx_pl.api", "federate": "fedx_pl.api"}


def __getattr__(name: str) -> Any:
    """What only some need is imported when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'fedx_pl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)
