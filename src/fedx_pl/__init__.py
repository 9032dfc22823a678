"""Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Torch's threads spin while they wait for each other. With this they soon give up and sleep, which is as fast on idle
# cores and faster where other programs want them (docs/speed.md). GNU OpenMP reads it once, when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from fedx_pl.api import Federation, federate
    from fedx_pl.backbones import resnet10, resnet18
    from fedx_pl.callbacks.base import RoundCallback
    from fedx_pl.data.module import FederatedDataModule
    from fedx_pl.data.partition import IID, ClassesPerClient, Dirichlet, Partition, QuantitySkew
    from fedx_pl.encoder.load import Encoder
    from fedx_pl.methods import Embeddings, Loss, SSLMethod, Views
    from fedx_pl.mixins import FedCAMixin, FedXMixin, FedXOptions, MoonMixin

__version__ = "0.1.0"
__all__ = [
    "IID", "ClassesPerClient", "Dirichlet", "Embeddings", "Encoder", "FedCAMixin", "FedXMixin", "FedXOptions",
    "FederatedDataModule", "Federation", "Loss", "MoonMixin", "Partition", "QuantitySkew", "RoundCallback",
    "SSLMethod", "Views", "federate", "resnet10", "resnet18",
]  # fmt: skip

_HOMES = {
    "fedx_pl.api": ("Federation", "federate"),
    "fedx_pl.backbones": ("resnet10", "resnet18"),
    "fedx_pl.callbacks.base": ("RoundCallback",),
    "fedx_pl.data.module": ("FederatedDataModule",),
    "fedx_pl.data.partition": ("IID", "ClassesPerClient", "Dirichlet", "Partition", "QuantitySkew"),
    "fedx_pl.encoder.load": ("Encoder",),
    "fedx_pl.methods": ("Embeddings", "Loss", "SSLMethod", "Views"),
    "fedx_pl.mixins": ("FedCAMixin", "FedXMixin", "FedXOptions", "MoonMixin"),
}


def __getattr__(name: str) -> Any:
    """A public name is imported when it is asked for: torch takes seconds, and ``fedx-pl --help`` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fedx_pl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
