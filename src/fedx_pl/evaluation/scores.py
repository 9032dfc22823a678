"""The scores of a classifier, measured by torchmetrics."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_confusion_matrix


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Accuracies in percent; nan where there was nothing to measure."""

    top1: float = math.nan
    top5: float = math.nan
    per_class: tuple[float, ...] = ()  # top-1 of each class's images; nan for a class without any
    # numbers of images, by true class (rows) and by predicted class (columns)
    confusion: tuple[tuple[int, ...], ...] = ()


def score(outputs: Tensor, labels: Tensor, classes: int) -> Scores:
    """Compares a classifier's outputs with the labels.

    Args:
        outputs: (M, classes) logits, votes or probabilities: the largest wins.
        labels: (M,) in 0 .. classes - 1.
        classes: number of classes. With five or fewer, top-5 is 100.
    """
    if classes == 1:  # torchmetrics wants two.
        return Scores(top1=100.0, top5=100.0, per_class=(100.0,), confusion=((len(labels),),))
    top1, top5 = (
        100
        * multiclass_accuracy(
            outputs, labels, classes, average="micro", top_k=min(k, classes)
        ).item()
        for k in (1, 5)
    )
    confusion = multiclass_confusion_matrix(outputs, labels, classes)
    per_class = 100 * confusion.diagonal().double() / confusion.sum(1)
    return Scores(
        top1=top1,
        top5=top5,
        per_class=tuple(per_class.tolist()),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )
