"""Self-supervised methods."""

from typing import TYPE_CHECKING

from fedx_pl.parts import Parts, importing

if TYPE_CHECKING:
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

BUILT_IN: "Parts[type[SSLMethod]]" = Parts(
    {
        "simclr": "fedx_pl.methods.simclr:SimCLR",
        "moco": "fedx_pl.methods.moco:MoCo",
        "byol": "fedx_pl.methods.byol:BYOL",
        "protocl": "fedx_pl.methods.protocl:ProtoCL",
        "fedu": "fedx_pl.methods.fedu:FedU",
    }
)

__getattr__ = importing(
    __name__,
    {
        "fedx_pl.methods.base": ("Embeddings", "Loss", "SSLMethod", "Views"),
        "fedx_pl.methods.byol": ("BYOL",),
        "fedx_pl.methods.fedu": ("FedU",),
        "fedx_pl.methods.moco": ("MoCo",),
        "fedx_pl.methods.protocl": ("ProtoCL",),
        "fedx_pl.methods.simclr": ("SimCLR",),
    },
)
