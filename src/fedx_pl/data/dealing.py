"""Deals images out to clients.

A split is a list with one sorted int64 index array per client. Every function here returns
disjoint, non-empty arrays that cover all images, and the same arrays for the same arguments. Work
happens on counts (how many images of a class a client gets); single images are dealt once, when the
counts are settled: a thousand clients take milliseconds.
"""

import math
import warnings
from collections.abc import Callable

import numpy as np

from fedx_pl.options import OptionError, check

MAX_TRIES = 50
# Beyond this, shares differ by less than one image in any data set, and gamma variates would
# overflow.
MAX_BETA = 1e9


def iid(num_images: int, clients: int, seed: int) -> list[np.ndarray]:
    """Shuffles and cuts into equal parts; sizes differ by one image at most."""
    check_clients(clients, num_images)
    return [
        np.sort(part) for part in np.array_split(_rng(seed, "iid").permutation(num_images), clients)
    ]


def dirichlet(
    labels: np.ndarray, clients: int, beta: float, seed: int, min_size: int = 10
) -> list[np.ndarray]:
    """Skews the class mix: the shares of each class come from Dir(beta) over the clients.

    The field's usual scheme: class by class, clients that already hold num_images / clients images
    get no more, and the whole draw is repeated until every client has `min_size` images. Unlike the
    usual scheme it always ends: after `MAX_TRIES` draws the smallest clients are topped up with
    random images of the largest, with a warning.

    Args:
        labels: (num_images,) any values; each distinct value is a class, -1 ("unlabeled") too.
        clients: Number of clients.
        beta: Above 0. 0.1 gives most clients one or two classes, 100 gives everybody nearly the
            same mix.
        seed: The run's seed.
        min_size: Fewest images of a client; lowered to num_images // clients where there are not
            enough images.

    Returns:
        One sorted int64 index array per client.
    """
    check_clients(clients, len(labels))
    check_beta(beta)
    rng = _rng(seed, "dirichlet")
    values, class_of = np.unique(labels, return_inverse=True)
    sizes = np.bincount(class_of, minlength=len(values))

    def draw() -> np.ndarray:
        counts = np.zeros((len(sizes), clients), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for row, shares in enumerate(
            rng.dirichlet(np.full(clients, min(beta, MAX_BETA)), size=len(sizes))
        ):
            # Someone is always open: were all at num_images / clients, no image would be left.
            counts[row] = cut(int(sizes[row]), shares, held < len(labels) / clients, rng=rng)
            held += counts[row]
        return counts

    return _deal(class_of, clients, draw, min_size=min_size, rng=rng)


def quantity_skew(
    num_images: int, clients: int, beta: float, seed: int, min_size: int = 10
) -> list[np.ndarray]:
    """Skews the sizes only: they follow Dir(beta), and each client has a random sample of all.

    `min_size` is kept as in `dirichlet`: by drawing again, then by topping up.
    """
    check_clients(clients, num_images)
    check_beta(beta)
    rng = _rng(seed, "quantity")

    def draw() -> np.ndarray:
        shares = rng.dirichlet(np.full(clients, min(beta, MAX_BETA)))
        return cut(num_images, shares, np.ones(clients, dtype=bool), rng=rng)[None]

    return _deal(np.zeros(num_images, dtype=np.int64), clients, draw, min_size=min_size, rng=rng)


def classes_per_client(labels: np.ndarray, clients: int, k: int, seed: int) -> list[np.ndarray]:
    """Gives each client images of at most `k` classes, which the owners of a class share evenly.

    Each client in turn takes the `k` classes with the fewest owners so far, ties broken at random:
    classes differ by one owner at most, and which classes meet in a client is random. A client
    lacks one of its classes only where a class has fewer images than owners.

    Args:
        labels: (num_images,) any values.
        clients: Number of clients.
        k: Classes per client.
        seed: The run's seed.

    Returns:
        One sorted int64 index array per client.
    """
    check_clients(clients, len(labels))
    values, class_of = np.unique(labels, return_inverse=True)
    sizes = np.bincount(class_of, minlength=len(values))
    if not 1 <= k <= len(sizes):
        problem = f"must be between 1 and {len(sizes)}, the number of classes"
        advice = f"{{classes}}={min(max(k, 1), len(sizes))}"
        raise OptionError("classes", k, problem, advice)
    if k * clients < len(sizes):
        problem = f"leaves some of {len(sizes)} classes to none of {clients} clients"
        more, fewer = math.ceil(len(sizes) / clients), math.ceil(len(sizes) / k)
        raise OptionError("classes", k, problem, f"{{classes}}={more} or {{clients}}={fewer}")
    rng = _rng(seed, "classes")
    owns = np.zeros((len(sizes), clients), dtype=bool)
    owners = np.zeros(len(sizes), dtype=np.int64)
    for client in range(clients):
        mine = np.lexsort((rng.random(len(sizes)), owners))[:k]
        owns[mine, client] = True
        owners[mine] += 1
    counts = owns * (sizes // owners)[:, None]
    held = counts.sum(axis=0)
    for row in range(len(sizes)):  # what does not divide goes to the owners that hold least
        candidates = np.flatnonzero(owns[row])
        poorest = candidates[np.argsort(held[candidates], kind="stable")][
            : sizes[row] - counts[row].sum()
        ]
        counts[row, poorest] += 1
        held[poorest] += 1
    if held.min() == 0:
        problem = f"leaves {int((held == 0).sum())} of {clients} clients without images"
        raise OptionError("classes", k, problem, "a larger {classes} or a smaller {clients}")
    return _by_owner(_assign(class_of, counts, rng), clients)


def by_group(groups: np.ndarray) -> list[np.ndarray]:
    """Makes one client of each distinct value of `groups` (num_images,), in sorted order."""
    names, owner = np.unique(groups, return_inverse=True)
    return _by_owner(owner, len(names))


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for each kind of partition, so that no two share their randomness."""
    if seed < 0:
        raise OptionError("seed", seed, "must not be negative", "{seed}=0")
    return np.random.default_rng((seed, *purpose.encode()))


def check_clients(clients: int, num_images: int) -> None:
    """Raises an `OptionError` if there are too few or too many clients."""
    check("clients", clients, example=10, at_least=1)
    if clients > num_images:
        problem = f"is more than there are images ({num_images})"
        raise OptionError("clients", clients, problem, f"{{clients}}={num_images} or fewer")


def check_beta(beta: float) -> None:
    """Raises an `OptionError` if ``beta`` is no concentration."""
    check("beta", beta, example=0.5, above=0)


def cut(size: int, shares: np.ndarray, open_: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Splits `size` images by the shares of the open clients; (clients,), the sum is `size`."""
    cumulated = np.cumsum(shares * open_)
    if not (cumulated[-1] > 0 and math.isfinite(cumulated[-1])):
        # All went to clients that take no more, or shares so skewed that they underflowed: either
        # way the limit of a Dirichlet among the others is that one of them takes all.
        cumulated = np.cumsum(np.arange(len(shares)) == rng.choice(np.flatnonzero(open_)))
    # Dividing by the last value makes the end exactly 1: rounding gives nothing to clients without
    # a share after it. The random start keeps rounding fair: without it, equal shares of half an
    # image would always favor the same half.
    cuts = np.floor(cumulated / cumulated[-1] * size + rng.random()).astype(np.int64)
    return np.diff(np.minimum(cuts, size), prepend=0)


def _deal(
    class_of: np.ndarray,
    clients: int,
    draw: Callable[[], np.ndarray],
    min_size: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Draws (classes, clients) counts until all clients have `min_size`, and deals the images."""
    # Nobody goes without an image, whatever min_size says
    wanted = min(max(min_size, 1), len(class_of) // clients)
    for _ in range(MAX_TRIES):
        counts = draw()
        if counts.sum(axis=0).min() >= wanted:
            break
    owner = _assign(class_of, counts, rng)
    moved = top_up(owner, clients, wanted, rng=rng)
    if moved:
        warnings.warn(
            f"in each of {MAX_TRIES} draws some clients had fewer than {wanted} images: moved "
            f"{moved} random images to them from the largest clients (a larger partition.beta or "
            f"a smaller partition.min_size avoids this)",
            stacklevel=3,
        )
    return _by_owner(owner, clients)


def _assign(class_of: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Picks owners (num_images,) so that client m has counts[c, m] random images of class c."""
    shuffled = rng.permutation(len(class_of))
    by_class = shuffled[np.argsort(class_of[shuffled], kind="stable")]
    owner = np.empty(len(class_of), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return owner


def top_up(owner: np.ndarray, clients: int, min_size: int, rng: np.random.Generator) -> int:
    """Moves images from the largest clients, as few as possible, so that all have `min_size`.

    Givers are cut down to one common level, which is at least `min_size` as long as min_size *
    clients <= num_images.

    Returns:
        How many images moved.
    """
    sizes = np.bincount(owner, minlength=clients)
    lacks = np.maximum(min_size - sizes, 0)
    total = int(lacks.sum())
    if total == 0:
        return 0
    low, high = min_size, int(sizes.max())  # the highest level at which the givers can spare enough
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if np.maximum(sizes - middle, 0).sum() >= total else (low, middle - 1)
        )
    gives = np.maximum(sizes - low, 0)
    spare = int(gives.sum()) - total  # fewer than there are givers, or the level would be higher
    gives[np.flatnonzero(gives)[:spare]] -= 1
    shuffled = rng.permutation(len(owner))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moving = by_owner[rank < np.repeat(gives, sizes)]
    owner[moving] = rng.permutation(np.repeat(np.arange(clients), lacks))
    return total


def _by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """Turns owners (num_images,) into one sorted index array per client."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])
