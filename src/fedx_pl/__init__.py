"""Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""

import os
from typing import TYPE_CHECKING

from fedx_pl.parts import importing

# Torch's threads spin while they wait for each other. With this variable they soon sleep instead:
# as fast on idle cores, faster on busy ones (docs/speed.md). GNU OpenMP reads it only once, when
# torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from fedx_pl.api import Federation, federate
    from fedx_pl.backbones import resnet10, resnet18
    from fedx_pl.callbacks.base import RoundCallback
    from fedx_pl.callbacks.early_stopping import EarlyStopping
    from fedx_pl.callbacks.options import HealthOptions
    from fedx_pl.data.module import FederatedDataModule
    from fedx_pl.data.options import AugmentOptions
    from fedx_pl.data.partition import IID, ClassesPerClient, Dirichlet, Partition, QuantitySkew
    from fedx_pl.encoder.load import Encoder
    from fedx_pl.engines import Engine, EngineOptions
    from fedx_pl.evaluation import Evaluation
    from fedx_pl.evaluation.options import EvaluationOptions
    from fedx_pl.federation.aggregate import Aggregator
    from fedx_pl.federation.options import AggregateOptions, PrivacyOptions
    from fedx_pl.federation.regularizers import FedProx, Regularizer, Scaffold
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.methods import (
        BYOL,
        Embeddings,
        FedU,
        Loss,
        MoCo,
        ProtoCL,
        SimCLR,
        SSLMethod,
        Views,
    )
    from fedx_pl.methods.optim import OptimOptions
    from fedx_pl.mixins import FedCAMixin, FedXMixin, FedXOptions, MoonMixin
    from fedx_pl.trainer import FederatedTrainer

__version__ = "0.2.0"
__all__ = [
    "BYOL",
    "IID",
    "AggregateOptions",
    "Aggregator",
    "AugmentOptions",
    "ClassesPerClient",
    "Dirichlet",
    "EarlyStopping",
    "Embeddings",
    "Encoder",
    "Engine",
    "EngineOptions",
    "Evaluation",
    "EvaluationOptions",
    "FedCAMixin",
    "FedProx",
    "FedU",
    "FedXMixin",
    "FedXOptions",
    "FederatedDataModule",
    "FederatedTrainer",
    "Federation",
    "HealthOptions",
    "Loss",
    "MoCo",
    "MoonMixin",
    "OptimOptions",
    "Partition",
    "PrivacyOptions",
    "ProtoCL",
    "QuantitySkew",
    "Regularizer",
    "RoundCallback",
    "RoundRecord",
    "SSLMethod",
    "Scaffold",
    "SimCLR",
    "Update",
    "Views",
    "federate",
    "resnet10",
    "resnet18",
]

_HOMES = {
    "fedx_pl.api": ("Federation", "federate"),
    "fedx_pl.backbones": ("resnet10", "resnet18"),
    "fedx_pl.callbacks.base": ("RoundCallback",),
    "fedx_pl.data.module": ("FederatedDataModule",),
    "fedx_pl.data.partition": ("IID", "ClassesPerClient", "Dirichlet", "Partition", "QuantitySkew"),
    "fedx_pl.encoder.load": ("Encoder",),
    "fedx_pl.methods": (
        "BYOL",
        "FedU",
        "MoCo",
        "ProtoCL",
        "SimCLR",
        "Embeddings",
        "Loss",
        "SSLMethod",
        "Views",
    ),
    "fedx_pl.mixins": ("FedCAMixin", "FedXMixin", "FedXOptions", "MoonMixin"),
    "fedx_pl.callbacks.early_stopping": ("EarlyStopping",),
    "fedx_pl.callbacks.options": ("HealthOptions",),
    "fedx_pl.data.options": ("AugmentOptions",),
    "fedx_pl.engines": ("Engine", "EngineOptions"),
    "fedx_pl.evaluation": ("Evaluation",),
    "fedx_pl.evaluation.options": ("EvaluationOptions",),
    "fedx_pl.federation.aggregate": ("Aggregator",),
    "fedx_pl.federation.options": ("AggregateOptions", "PrivacyOptions"),
    "fedx_pl.federation.regularizers": ("FedProx", "Regularizer", "Scaffold"),
    "fedx_pl.federation.round": ("RoundRecord", "Update"),
    "fedx_pl.methods.optim": ("OptimOptions",),
    "fedx_pl.trainer": ("FederatedTrainer",),
}


# Torch takes seconds to import, and ``fedx-pl --help`` needs none of it.
__getattr__ = importing(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
