"""Few labels: the network is fine-tuned on a small labeled part of the images.

The paper gives 1, 5 and 10 % of the labels, SGD with learning rate 1e-3 and 100 epochs. It is
silent on the rest, for which we take what pre-training uses: momentum 0.9, the run's own
augmentation (one view per image) and 64 images per step, as FedX has. There is no weight decay. The
labeled images of all clients are in one place.
"""

import copy
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedx_pl.data.augment import Augment
from fedx_pl.data.batches import ImageStore, at_least_two
from fedx_pl.data.images import Split
from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.options import SemiOptions
from fedx_pl.evaluation.scores import Scores, score
from fedx_pl.seeding import derive


def labeled_subset(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Chooses a share of the labeled images, with classes in the proportions of the whole.

    Every class is rounded down, to no less than one image; what then is missing of the share comes
    from the classes that lost most by it.

    Args:
        labels: int64 (N,); -1 for an image without a label, which is never chosen.
        fraction: in (0, 1].
        seed: each class has an order that depends on nothing else, so that a larger share adds to a
            smaller one.

    Returns:
        int64 (n,) rows, ascending.
    """
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    wanted = fraction * counts
    # 0.07 * 100 is 7.000000000000001, 0.29 * 100 28.99...
    sizes = np.maximum(np.floor(wanted + 1e-9), 1).astype(int)
    missing = max(0, round(fraction * counts.sum()) - sizes.sum())
    sizes[np.argsort(sizes - wanted, kind="stable")[:missing]] += 1
    rows = []
    for label, size in zip(classes, sizes, strict=True):
        draw = np.random.default_rng(derive(seed, "labels", int(label)))
        rows.append(draw.permutation(np.flatnonzero(labels == label))[:size])
    return np.sort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def fine_tune(
    backbone: nn.Module,
    store: ImageStore,
    rows: np.ndarray,
    labels: np.ndarray,
    augment: Augment,
    *,
    classes: int,
    options: SemiOptions,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Trains a copy of the backbone and a new linear classifier together, by cross-entropy.

    Args:
        backbone: maps images to (n, ``backbone.feature_dim``); it is left as it is.
        store: the training images; the copy is trained on its device.
        rows: (n,) of the images to train on.
        labels: (n,) in 0 .. classes - 1, of these images.
        augment: makes one random view of each image.
        classes: number of classes.
        options: epochs, learning rate, momentum and batch size.
        seed: of the classifier, the order of the images and their views; the global random state is
            left alone.
        tick: called after every step.

    Returns:
        The fine-tuned network, (n, C, h, w) -> (n, classes).
    """
    device = store.device
    index = torch.from_numpy(rows).to(store.index_device)
    targets = torch.from_numpy(labels).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive(seed, "classifier"))  # for dropout as well
        classifier = nn.Linear(int(backbone.feature_dim), classes)  # type: ignore[arg-type]
        network = nn.Sequential(copy.deepcopy(backbone), classifier).to(device).train()
        optimizer = torch.optim.SGD(network.parameters(), options.lr, options.momentum, fused=True)
        for epoch in range(options.epochs):
            host = torch.Generator().manual_seed(derive(seed, "order", epoch))
            generator = torch.Generator(device).manual_seed(derive(seed, "augment", epoch))
            for chosen in torch.randperm(len(rows), generator=host).split(options.batch_size):
                chosen = at_least_two(chosen)
                views = augment(store.take(index[chosen.to(index.device)]), generator)
                optimizer.zero_grad()
                F.cross_entropy(network(views), targets[chosen.to(device)]).backward()
                optimizer.step()
                tick()
    return network


def scores(network: nn.Module, test: Split, prepare: Callable[[Tensor], Tensor]) -> Scores:
    """Scores a classifier on the labeled test images; nan with a warning if it has diverged.

    Args:
        network: (n, C, h, w) -> (n, classes).
        test: images and labels; those with label -1 are left out.
        prepare: uint8 (n, H, W, C) -> normalized network input.
    """
    assert test.labels is not None
    logits = extract(network, test.images, prepare).cpu()
    if not torch.isfinite(logits).all():
        warnings.warn("fine-tuning diverged: the accuracy is nan", stacklevel=2)
        return Scores()
    labels = torch.from_numpy(test.labels)
    labeled = labels >= 0
    return score(logits[labeled], labels[labeled], logits.shape[1])
