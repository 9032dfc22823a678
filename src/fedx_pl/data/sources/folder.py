"""Images in folders: the user's own, labeled or not, and class folders of a local ImageNet.

What is trained on and what is held out is decided by path, before anything is decoded. So each
split becomes one cache, written once and memory-mapped afterwards, and the test images are the same
for every seed.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedx_pl.data.images import DataOptions, ImageData, Split, cache_folder, root_folder
from fedx_pl.data.sources.cache import fingerprint
from fedx_pl.data.sources.decode import decode
from fedx_pl.data.sources.survey import survey
from fedx_pl.errors import Report, UserError, readable

SIDES = {"folder": 96, "imagenet10": 256}  # in pixels, where data.image_size is 0


def load_folder(options: DataOptions, report: Report) -> ImageData:
    """Loads a folder of images, with or without labels.

    Args:
        options: ``root`` is searched recursively; names that begin with a dot are passed over.
        report: receives a line about skipped files.

    Returns:
        The data; ``groups`` are the top-level sub-folders, "." for images that lie in the root
        itself.
    """
    if not options.root:
        raise UserError("data=folder needs your images: type data.root=/path/to/images")
    root = _folder(root_folder(options), "data.root")
    test_root = (
        _folder(Path(options.test_root).expanduser(), "data.test_root")
        if options.test_root
        else None
    )
    if test_root and options.labels == "none":
        raise UserError(
            "data.test_root needs labels: type data.labels=folders, or data.labels=FILE.csv"
        )
    table = Path(options.labels).expanduser() if options.labels not in ("none", "folders") else None

    # A test folder, a table or our cache inside the root is no training image.
    leave_out = [path.resolve() for path in (test_root, table, cache_folder(options)) if path]
    paths = list_files(root, report, leave_out=leave_out)
    if not paths:
        raise UserError(f"data.root={options.root}: no images in {root.resolve()}")
    test_paths = list_files(test_root, report) if test_root else []
    if table:
        names, test_names = _names_from_table(
            table, [(root, paths), *([(test_root, test_paths)] if test_root else [])]
        )
    elif options.labels == "folders":
        names = _names_from_folders(paths)
        test_names = _names_from_folders(test_paths)
    else:
        names = {}
        test_names = {}

    if test_root:
        held_out = [path for path in test_paths if path in test_names]
        if not held_out:
            raise UserError(f"data.test_root={options.test_root}: none of its images has a label")
    else:
        held_out = hold_out(names, options.test_fraction)
        test_names = names
    kept = paths if test_root else sorted(set(paths) - set(held_out))

    size = options.image_size or SIDES["folder"]
    # One decision for all, so that a value means the same in training and evaluation.
    parts = [(root, paths), *([(test_root, held_out)] if test_root else [])]
    value_range = survey(parts, options, report)
    train = decode(root, kept, size, options=options, report=report, value_range=value_range)
    if not train.paths:
        raise UserError(
            f"data.root={options.root}: no readable images in {root.resolve()} ({train.skipped} "
            f"other files)"
        )
    test = (
        decode(
            test_root or root,
            held_out,
            size,
            options=options,
            report=report,
            value_range=value_range,
        )
        if held_out
        else None
    )

    classes = _ordered({*names.values(), *test_names.values()})
    groups = [readable(path.split("/", 1)[0]) if "/" in path else "." for path in train.paths]
    group_names = tuple(sorted(set(groups)))
    train_labels = _labels(train.paths, names, classes) if options.labels != "none" else None
    hashes = {"train": train.sha256, "labels": _hash(train_labels), "groups": _hash(groups)}
    test_split = None
    if test and test.paths:
        test_labels = _labels(test.paths, test_names, classes)
        test_split = Split(test.images, test_labels)
        hashes |= {"test": test.sha256, "test labels": _hash(test_labels)}
    return ImageData(
        name="folder",
        train=Split(
            train.images, train_labels, np.searchsorted(group_names, groups).astype(np.int64)
        ),
        test=test_split,
        classes=classes,
        group_names=group_names,
        source=f"images in {readable(root.resolve())}",
        fingerprint=fingerprint(hashes),
        skipped=train.skipped + (test.skipped if test else 0),
        value_range=value_range,
    )


def load_imagenet(options: DataOptions, report: Report) -> ImageData:
    """Loads chosen classes of a local ImageNet: ``root/train/CLASS/*`` and ``root/val/CLASS/*``."""
    root = _folder(root_folder(options), "data.root")
    classes = tuple(options.classes)
    parts = {}
    for name in ("train", "val"):
        top = _folder(
            root / name,
            "data.root",
            f"imagenet10 needs the sub-folders train and val in {root.resolve()}",
        )
        present = sorted(entry.name for entry in top.iterdir() if entry.is_dir())
        if not classes:
            example = ",".join(present[:10])
            raise UserError(f"imagenet10: choose class folders, e.g. type data.classes=[{example}]")
        for wanted in classes:
            if wanted not in present:
                near = difflib.get_close_matches(wanted, present, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UserError(
                    f"data.classes: there is no folder {wanted} in {top.resolve()}{hint}"
                )
        folders = sorted(set(classes))
        paths = [
            f"{wanted}/{path}" for wanted in folders for path in list_files(top / wanted, report)
        ]
        parts[name] = (top, paths)
    value_range = survey(list(parts.values()), options, report)
    splits = {}
    for name, (top, paths) in parts.items():
        size = options.image_size or SIDES["imagenet10"]
        splits[name] = decode(
            top, paths, size, options=options, report=report, value_range=value_range
        )
        if not splits[name].paths:
            raise UserError(
                f"data.root={options.root}: no readable images of the chosen classes in "
                f"{top.resolve()}"
            )

    def split(name: str) -> Split:
        owner = {path: path.split("/", 1)[0] for path in splits[name].paths}
        return Split(splits[name].images, _labels(splits[name].paths, owner, classes))

    train = split("train")
    test = split("val")
    hashes = {"train": splits["train"].sha256, "test": splits["val"].sha256}
    hashes |= {"labels": _hash(train.labels), "test labels": _hash(test.labels)}
    return ImageData(
        name="imagenet10",
        train=train,
        test=test,
        classes=tuple(map(readable, classes)),
        group_names=(),
        source=f"images in {readable(root.resolve())}",
        fingerprint=fingerprint(hashes),
        skipped=splits["train"].skipped + splits["val"].skipped,
        value_range=value_range,
    )


def list_files(root: Path, report: Report, leave_out: Sequence[Path] = ()) -> list[str]:
    """Lists all files below ``root``, as sorted relative paths with forward slashes.

    Links to folders are followed, each folder once, so that loops end. What a file is, only its
    content tells: names without a known ending are listed, too.

    Args:
        root: the folder.
        report: receives a line about each folder that cannot be read.
        leave_out: files and folders to pass over, resolved.
    """

    def unreadable(error: OSError) -> None:
        report(
            f"cannot read the folder {readable(error.filename)} ({error.strerror}): its images "
            f"are missing"
        )

    paths: list[str] = []
    seen: set[Path] = set()
    for top, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        here = Path(top)
        real = here.resolve()
        if real in seen or real in leave_out:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [
            name for name in files if not name.startswith(".") and real / name not in leave_out
        ]
        paths += [(here / name).relative_to(root).as_posix() for name in files]
    return sorted(paths)


def hold_out(names: Mapping[str, str], fraction: float) -> list[str]:
    """Chooses the labeled images to evaluate on: ``fraction`` of each class.

    At least one image of each class stays in training.

    The order is that of a hash of the path: it depends on no seed, and an image that is added later
    does not move the others from one side to the other more than the count requires.
    """
    classes: dict[str, list[str]] = {}
    for path, name in names.items():
        classes.setdefault(name, []).append(path)
    chosen: list[str] = []
    for paths in classes.values():
        paths.sort(key=lambda path: hashlib.sha256(path.encode(errors="surrogateescape")).digest())
        chosen += paths[: min(round(fraction * len(paths)), len(paths) - 1)]
    return sorted(chosen)


def _names_from_folders(paths: Sequence[str]) -> dict[str, str]:
    """The class names by path; an image in the root itself has none."""
    return {path: readable(path.rsplit("/", 2)[-2]) for path in paths if "/" in path}


def _names_from_table(
    table: Path, folders: Sequence[tuple[Path, list[str]]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Reads a CSV file of ``path,label``; paths are relative to a folder of images, or absolute.

    Args:
        table: the CSV file, with or without a header.
        folders: each folder of images with the files in it: the training folder, then the test
            folder if there is one.

    Returns:
        Class names by path, for the first and the second folder.
    """
    if table.exists() and not table.is_file():
        raise UserError(f"data.labels={table} is not a file; type none, folders or a CSV file")
    try:
        with open(table, newline="", encoding="utf-8-sig") as file:
            rows = [
                [cell.strip() for cell in row]
                for row in csv.reader(file)
                if any(cell.strip() for cell in row)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"data.labels={table}: cannot read it ({error}); type none, folders or a CSV file"
        ) from error
    if rows and [cell.lower() for cell in rows[0][:2]] == ["path", "label"]:
        rows = rows[1:]
    short = [row for row in rows if len(row) < 2 or not row[0]]
    if short or not rows:
        what = f"the line {','.join(short[0])!r} is not path,label" if short else "it has no lines"
        raise UserError(f"data.labels={table}: {what}")

    resolved = [(root.resolve(), set(paths)) for root, paths in folders]
    names: list[dict[str, str]] = [{}, {}]
    unknown = []
    for path, label, *_ in rows:
        for at, (root, present) in enumerate(resolved):
            relative = os.path.normpath(
                os.path.relpath(path, root) if os.path.isabs(path) else path
            )
            relative = relative.replace(os.sep, "/")
            if relative in present:
                if label:  # an empty cell is an image without label
                    label = readable(label)
                    before = names[at].setdefault(relative, label)
                    if before != label:
                        raise UserError(
                            f"data.labels={table}: {path} has two labels, {before!r} and "
                            f"{label!r}; keep one of them"
                        )
                break
        else:
            unknown.append(path)
    if unknown:
        where = " or ".join(str(root) for root, _ in resolved)
        raise UserError(
            f"data.labels={table}: {len(unknown)} of its files do not exist in {where}, first "
            f"{unknown[0]}"
        )
    return names[0], names[1]


def _ordered(names: set[str]) -> tuple[str, ...]:
    """Sorts class names: by number if all are numbers, so that class 10 comes after class 9."""
    by_text = sorted(names)  # first, since 1 and 01 are the same number and a set has no order
    return tuple(sorted(by_text, key=int) if all(name.isdecimal() for name in names) else by_text)


def _labels(paths: Sequence[str], names: Mapping[str, str], classes: Sequence[str]) -> np.ndarray:
    """The labels of ``paths``, int64 ``(N,)``; -1 where ``names`` has none."""
    index = {name: label for label, name in enumerate(classes)}
    return np.array([index[names[path]] if path in names else -1 for path in paths], np.int64)


def _hash(values: np.ndarray | Sequence[str] | None) -> str:
    content = values.tobytes() if isinstance(values, np.ndarray) else json.dumps(values).encode()
    return hashlib.sha256(content).hexdigest()


def _folder(path: Path, key: str, hint: str = "") -> Path:
    if not path.is_dir():
        raise UserError(f"{key}: {hint or f'there is no folder {path.resolve()}'}")
    return path
