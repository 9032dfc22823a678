"""Where images come from: ``load`` finds a dataset, verifies it once and keeps it as uint8 arrays.

A named dataset is looked for in four places, in this order: (1) the cache of an earlier run, (2) files the user put
there, (3) torchvision's download, (4) a package mirror. Each place that fails says why in one line; the next follows.
"""

from __future__ import annotations

import hashlib
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
from fedx_pl.data.sources import cache, fetch, folder, named
from fedx_pl.data.sources.arrays import is_array, of_arrays
from fedx_pl.data.sources.cache import CacheError
from fedx_pl.data.sources.fetch import FetchError
from fedx_pl.data.sources.formats import FormatError, one_line
from fedx_pl.data.sources.named import Layout, NamedSet, RawSet
from fedx_pl.data.sources.survey import number
from fedx_pl.errors import Report, UserError, known_names, readable, say
from fedx_pl.seeding import derive

__all__ = ["SOURCES", "DataOptions", "ImageData", "Split", "describe", "load", "overview"]

Source = Callable[[DataOptions, Report], Any]  # loads images: `ImageData`, or arrays


def load(
    options: DataOptions, seed: int = 0, report: Report = say, *, source: Source | None = None
) -> ImageData:
    """Loads a dataset.

    Args:
        options: which one, and from where.
        seed: chooses the subset when ``options.limit`` or ``options.test_limit`` is set.
        report: receives one line for each source that failed, and for files that were skipped.
        source: a function of one's own that loads it.

    Returns:
        The images, in memory or memory-mapped, in an order that depends on their content only.

    Raises:
        UserError: nothing usable was found, or an option makes no sense.
    """
    _check(options, known=source is not None)
    if source is None:
        found = SOURCES[options.name](options, report)
        assert isinstance(found, ImageData)
        return replace(_subset(found, options, seed), options=options)
    try:
        found = source(options, report)
    except UserError:
        raise
    except Exception as error:  # Whatever a stranger's function does.
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"data.name={options.name}: its images cannot be loaded ({reason}); it is called as function(options, "
            f"report) and returns (images, labels)"
        ) from error
    data = found if isinstance(found, ImageData) else of_arrays(*pairs(found))
    _, side, _, channels = data.train.images.shape
    told = replace(options, image_size=side, grayscale=channels == 1)
    if channels not in (1, 3):  # Then how many there are is told by the mean.
        mean, std = normalization(options.mean, options.std, channels)
        told = replace(told, mean=list(mean), std=list(std))
    fingerprint = cache.fingerprint_of(data.train, data.test)
    return replace(
        _subset(replace(data, fingerprint=fingerprint), options, seed),
        name=options.name,
        options=told,
    )


def pairs(found: Any) -> tuple[Arrays, Arrays | None]:
    """(images, labels), or two such pairs, to train on and to evaluate on; images alone have no labels."""
    if is_array(found):
        return (found, None), None
    nested = (
        isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], tuple | list)
    )
    return (found[0], found[1]) if nested else (found, None)


def stored_side(options: DataOptions) -> int:
    """Side length of a dataset's images, without loading it."""
    return _stored_shape(options)[0]


def stored_channels(options: DataOptions) -> int:
    """Number of channels of a dataset's images, without loading it."""
    return _stored_shape(options)[1]


def _stored_shape(options: DataOptions) -> tuple[int, int]:
    channels = 1 if options.grayscale else 3
    if options.name not in (*named.NAMED, *folder.SIDES):
        return options.image_size, len(options.mean) or channels
    if options.name in folder.SIDES:
        return options.image_size or folder.SIDES[options.name], channels
    _, side, channels = named.NAMED[options.name]().shape
    return side, channels


