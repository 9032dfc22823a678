"""What can be added to any method: FedX, and the paper's rivals of the same kind."""

from fedx_pl.mixins.base import Mixin, wrap
from fedx_pl.mixins.fedca import FedCAMixin, FedCAOptions
from fedx_pl.mixins.fedx import FedXMixin
from fedx_pl.mixins.fedx_options import FedXOptions
from fedx_pl.mixins.moon import MoonMixin, MoonOptions

__all__ = [
    "MIXINS", "FedCAMixin", "FedCAOptions", "FedXMixin", "FedXOptions", "Mixin", "MoonMixin", "MoonOptions", "wrap",
]  # fmt: skip

# By the name of their group of keys, which is also their keyword argument; the innermost first.
MIXINS: dict[str, type[Mixin]] = {"fedca": FedCAMixin, "moon": MoonMixin, "fedx": FedXMixin}
