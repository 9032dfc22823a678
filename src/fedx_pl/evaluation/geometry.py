"""The geometry of an embedding: angles between models and classes, and signs of a collapse.

The angles are those of the FedX paper's embedding analysis. Alignment and uniformity are Wang and
Isola's (2020): views of one image should lie close together, all images far apart. RankMe (Garrido
et al., 2023) is the number of dimensions an embedding really uses. A collapsed encoder has a RankMe
near 1 and a uniformity near 0.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedx_pl import losses

_RANKME_EPS = 1e-7  # as in the RankMe paper
# Two million pairs: the third digit stands, and time does not grow with the data
_UNIFORMITY_ROWS = 2000


def angles(z1: Tensor, z2: Tensor) -> Tensor:
    """The angle between two embeddings of each image, ``arccos(sim(f(x), F(x)))``.

    Args:
        z1: (N, D), of any length.
        z2: (N, D).

    Returns:
        float64 (N,) in degrees, 0 to 180.
    """
    cosine = (_unit(z1.double()) * _unit(z2.double())).sum(1)
    # Rounding may leave a cosine just above 1, where arccos is nan
    return cosine.clamp(-1, 1).arccos().rad2deg()


def prototypes(z: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean embedding of each class; nan for a class without images.

    Args:
        z: (N, D).
        labels: int64 (N,) in 0 .. classes - 1, or -1 for an image that is left out.
        classes: number of classes.

    Returns:
        float64 (classes, D).
    """
    members = F.one_hot(labels[labels >= 0], classes).double()
    return members.T @ z[labels >= 0].double() / members.sum(0)[:, None]


def interclass_angles(z: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Angles between the prototypes of every pair of classes that have images.

    Args:
        z: (N, D).
        labels: int64 (N,) in 0 .. classes - 1, or -1.
        classes: number of classes.

    Returns:
        float64 (C (C - 1) / 2,) in degrees: (0, 1), (0, 2), ..., (1, 2), ...
    """
    means = prototypes(z, labels, classes)
    means = means[labels[labels >= 0].unique()]
    first, second = torch.triu_indices(len(means), len(means), offset=1, device=means.device)
    return angles(means[first], means[second])


def alignment(z1: Tensor, z2: Tensor) -> float:
    """The mean squared distance between the directions of two views, 0 (the same) to 4 (opposite).

    Args:
        z1: (N, D) of one view of the images.
        z2: (N, D) of another view of the same images.
    """
    return losses.alignment(z1, z2).item()


def uniformity(z: Tensor, t: float = 2.0) -> float:
    """The log of the mean of ``exp(-t |u - v|^2)`` over pairs of images; 0 after a collapse.

    Args:
        z: (N, D); of more than 2,000 images as many are drawn, always the same ones.
        t: the larger, the more only near pairs count.

    Returns:
        0 or less; nan for fewer than two images.
    """
    if len(z) < 2:
        return math.nan
    generator = torch.Generator().manual_seed(0)
    unit = _unit(z[torch.randperm(len(z), generator=generator)[:_UNIFORMITY_ROWS].to(z.device)])
    near = (2 * t * (unit @ unit.T - 1)).exp().fill_diagonal_(0)  # |u - v|^2 = 2 - 2 u v
    return (near.sum() / (len(unit) * (len(unit) - 1))).log().item()


def rankme(features: Tensor) -> float:
    """The exponential of the entropy of the singular values, as shares of their sum.

    They are the roots of the eigenvalues of the (D, D) Gram matrix, which is far smaller than the
    features. In float64, since roots magnify the rounding of small eigenvalues.

    Args:
        features: (N, D), not centered, as in the paper.

    Returns:
        The effective rank; nan if the features are not finite.
    """
    if not torch.isfinite(features).all():
        return math.nan  # the eigenvalues would raise
    features = features.double()
    eigenvalues = torch.linalg.eigvalsh(features.T @ features)
    singular = eigenvalues.clamp(min=0).sqrt()[-min(features.shape) :]  # in ascending order
    p = singular / singular.sum().clamp(min=_RANKME_EPS) + _RANKME_EPS
    entropy = -(p * p.log()).sum()
    return float(entropy.exp())


def health(features: Tensor) -> dict[str, float]:
    """Measures signs of a collapse of (N, D) features.

    ``feature_std`` is the standard deviation of the directions, averaged over dimensions: near ``1
    / sqrt(D)`` for directions that spread evenly, 0 after a collapse.
    """
    return {
        "rankme": rankme(features),
        "uniformity": uniformity(features),
        "feature_std": _unit(features).std(0).mean().item(),
    }


def box(values: Tensor) -> dict[str, float]:
    """The mean, quartiles and whiskers of some numbers, for a box plot.

    ``low`` and ``high`` are the outermost values that are no further from the box than 1.5 times
    its height.
    """
    numbers = values.flatten().cpu().numpy()
    q1, median, q3 = np.quantile(numbers, [0.25, 0.5, 0.75])
    reach = 1.5 * (q3 - q1)
    inside = numbers[(numbers >= q1 - reach) & (numbers <= q3 + reach)]
    found = {
        "mean": numbers.mean(),
        "median": median,
        "q1": q1,
        "q3": q3,
        "low": inside.min(),
        "high": inside.max(),
    }
    return {name: float(value) for name, value in found.items()}


def _unit(z: Tensor) -> Tensor:
    return F.normalize(z, dim=1)