def overview() -> str:
    """Lists the datasets, with what to type for each."""
    rows = []
    for name, make in named.NAMED.items():
        spec = make()
        kind = f"{spec.shape[0]} x {spec.shape[1]}, {'color' if spec.shape[2] == 3 else 'gray'}"
        rows.append((name, f"{spec.counts[0]:,} + {spec.counts[1]:,} images, {kind}", ""))
    rows.append(
        ("imagenet10", "ten classes of your copy of ImageNet", " data.root=/path/to/imagenet")
    )
    rows.append(("folder", "your own images", " data.root=/path/to/images"))
    lines = [f"  {name:<11}{text:<42}fedx-pl data {name}{more}" for name, text, more in rows]
    return "\n".join(["data sets, and what to type to fetch and describe one:", *lines])


def describe(data: ImageData) -> str:
    """Describes a dataset for people: counts, size, colour statistics, origin."""
    height, width, channels = data.train.images.shape[1:]
    lines = [
        f"{data.name}: {height} x {width} pixels, {channels} channel{'s' if channels > 1 else ''}"
    ]
    for name, split in (("train", data.train), ("test", data.test)):
        if split is None:
            lines.append(f"{name}: none")
            continue
        lines.append(f"{name}: {len(split.images)} images")
        if split.labels is not None and data.classes:
            counts = np.bincount(split.labels[split.labels >= 0], minlength=len(data.classes))
            words = [f"{label} {count}" for label, count in zip(data.classes, counts, strict=True)]
            unlabelled = int((split.labels < 0).sum())
            words += [f"unlabelled {unlabelled}"] if unlabelled else []
            lines.append(
                textwrap.fill(", ".join(words), 100, initial_indent="  ", subsequent_indent="  ")
            )
    mean, std = _statistics(data.train.images)
    lines.append("mean: " + " ".join(f"{value:.4f}" for value in mean))
    lines.append("std: " + " ".join(f"{value:.4f}" for value in std))
    if data.group_names:
        lines.append(f"sub-folders: {len(data.group_names)}")
    if data.value_range:
        low, high = map(number, data.value_range)
        lines.append(
            f"value range: {low}..{high} became 0..255 in images of more than 8 bits per value"
        )
    if data.skipped:
        lines.append(f"skipped: {data.skipped} files that are no readable images")
    return "\n".join([*lines, f"source: {data.source}", f"fingerprint: {data.fingerprint}"])


