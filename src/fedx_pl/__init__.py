"""Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""

from fedx_pl.methods import Embeddings, Loss, SSLMethod, Views
from fedx_pl.mixins import FedCAMixin, FedXMixin, FedXOptions, MoonMixin

__all__ = ["Embeddings", "FedCAMixin", "FedXMixin", "FedXOptions", "Loss", "MoonMixin", "SSLMethod", "Views"]
