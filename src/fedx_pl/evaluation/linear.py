"""The linear probe of the FedX authors (Adam on frozen features), made fast.

The protocol is ``nn.Linear`` + ``CrossEntropyLoss`` + ``torch.optim.Adam`` over a shuffling
``DataLoader``. On cached features a step is so small that nearly all of its time goes to the
per-sample loader, to autograd and to the bookkeeping of the optimizer. So :func:`fit` writes the
gradient of the softmax cross-entropy in closed form, calls the fused kernel of Adam on one tensor,
and cuts its batches as slices of rows shuffled a few thousand at a time. The numbers are the same:
the tests hold it against the textbook loop.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from fedx_pl.evaluation.features import measurable
from fedx_pl.evaluation.options import LinearOptions
from fedx_pl.evaluation.scores import Scores, score

# Rows gathered at once: enough to hide the call, few enough to stay in the cache
_SHUFFLED_ROWS = 4096
# Products per matrix multiplication, below which a second thread does not pay
_SMALL_STEP = 4_000_000


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    classes: int,
    options: LinearOptions,
    seed: int,
) -> Scores:
    """Trains a linear classifier on frozen features and measures it, without images labeled -1.

    Args:
        train_x: (N, D) features in eval mode, not normalized.
        train_y: (N,) labels in 0 .. classes - 1, or -1.
        test_x: (M, D) features.
        test_y: (M,) labels like ``train_y``.
        classes: number of classes.
        options: epochs, learning rate, weight decay and batch size.
        seed: of the initial weights and of the shuffling; the global random state is neither read
            nor moved.

    Returns:
        What it gets right. Non-finite features and sets without labels give nan and a warning.
    """
    data = measurable(train_x, train_y, test_x, test_y=test_y, classes=classes)
    if data is None:
        return Scores()
    train_x, train_y, test_x, test_y = data
    # Drawn on the CPU, so that a seed means the same initial weights and the same batches on every
    # device.
    generator = torch.Generator().manual_seed(seed)
    count, width = train_x.shape
    bound = 1 / math.sqrt(width)  # what nn.Linear draws from, for its weight and its bias
    weight = (
        torch.empty(classes, width + 1)
        .uniform_(-bound, bound, generator=generator)
        .to(train_x.device)
    )
    orders = (
        torch.randperm(count, generator=generator).to(train_x.device) for _ in range(options.epochs)
    )
    with _threads(
        1 if options.batch_size * weight.numel() < _SMALL_STEP else torch.get_num_threads()
    ):
        fit(weight, train_x, train_y, orders=orders, options=options)

    logits = torch.addmm(weight[:, -1], test_x, weight[:, :-1].T)
    if not torch.isfinite(logits).all():  # finite features may still overflow
        warnings.warn("the linear probe diverged: the accuracy is nan", stacklevel=2)
        return Scores()
    return score(logits, test_y, classes)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limits torch's CPU threads for a while.

    A step of 50 us is too short to share: the threads only wait for each other, and on a machine
    that is busy with other work each of those waits may last a whole time slice (measured: 8 to 50
    times slower).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def fit(
    weight: Tensor,
    features: Tensor,
    labels: Tensor,
    orders: Iterable[Tensor],
    options: LinearOptions,
) -> None:
    """Trains ``weight`` in place with Adam on the mean cross-entropy.

    With x the (n, D + 1) rows of a batch, a one appended to each, and y their one-hot labels, the
    gradient of the loss with respect to the weight W is (softmax(W x^T) - y^T) x / n.

    Args:
        weight: float (classes, D + 1), the last column is the bias.
        features: float (N, D).
        labels: int64 (N,).
        orders: for each epoch, the rows in the order in which they are seen; the last batch may be
            short.
        options: learning rate, weight decay and batch size. The number of epochs is the number of
            ``orders``.
    """
    size = options.batch_size
    rows = size * max(1, _SHUFFLED_ROWS // size)
    one_hot = F.one_hot(labels, len(weight)).to(features.dtype)
    # Filled again and again. The last column of x stays one, which makes the bias a weight like the
    # others.
    shuffled_x = features.new_ones(min(rows, len(features)), features.shape[1] + 1)
    shuffled_y = one_hot.new_empty(len(shuffled_x), len(weight))
    # First, second: Adam's moments
    gradient, first, second = (torch.zeros_like(weight) for _ in range(3))
    step = weight.new_zeros(())
    for order in orders:
        for chosen in order.split(rows):
            x_rows, y_rows = shuffled_x[: len(chosen)], shuffled_y[: len(chosen)]
            torch.index_select(features, 0, chosen, out=x_rows[:, :-1])
            torch.index_select(one_hot, 0, chosen, out=y_rows)
            for x, y in zip(x_rows.split(size), y_rows.split(size), strict=True):
                # Classes first: the softmax then runs over whole vectors of images, twice as fast
                # for few classes.
                error = torch.softmax(torch.mm(weight, x.T), 0).sub_(y.T).div_(len(x))
                torch.mm(error, x, out=gradient)
                # The kernel of torch.optim.Adam(fused=True), private but measured: a step of the
                # probe on 64 images takes 43 us with it and 78 us with the optimizer around it.
                torch._fused_adam_(
                    [weight],
                    [gradient],
                    [first],
                    [second],
                    [],
                    [step.add_(1)],
                    lr=options.lr,
                    beta1=0.9,
                    beta2=0.999,
                    weight_decay=options.weight_decay,
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
