"""Weighted k-nearest-neighbor accuracy: cheap to follow during training, nothing is fitted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedx_pl.evaluation.features import measurable
from fedx_pl.evaluation.scores import Scores, score

# Similarities held at once, (test chunk, all train images): 64 MB in float32, whatever the size of
# the data set.
_CHUNK_ELEMENTS = 16_000_000


@torch.inference_mode()
def knn_votes(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    *,
    k: int = 200,
    tau: float = 0.1,
    classes: int,
) -> Tensor:
    """Votes for the class of each test feature, as Wu et al. (2018, "instance discrimination").

    The k train features of highest cosine similarity vote for their class with weight
    exp(similarity / tau).

    Args:
        train_x: (N, D) float features.
        train_y: (N,) int64 labels in 0 .. classes - 1; all of them labeled.
        test_x: (M, D) float features.
        k: number of neighbors, clipped to N.
        tau: temperature of the vote; small values listen to the nearest neighbors only.
        classes: number of classes.

    Returns:
        (M, classes) votes; the largest is the prediction.
    """
    # lightly's `knn_predict` predicts the same in 1.0 (10 classes) to 1.1 times (100 classes) the
    # CPU time, but returns a ranking instead of votes, and its exp(1 / tau) overflows.
    bank = F.normalize(train_x).T
    k = min(k, len(train_x))
    votes = []
    for queries in F.normalize(test_x).split(max(1, _CHUNK_ELEMENTS // len(train_x))):
        similarity, neighbors = (queries @ bank).topk(k)
        # Relative to the nearest neighbor: the same winner, and no overflow of exp(1 / tau) for a
        # small tau.
        weights = ((similarity - similarity[:, :1]) / tau).exp()
        votes.append(
            weights.new_zeros(len(queries), classes).scatter_add_(1, train_y[neighbors], weights)
        )
    return torch.cat(votes)


def knn_scores(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    k: int = 200,
    tau: float = 0.1,
    classes: int,
) -> Scores:
    """The scores of `knn_votes`; images with label -1 are left out of both sets.

    Args:
        train_x: (N, D) features.
        train_y: (N,) labels.
        test_x: (M, D) features.
        test_y: (M,) labels.
        k: number of neighbors, clipped to the number of labeled train images.
        tau: temperature of the vote.
        classes: number of classes.

    Returns:
        Scores of nan, with a warning, if a set holds no labels or non-finite features.
    """
    data = measurable(train_x, train_y, test_x, test_y=test_y, classes=classes)
    if data is None:
        return Scores()
    train_x, train_y, test_x, test_y = data
    return score(
        knn_votes(train_x, train_y, test_x, k=k, tau=tau, classes=classes), test_y, classes
    )
