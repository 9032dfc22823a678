"""The door to all images: `load` makes `ImageData` of options, whatever the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedx_pl.data.images import (
    ARRAYS,
    Arrays,
    DataOptions,
    ImageData,
    Split,
    cache_folder,
    normalization,
    root_folder,
)
from fedx_pl.data.sources import cache, folder, named
from fedx_pl.data.sources.arrays import is_array, of_arrays
from fedx_pl.data.sources.search import load_named
from fedx_pl.errors import Report, UserError, known_names, one_line, readable, say
from fedx_pl.seeding import derive

Source = Callable[[DataOptions, Report], Any]  # loads images: `ImageData`, or arrays


def load(
    options: DataOptions, seed: int = 0, report: Report = say, *, source: Source | None = None
) -> ImageData:
    """Loads a data set.

    Args:
        options: which one, and from where.
        seed: chooses the subset when ``options.limit`` or ``options.test_limit`` is set.
        report: receives one line for each place that failed, and for files that were skipped.
        source: a user's function that loads it, instead of the one that the name stands for.

    Returns:
        The images, in memory or memory-mapped, in an order that depends on their content only.

    Raises:
        UserError: nothing usable was found, or an option makes no sense.
    """
    _check(options, known=source is not None)
    if source is None:
        data = SOURCES[options.name](options, report)
        assert isinstance(data, ImageData)
        return replace(_subset(data, options, seed), options=options)
    data = _call(source, options, report)
    _, side, _, channels = data.train.images.shape
    loaded_options = replace(options, image_size=side, grayscale=channels == 1)
    if channels not in (1, 3):  # Then the length of the mean keeps the number of channels.
        mean, std = normalization(options.mean, options.std, channels)
        loaded_options = replace(loaded_options, mean=list(mean), std=list(std))
    fingerprint = cache.fingerprint_of(data.train, data.test)
    subset = _subset(replace(data, fingerprint=fingerprint), options, seed)
    return replace(subset, name=options.name, options=loaded_options)


def _call(source: Source, options: DataOptions, report: Report) -> ImageData:
    """Calls a user's function, which may raise anything."""
    try:
        result = source(options, report)
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"data.name={options.name}: its images cannot be loaded ({reason}); it is called as "
            f"function(options, report) and returns (images, labels)"
        ) from error
    return result if isinstance(result, ImageData) else of_arrays(*pairs(result))


def pairs(source: Any) -> tuple[Arrays, Arrays | None]:
    """The training and the test arrays of what a user's function may return.

    Args:
        source: images, (images, labels), or two such pairs, to train on and to evaluate on.
    """
    if is_array(source):
        return (source, None), None
    nested = (
        isinstance(source, tuple | list)
        and len(source) == 2
        and isinstance(source[0], tuple | list)
    )
    return (source[0], source[1]) if nested else (source, None)


def stored_side(options: DataOptions) -> int:
    """The side length of a data set's images, without loading it."""
    return _stored_shape(options)[0]


def stored_channels(options: DataOptions) -> int:
    """The number of channels of a data set's images, without loading it."""
    return _stored_shape(options)[1]


def _stored_shape(options: DataOptions) -> tuple[int, int]:
    if options.name in named.NAMED:
        _, side, channels = named.NAMED[options.name]().shape
        return side, channels
    channels = 1 if options.grayscale else 3
    if options.name in folder.SIDES:
        return options.image_size or folder.SIDES[options.name], channels
    return options.image_size, len(options.mean) or channels


def _check(options: DataOptions, *, known: bool) -> None:
    if options.name == ARRAYS:
        raise UserError(
            "data.name=arrays: these images came from Python, and only the script that has them "
            "can use them; there, type evaluate_run(RUN, KINDS, data=IMAGES) to evaluate"
        )
    if not known and options.name not in SOURCES:
        names = [name for name in SOURCES if name != ARRAYS]
        instead = known_names(options.name, names, prefix="data.name=")
        raise UserError(f"data.name={options.name} is not known{instead}")
    _check_places(options)
    for key in ("limit", "test_limit", "image_size", "workers"):
        if getattr(options, key) < 0:
            raise UserError(f"data.{key}={getattr(options, key)}: type 0 or a positive number")
    bounds = options.value_range
    if bounds and not (len(bounds) == 2 and np.isfinite(bounds).all() and bounds[0] < bounds[1]):
        raise UserError(
            f"data.value_range={bounds}: type two numbers, the smaller first, e.g. [0,4095]; "
            f"[] takes what images use"
        )
    if not 0 <= options.test_fraction < 1:
        raise UserError(
            f"data.test_fraction={options.test_fraction}: type a number from 0 to below 1, e.g. 0.2"
        )


def _check_places(options: DataOptions) -> None:
    for key in ("root", "cache", "test_root", "labels"):
        path = getattr(options, key)
        if "\0" in path:
            raise UserError(
                f"data.{key}={readable(path)}: no path has a NUL character; type one without it"
            )
        # Surrogates stand for bytes that are no text, and files about a run must be text.
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            raise UserError(
                f"data.{key}={readable(path)} is not UTF-8; "
                f"rename it, or make a link to it (ln -s) and type the link"
            )
    root = root_folder(options).resolve()
    cache_path = cache_folder(options).resolve()
    if cache_path in (root, root / options.name) or root == cache_path / options.name:
        raise UserError(
            f"data.cache={cache_folder(options)} is where data.root={options.root} has its own "
            f"files; type data.cache=ANOTHER"
        )


def _subset(data: ImageData, options: DataOptions, seed: int) -> ImageData:
    """Keeps ``limit`` training and ``test_limit`` test images; the fingerprint then differs."""

    def draw(split: Split, limit: int, purpose: str) -> Split:
        rng = np.random.default_rng(derive(seed, "subset", purpose))
        return split.take(np.sort(rng.permutation(len(split.images))[:limit]))

    train = data.train
    test = data.test
    marks = []
    if 0 < options.limit < len(train.images):
        train = draw(train, options.limit, "train")
        marks.append(f"train {options.limit}")
    if test is not None and 0 < options.test_limit < len(test.images):
        test = draw(test, options.test_limit, "test")
        marks.append(f"test {options.test_limit}")
    if not marks:
        return data
    fingerprint = cache.fingerprint({"all": data.fingerprint, "subset": f"{marks} seed {seed}"})
    whole_train = data.train if train is not data.train else None
    return replace(data, train=train, test=test, fingerprint=fingerprint, whole_train=whole_train)


# By their names on the command line: what loads the images.
SOURCES: dict[str, Source] = {
    **dict.fromkeys(named.NAMED, load_named),
    "imagenet10": folder.load_imagenet,
    "folder": folder.load_folder,
    ARRAYS: load_named,
}
