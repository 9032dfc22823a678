"""Self-supervised methods."""

from fedx_pl.methods.base import Embeddings, Loss, SSLMethod, Views
from fedx_pl.methods.byol import BYOL
from fedx_pl.methods.fedu import FedU
from fedx_pl.methods.moco import MoCo
from fedx_pl.methods.protocl import ProtoCL
from fedx_pl.methods.simclr import SimCLR

__all__ = [
    "BUILT_IN",
    "BYOL",
    "Embeddings",
    "FedU",
    "Loss",
    "MoCo",
    "ProtoCL",
    "SSLMethod",
    "SimCLR",
    "Views",
]

BUILT_IN: dict[str, type[SSLMethod]] = {
    "simclr": SimCLR,
    "moco": MoCo,
    "byol": BYOL,
    "protocl": ProtoCL,
    "fedu": FedU,
}
