"""MoCo v1 and v2 (He et al., 2020; Chen et al., 2020)."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightly.models.utils import deactivate_requires_grad
from torch import Tensor, nn

from fedx_pl.losses import info_nce
from fedx_pl.methods.base import EmaPair, Embeddings, Loss, SSLMethod, State, Views, copy_state
from fedx_pl.options import check


class MoCo(SSLMethod):
    """Contrasts each query with its momentum key and a queue of older keys.

    The query network is averaged. The key network starts each round as a copy of it and is not
    kept. The queue belongs to the client and is kept between rounds.
    """

    online_views = 1

    def __init__(
        self,
        backbone: nn.Module,
        *,
        version: int = 2,
        momentum: float = 0.99,
        queue_size: int = 4096,
        tau: float = 0.1,
        **base: Any,
    ) -> None:
        """Adds the key network and the queue.

        Args:
            backbone: see `SSLMethod`.
            version: 1 is a linear head, 2 an MLP head.
            momentum: momentum of the key network's moving average.
            queue_size: keys kept at most; a client with fewer images keeps fewer (`capacity`).
            tau: temperature; 0 takes that of the version, .07 or .2.
            base: keyword arguments of `SSLMethod`.
        """
        check("version", version, choices=(1, 2))
        check("momentum", momentum, example=0.99, at_least=0, at_most=1)
        check("queue_size", queue_size, example=4096, at_least=1)
        check("tau", tau, example=0.1, at_least=0)
        super().__init__(backbone, **base)
        self.tau = tau or {1: 0.07, 2: 0.2}[version]
        if version == 1:
            self.projector = nn.Linear(self.feature_dim, self.embed_dim)
        self.momentum = momentum
        self.key = nn.Sequential(copy.deepcopy(self.backbone), copy.deepcopy(self.projector))
        deactivate_requires_grad(self.key)
        self.queue: Tensor
        self.queue_next: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(queue_size, self.embed_dim), dim=1))
        self.register_buffer("queue_next", torch.zeros((), dtype=torch.long))
        self.capacity = queue_size

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """InfoNCE of the queries ``first`` against the keys of ``second``, which join the queue."""
        key = self.keys(batch.second)
        # A copy: the queue changes below, before the backward pass reads it.
        loss = info_nce(z.first, key, self.queue[: self.capacity].clone(), tau=self.tau)
        self.enqueue(key)
        return Loss(contrastive=loss)

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        """Normalized momentum embeddings, (n, C, h, w) -> (n, d)."""
        return F.normalize(self.key(x).float(), dim=1)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Overwrites the oldest keys, wrapping around at any batch size."""
        keys = keys[-self.capacity :]
        slots = (self.queue_next + torch.arange(len(keys), device=keys.device)) % self.capacity
        self.queue[slots] = keys
        self.queue_next.copy_((self.queue_next + len(keys)) % self.capacity)

    def ema_pairs(self) -> list[EmaPair]:
        """The key network follows the query network."""
        return [EmaPair(nn.Sequential(self.backbone, self.projector), self.key, self.momentum)]

    def private_names(self) -> set[str]:
        """The key network and the queue stay with the client."""
        return super().private_names() | {"key", "queue", "queue_next"}

    def kept_tensors(self) -> State:
        """The queue; the key network starts the next round as a copy of the query network."""
        return {
            name: t for name, t in super().kept_tensors().items() if not name.startswith("key.")
        }

    def reset_private(self) -> None:
        """Fills the queue with random directions, as in the original."""
        super().reset_private()
        self.queue.copy_(F.normalize(torch.randn_like(self.queue), dim=1))
        self.queue_next.zero_()

    def receive(self, shared: State, private: State | None, absent: int = 0) -> None:
        """Makes the key network a copy of the query network."""
        super().receive(shared, private, absent)
        for online, target, _ in self.ema_pairs():
            copy_state(target.state_dict(), online.state_dict())

    def on_round_start(self) -> None:
        """Shrinks the queue for small clients, where it would hold each query's own older key.

        Some still find theirs: each epoch is shuffled anew, so that about half of the queries have
        an older key among the ``n - batch`` latest ones.
        """
        super().on_round_start()
        n = self.local.data.num_images
        batch = self.local.data.batch_size
        self.capacity = min(len(self.queue), max(n - batch, n // 2, 1))
