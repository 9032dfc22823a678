"""Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""

from fedx_pl.methods import Embeddings, Loss, SSLMethod, Views
from fedx_pl.mixins import FedXMixin, FedXOptions

__all__ = ["Embeddings", "FedXMixin", "FedXOptions", "Loss", "SSLMethod", "Views"]