def _check(options: DataOptions, *, known: bool) -> None:
    if options.name == ARRAYS:
        raise UserError(
            "data.name=arrays: these images were brought from Python, and only the script that has them can use them; "
            "there, type evaluate_run(RUN, KINDS, data=IMAGES) to evaluate"
        )
    if not known and options.name not in SOURCES:
        instead = known_names(
            options.name, [name for name in SOURCES if name != ARRAYS], prefix="data.name="
        )
        raise UserError(f"data.name={options.name} is not known{instead}")
    _check_places(options)
    for key in ("limit", "test_limit", "image_size", "workers"):
        if getattr(options, key) < 0:
            raise UserError(f"data.{key}={getattr(options, key)}: type 0 or a positive number")
    bounds = options.value_range
    if bounds and not (len(bounds) == 2 and np.isfinite(bounds).all() and bounds[0] < bounds[1]):
        raise UserError(
            f"data.value_range={bounds}: type two numbers, the smaller first, e.g. [0,4095]; [] takes what images use"
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
        if any(
            "\ud800" <= letter <= "\udfff" for letter in path
        ):  # what is written about a run must be text
            raise UserError(
                f"data.{key}={readable(path)} is not UTF-8; rename it, or make a link to it (ln -s) and type the link"
            )
    root, kept = root_folder(options).resolve(), cache_folder(options).resolve()
    if kept in (root, root / options.name) or root == kept / options.name:
        raise UserError(
            f"data.cache={cache_folder(options)} is where data.root={options.root} has its own files; "
            f"type data.cache=ANOTHER"
        )


def _subset(data: ImageData, options: DataOptions, seed: int) -> ImageData:
    """Keeps ``limit`` training and ``test_limit`` test images; the fingerprint then tells the subset from the whole."""

    def draw(split: Split, limit: int, purpose: str) -> Split:
        chosen = np.random.default_rng(derive(seed, "subset", purpose)).permutation(
            len(split.images)
        )[:limit]
        return split.take(np.sort(chosen))

    train, test, marks = data.train, data.test, []
    if 0 < options.limit < len(train.images):
        train = draw(train, options.limit, "train")
        marks.append(f"train {options.limit}")
    if test is not None and 0 < options.test_limit < len(test.images):
        test = draw(test, options.test_limit, "test")
        marks.append(f"test {options.test_limit}")
    if not marks:
        return data
    fingerprint = cache.fingerprint({"all": data.fingerprint, "subset": f"{marks} seed {seed}"})
    whole = data.train if train is not data.train else None
    return replace(data, train=train, test=test, fingerprint=fingerprint, whole_train=whole)


@dataclass(frozen=True)
class _Found:
    """A dataset as one source gave it; ``hashes`` are those of its arrays."""

    raw: RawSet
    hashes: Mapping[str, str]
    source: str


def _load_named(options: DataOptions, report: Report) -> ImageData:
    for label, attempt in _sources(options, report):
        try:
            found = attempt()
        except (CacheError, FormatError, FetchError) as error:
            report(f"{options.name}: {label}: {one_line(error)}")
            continue
        return ImageData(
            name=options.name,
            train=found.raw.train,
            test=found.raw.test,
            classes=found.raw.classes,
            group_names=(),
            source=found.source,
            fingerprint=cache.fingerprint(found.hashes),
        )
    raise UserError(_what_to_put_where(options))


def _sources(options: DataOptions, report: Report) -> Iterator[tuple[str, Callable[[], _Found]]]:
    """Yields the sources in the order they are tried, each with its name."""
    yield "cache", lambda: _from_cache(options)
    spec = named.NAMED[options.name]()
    home = root_folder(options) / options.name

    def prepare(places: list[Path], source: str) -> _Found:
        found = _from_files(spec, places, source, verify=options.verify)
        info = {"source": found.source, "classes": found.raw.classes, "verified": options.verify}
        try:
            cache.write(cache_folder(options) / options.name, found.raw.arrays, info)
            report(
                f"{options.name}: {source}: complete, kept in {cache_folder(options) / options.name}"
            )
        except (
            OSError,
            CacheError,
        ) as error:  # a place that cannot be used costs time on the next run, nothing else
            report(f"{options.name}: not cached in {cache_folder(options)}: {one_line(error)}")
        return found

    places = [
        home,
        root_folder(options),
        *([root_folder(options) / spec.folder] if spec.folder else []),
    ]
    yield "files", lambda: prepare(places, "files")

    if not options.download:
        report(f"{options.name}: network: not asked, data.download=false")
        return

    def download() -> _Found:
        fetch.download(spec.downloads, home)
        return prepare([home], "torchvision download")

    yield "torchvision download", download

    if spec.mirror is None:
        return
    title, get = spec.mirror

    def mirror() -> _Found:
        report(f"{options.name}: fetching {title}, once; up to a minute on a fast line")
        with tempfile.TemporaryDirectory(prefix="fedx-pl-") as temporary:
            return prepare([get(Path(temporary))], title)

    yield title, mirror


def _from_cache(options: DataOptions) -> _Found:
    content = cache.read(
        cache_folder(options) / options.name, unsigned=True
    )  # its arrays may be hard to get again
    official = named.SHA256.get(options.name)
    try:
        train, test = (
            Split(content.arrays[f"{name}_images"], content.arrays[f"{name}_labels"])
            for name in ("train", "test")
        )
        raw = RawSet(train, test, tuple(content.info["classes"]))
        source, verified = content.info["source"], content.info["verified"]
    except (KeyError, TypeError) as error:
        raise CacheError(f"{cache_folder(options) / options.name} lacks {error}") from error
    if options.verify and (not verified or (official and content.hashes != official)):
        raise CacheError("holds a copy that is not the official one; data.verify=false accepts it")
    return _Found(raw, content.hashes, f"cache ({source})")


def _from_files(spec: NamedSet, places: list[Path], source: str, verify: bool) -> _Found:
    """Reads the first layout that is complete in one of the ``places`` and holds what it should."""
    problems = []
    for place in places:
        for layout in spec.layouts:
            missing = layout.missing(place)
            if missing:
                if len(missing) < len(layout.files):
                    problems.append(f"{' and '.join(missing)} missing in {place}")
                continue
            try:
                _require_files(place, layout.files)
                if verify:
                    _check_md5(layout, place)
                raw = layout.read(place)
                hashes = {name: cache.sha256(array) for name, array in raw.arrays.items()}
                _check_content(spec, raw, hashes, verify=verify)
            except FormatError as error:
                problems.append(one_line(error))
                continue
            where = f"files in {place}" if source == "files" else source
            return _Found(raw, hashes, where if verify else f"{where}, not verified")
    raise FormatError("; ".join(problems) or f"none in {' or '.join(map(str, places))}")


def _require_files(place: Path, files: Iterable[str]) -> None:
    """Reading a pipe or a device may not end."""
    for file in files:
        if not (place / file).is_file() and not (place / file).is_dir():
            raise FormatError(f"{file}: not a file")


def _check_md5(layout: Layout, place: Path) -> None:
    _require_files(place, layout.md5)
    for file, md5 in layout.md5.items():
        try:
            with open(place / file, "rb") as stream:
                actual = hashlib.file_digest(
                    stream, lambda: hashlib.md5(usedforsecurity=False)
                ).hexdigest()
        except OSError as error:
            raise FormatError(f"{file}: {one_line(error)}") from error
        if actual != md5:
            raise FormatError(
                f"{file}: not the official file (md5 {actual}); data.verify=false accepts it"
            )


def _check_content(spec: NamedSet, raw: RawSet, hashes: Mapping[str, str], verify: bool) -> None:
    for split, count in zip(("train", "test"), spec.counts, strict=True):
        images, labels = raw.arrays[f"{split}_images"], raw.arrays[f"{split}_labels"]
        if images.shape[1:] != spec.shape or images.dtype != np.uint8:
            raise FormatError(
                f"{split} images are {images.dtype} {images.shape[1:]}, expected uint8 {spec.shape}"
            )
        if labels.shape != (len(images),) or not len(images):
            raise FormatError(f"{len(images)} {split} images but {labels.size} labels")
        if labels.min() < 0 or labels.max() >= len(raw.classes):
            raise FormatError(
                f"{split} labels from {labels.min()} to {labels.max()} for {len(raw.classes)} classes"
            )
        if verify and len(images) != count:
            raise FormatError(
                f"{len(images)} {split} images, the official copy has {count}; data.verify=false accepts it"
            )
    if verify and spec.sha256:
        wrong = [name for name, digest in spec.sha256.items() if hashes[name] != digest]
        if wrong:
            raise FormatError(
                f"{' and '.join(wrong)} differ from the official copy; data.verify=false accepts it"
            )


def _what_to_put_where(options: DataOptions) -> str:
    spec = named.NAMED[options.name]()
    home = (root_folder(options) / options.name).resolve()
    choices = [" and ".join(layout.files) for layout in spec.layouts]
    addresses = " ".join(url for url, _, _ in spec.downloads)
    return "\n".join(
        [
            f"data.name={options.name}: no source had it (the lines above say why).",
            f"Put {'one of these' if len(choices) > 1 else 'these files'} into {home} and type the command again:",
            *(f"  {choice}" for choice in choices),
            f"Official address: {addresses}",
            *([] if options.download else ["Or let it be downloaded: data.download=true"]),
        ]
    )


def _statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel, in [0, 1]; exact, and a block at a time for memory maps.

    Args:
        images: uint8 ``(N, H, W, C)``.

    Returns:
        Two arrays, float64 ``(C,)``.
    """
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024]
        for channel in range(len(counts)):
            counts[channel] += np.bincount(block[..., channel].reshape(-1), minlength=256)
    levels = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ levels
    return mean, np.sqrt(share @ levels**2 - mean**2)


# By their words on the command line: what loads the images.
SOURCES: dict[str, Source] = {
    **dict.fromkeys(named.NAMED, _load_named),
    "imagenet10": folder.load_imagenet,
    "folder": folder.load_folder,
    ARRAYS: _load_named,
}
