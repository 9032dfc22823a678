"""FedX's relations to earlier steps: the latest embeddings, f's own and F's, instead of a second batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor


class RelationQueue(NamedTuple):
    """Embeddings of the second views of earlier steps, newest first; unit length, float32.

    A step makes a new queue and does not write into the old one: the backward pass still reads that.
    """

    local: Tensor  # (k, d), as f saw them
    teacher: Tensor  # (k, d), as F saw them

    @classmethod
    @torch.no_grad()
    def filled(cls, z: Tensor, length: int) -> "RelationQueue":
        """A queue before the first step, when f still is F: both have the same view of some images.

        Few images, again and again until the queue is full: a relation to an image that is there four times is four
        times a quarter, and a whole queue of images would cost as much as several steps.

        Args:
            z: (n, d) embeddings.
            length: k.
        """
        repeated = _unit(z).repeat(-(-length // len(z)), 1)[:length]
        return cls(repeated, repeated)

    @torch.no_grad()
    def pushed(self, local: Tensor, teacher: Tensor | None) -> "RelationQueue":
        """The queue with the newest embeddings in front; the oldest fall out. Without F's, only f's move."""
        return RelationQueue(
            _join(local, self.local),
            self.teacher if teacher is None else _join(teacher, self.teacher),
        )


def _join(new: Tensor, queue: Tensor) -> Tensor:
    """Normalized, so that half precision loses nothing by it."""
    return torch.cat([_unit(new), queue])[: len(queue)]


def _unit(z: Tensor) -> Tensor:
    return nnf.normalize(z.float(), dim=1)
