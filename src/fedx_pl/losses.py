"""All losses, as pure functions of embeddings.

Shapes: ``n`` images in the batch, ``r`` images in the relation batch, ``d`` embedding dimensions.
Embeddings need not be normalized: every similarity here is the cosine. All functions compute in
float32 (or wider) even inside autocast, because a softmax over similarities divided by a small
``tau`` loses most of its digits in half precision.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")


def _full_precision(loss: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Runs ``loss`` outside autocast on inputs widened to at least float32."""

    @wraps(loss)
    def wide(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        with torch.autocast(tensors[0].device.type, enabled=False):
            wider = {name: _widen(value) for name, value in kwargs.items()}
            return loss(*map(_widen, args), **wider)  # type: ignore[arg-type]

    return wide


def _widen(value: object) -> object:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value  # type: ignore[attr-defined]


@_full_precision
def nt_xent(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    """SimCLR's (2n-1)-way instance discrimination (Eq. 2), averaged over all 2n anchors.

    Args:
        z1: (n, d) embeddings of the first views.
        z2: (n, d) embeddings of the second views; row ``i`` is the positive of row ``i`` of ``z1``.
        tau: temperature.
    """
    n = len(z1)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    logits = z @ z.T / tau
    # -inf, not 0: exp(0 / tau) = 1 would leave every anchor with itself as one more negative.
    logits.fill_diagonal_(float("-inf"))
    positive = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(logits, positive)


@_full_precision
def relational(
    z1: Tensor, z2: Tensor, anchors: Tensor, tau: float, divergence: str = "jsd"
) -> Tensor:
    """Divergence between the relationship vectors of two views (Eqs. 4 and 5), mean over the batch.

    A relationship vector is the softmax of an embedding's similarities to the relation batch.

    Args:
        z1: (n, d) embeddings of the first views.
        z2: (n, d) embeddings of the second views.
        anchors: (r, d) embeddings of the relation batch ``B_r``.
        tau: temperature.
        divergence: ``jsd`` is Eq. 5, 1/2 [KL(p|m) + KL(q|m)]; ``authors`` is what the released code
            computes, 1/2 [KL(m|p) + KL(m|q)].
    """
    # One matrix for both views halves the operations; on a CPU each costs more than its arithmetic.
    anchors = F.normalize(anchors, dim=1) / tau
    log_pq = F.log_softmax(F.normalize(torch.cat([z1, z2]), dim=1) @ anchors.T, dim=1).view(
        2, len(z1), len(anchors)
    )
    log_m = torch.logaddexp(log_pq[0], log_pq[1]) - math.log(2)
    if divergence == "jsd":
        total = (log_pq.exp() * (log_pq - log_m)).sum()
    elif divergence == "authors":
        total = (log_m.exp() * (2 * log_m - log_pq.sum(dim=0))).sum()
    else:
        raise ValueError(f"divergence is {divergence!r}; use 'jsd' or 'authors'")
    return total / (2 * len(z1))


@_full_precision
def global_contrast(z_local: Tensor, z_global: Tensor, tau: float) -> Tensor:
    """The global contrastive loss exactly as Eq. 7 prints it, mean over the batch.

    Each local embedding is an anchor once, and the positive is not in the denominator. The default
    of ``FedXMixin`` is the symmetric ``nt_xent`` of the released code instead.

    Args:
        z_local: (n, d) ``h(f(x))``.
        z_global: (n, d) ``F(x~)``; row ``i`` is the positive of row ``i`` of ``z_local``.
        tau: temperature.
    """
    n = len(z_local)
    if n == 1:  # No negatives: the printed fraction has an empty denominator.
        return z_local.sum() * 0.0
    z_local, z_global = F.normalize(z_local, dim=1), F.normalize(z_global, dim=1)
    to_local, to_global = z_local @ z_local.T / tau, z_local @ z_global.T / tau
    itself = torch.eye(n, dtype=torch.bool, device=z_local.device)
    negatives = torch.cat(
        [to_local.masked_fill(itself, -torch.inf), to_global.masked_fill(itself, -torch.inf)], dim=1
    )
    return (negatives.logsumexp(dim=1) - to_global.diagonal()).mean()


@_full_precision
def info_nce(query: Tensor, key: Tensor, queue: Tensor, tau: float) -> Tensor:
    """MoCo's loss: each query against its key and the queue of older keys.

    Args:
        query: (n, d) embeddings that carry gradients.
        key: (n, d) momentum embeddings of the other views.
        queue: (k, d) negatives.
        tau: temperature.
    """
    query, key, queue = (F.normalize(z, dim=1) for z in (query, key, queue))
    positive = (query * key).sum(dim=1, keepdim=True)
    logits = torch.cat([positive, query @ queue.T], dim=1) / tau
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=query.device))


@_full_precision
def alignment(z: Tensor, target: Tensor) -> Tensor:
    """Squared distance of unit vectors, ``2 - 2 cos`` (BYOL's Eq. 3), mean over the batch.

    Args:
        z: (n, d) embeddings.
        target: (n, d) what they should be.
    """
    return (2 - 2 * F.cosine_similarity(z, target, dim=1)).mean()


@_full_precision
def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """MOON's loss: is ``z`` the global model's or the previous local one's? Mean over the batch.

    ``-log(e^g / (e^g + e^p))`` with g and p the similarities over ``tau``, i.e.
    softplus(p - g).

    Args:
        z: (n, d) embeddings of the local model.
        z_global: (n, d) embeddings of the global model.
        z_previous: (n, d) embeddings of the previous local model.
        tau: temperature.
    """
    to_global = F.cosine_similarity(z, z_global, dim=1)
    to_previous = F.cosine_similarity(z, z_previous, dim=1)
    return F.softplus((to_previous - to_global) / tau).mean()


@_full_precision
def proto_nce(query: Tensor, prototypes: Tensor, cluster: Tensor, concentration: Tensor) -> Tensor:
    """PCL's prototype term for one clustering: which cluster does each image belong to?

    Args:
        query: (n, d) embeddings.
        prototypes: (k, d) cluster centers.
        cluster: (n,) index of each image's cluster.
        concentration: (k,) phi of each cluster: its own temperature.
    """
    logits = F.normalize(query, dim=1) @ F.normalize(prototypes, dim=1).T / concentration
    return F.cross_entropy(logits, cluster)
