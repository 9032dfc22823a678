"""What can be added to any method: FedX."""

from fedx_pl.mixins.fedx import FedXMixin, FedXOptions, with_fedx

__all__ = ["FedXMixin", "FedXOptions", "with_fedx"]
