"""Mixins for any method: FedX, and the paper's rivals of the same kind."""

from typing import TYPE_CHECKING

from fedx_pl.mixins.options import FedCAOptions, FedXOptions, MoonOptions
from fedx_pl.parts import Parts, importing

if TYPE_CHECKING:
    from fedx_pl.mixins.base import Mixin, wrap
    from fedx_pl.mixins.fedca import FedCAMixin
    from fedx_pl.mixins.fedx import FedXMixin
    from fedx_pl.mixins.moon import MoonMixin

__all__ = [
    "MIXINS",
    "FedCAMixin",
    "FedCAOptions",
    "FedXMixin",
    "FedXOptions",
    "Mixin",
    "MoonMixin",
    "MoonOptions",
    "wrap",
]

# By the name of their group of keys, which is also their keyword argument; the innermost first.
MIXINS: "Parts[type[Mixin]]" = Parts(
    {
        "fedca": "fedx_pl.mixins.fedca:FedCAMixin",
        "moon": "fedx_pl.mixins.moon:MoonMixin",
        "fedx": "fedx_pl.mixins.fedx:FedXMixin",
    }
)

__getattr__ = importing(
    __name__,
    {
        "fedx_pl.mixins.base": ("Mixin", "wrap"),
        "fedx_pl.mixins.fedca": ("FedCAMixin",),
        "fedx_pl.mixins.fedx": ("FedXMixin",),
        "fedx_pl.mixins.moon": ("MoonMixin",),
    },
)
