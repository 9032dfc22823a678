"""A queue of the latest embeddings by f and by F, which replaces FedX's relation batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor


class RelationQueue(NamedTuple):
    """Embeddings of the second views of earlier steps, newest first; unit length, float32.

    A step makes a new queue instead of writing into the old one, which the backward pass still
    reads.
    """

    local: Tensor  # (k, d), as f saw them
    teacher: Tensor  # (k, d), as F saw them

    @classmethod
    @torch.no_grad()
    def filled(cls, z: Tensor, length: int) -> "RelationQueue":
        """The queue before the first step, when f and F are the same.

        A few images are repeated until the queue is full. An image that is there four times has
        four relations of a quarter each. Embedding as many images as the queue holds would cost as
        much as several steps.

        Args:
            z: (n, d) embeddings.
            length: k, the length of the queue.
        """
        repeated = _unit(z).repeat(-(-length // len(z)), 1)[:length]
        return cls(repeated, repeated)

    @torch.no_grad()
    def pushed(self, local: Tensor, teacher: Tensor | None) -> "RelationQueue":
        """The queue with new embeddings in front, without the oldest ones.

        Args:
            local: (n, d) embeddings by f.
            teacher: (n, d) embeddings by F; None leaves F's part of the queue as it is.
        """
        return RelationQueue(
            _join(local, self.local),
            self.teacher if teacher is None else _join(teacher, self.teacher),
        )


def _join(new: Tensor, queue: Tensor) -> Tensor:
    """Normalizes the new embeddings and puts them in front."""
    return torch.cat([_unit(new), queue])[: len(queue)]


def _unit(z: Tensor) -> Tensor:
    return nnf.normalize(z.float(), dim=1)
