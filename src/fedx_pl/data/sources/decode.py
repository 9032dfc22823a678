"""Decodes many image files into one cached array, in several processes, once."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import numpy as np

from fedx_pl.data.images import DataOptions, ValueRange, cache_folder, require_memory
from fedx_pl.data.sources import cache, image_files
from fedx_pl.data.sources.cache import CacheError
from fedx_pl.data.sources.image_files import Answered, Task, decode_batch
from fedx_pl.errors import Report, UserError, one_line, readable

_DECODER = 3  # changes when the same files are decoded to other pixels than before
_BATCH = 64  # images per task: enough to hide its cost, few enough for a smooth progress bar
_MAX_REASONS = 5  # for skipping files that are reported
POOL_SECONDS = 2.0  # less work than this is not worth starting processes
_QUIET_SECONDS = 3.0  # of decoding before a progress bar appears


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Images of a folder.

    Attributes:
        images: uint8 ``(N, size, size, C)``.
        paths: relative paths of these images, in order.
        skipped: how many files were no readable images.
        sha256: hash of ``images``.
    """

    images: np.ndarray
    paths: list[str]
    skipped: int
    sha256: str


def decode(
    root: Path,
    paths: Sequence[str],
    size: int,
    options: DataOptions,
    report: Report,
    value_range: ValueRange | None = None,
) -> Decoded:
    """Decodes files, or loads what an earlier run decoded.

    Args:
        root: folder that ``paths`` are relative to.
        paths: files, images or not.
        size: side length; the short side is resized to it and the center kept.
        options: ``grayscale``, ``workers``, and where the cache lies.
        report: receives one line if files were skipped or the cache was unusable.
        value_range: how `survey` wants images of more than 8 bits per value to be read.

    Returns:
        The images, memory-mapped if they are large.
    """
    # One image as Pillow scales it, four bytes a pixel, and a batch of them as it is returned.
    channels = 1 if options.grayscale else 3
    needed = size * size * (4 + channels * min(_BATCH, len(paths)))
    require_memory("data.image_size", size, needed, what="decoding images")
    settings = [size, options.grayscale, value_range]
    content = cached(
        cache_folder(options) / f"{options.name}-{key_of([(root, paths)], settings)}",
        lambda folder: _fill(
            folder, root, paths, size=size, options=options, report=report, value_range=value_range
        ),
        options,
        report=report,
    )
    skipped = content.info["skipped"]
    if skipped:
        groups = content.info["reasons"]
        reasons = [
            f"{count} like {readable(root / first)} ({reason})" for reason, count, first in groups
        ]
        if others := skipped - sum(count for _, count, _ in groups):
            reasons.append(f"{others} for other reasons")
        report(f"{options.name}: skipped {skipped} of {len(paths)} files: {'; '.join(reasons)}")
    return Decoded(
        images=content.arrays["images"],
        paths=content.info["paths"],
        skipped=skipped,
        sha256=content.hashes["images"],
    )


def cached(
    folder: Path, fill: Callable[[Path], None], options: DataOptions, report: Report
) -> cache.Cached:
    """Reads the cache ``folder``; if it is absent or damaged, ``fill`` writes it first."""
    try:
        return cache.read(folder)
    except CacheError as error:
        if folder.exists():
            report(f"{options.name}: cache: {one_line(error)}")
        try:
            fill(folder)
            return cache.read(folder)
        except (OSError, CacheError) as failure:
            where = cache_folder(options).resolve()
            raise UserError(
                f"cannot cache images in {where} ({one_line(failure)}); set data.cache=DIR"
            ) from failure


def key_of(parts: Sequence[tuple[Path, Sequence[str]]], settings: Sequence[Any]) -> str:
    """Names a cache after all that decides its content: a file that changes makes a new one."""
    digest = hashlib.sha256(json.dumps([_DECODER, *settings]).encode())
    for root, paths in parts:
        digest.update(f"{root.resolve()}\n".encode(errors="surrogateescape"))
        for path in paths:
            try:
                status = os.stat(root / path)
                line = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n"
            except OSError:  # a dangling link; it will be skipped
                line = f"{path}\0\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _fill(
    folder: Path,
    root: Path,
    paths: Sequence[str],
    size: int,
    options: DataOptions,
    report: Report,
    value_range: ValueRange | None,
) -> None:
    """Decodes ``paths`` in order into the cache ``folder``, a few batches at a time."""
    kept: list[str] = []
    # [reason, count, first path], by the reason without its numbers.
    failures: dict[str, list[Any]] = {}
    channels = 1 if options.grayscale else 3
    with cache.replacing(folder, private=True) as fresh:
        with cache.ArrayWriter(
            fresh / "images.npy", (size, size, channels), "uint8", private=True
        ) as writer:
            tasks = batches([(root, paths)], size, options.grayscale, value_range=value_range)
            results = run(
                decode_batch, tasks, options, report=report, title="decoding images, once"
            )
            for (_, batch, *_), (images, reasons) in zip(tasks, results, strict=True):
                writer.append(images)
                for path, reason in zip(batch, reasons, strict=True):
                    if reason:
                        failures.setdefault(re.sub(r"\d+", "#", reason), [reason, 0, path])[1] += 1
                    else:
                        kept.append(path)
        info = {
            "paths": kept,
            "skipped": len(paths) - len(kept),
            "reasons": sorted(failures.values(), key=lambda failure: -failure[1])[:_MAX_REASONS],
            "value_range": value_range,
        }
        cache.write_manifest(fresh, {"images": writer.entry}, info, private=True)


def batches(
    parts: Sequence[tuple[Path, Sequence[str]]],
    size: int,
    grayscale: bool,
    value_range: ValueRange | None,
) -> list[Task]:
    """Splits the files of some folders into tasks for `run`."""
    return [
        (str(root), paths[start : start + _BATCH], size, grayscale, value_range or ())
        for root, paths in parts
        for start in range(0, len(paths), _BATCH)
    ]


def run(
    work: Callable[[Task], Answered],
    tasks: Sequence[Task],
    options: DataOptions,
    report: Report,
    title: str,
) -> Iterator[Answered]:
    """Runs tasks in one or several processes, with a progress bar; yields results in order."""
    workers = options.workers or os.cpu_count() or 1
    total = sum(len(paths) for _, paths, *_ in tasks)
    return _with_progress(_run(work, tasks, workers), total, report, title=title)


def _run(
    work: Callable[[Task], Answered], tasks: Sequence[Task], workers: int
) -> Iterator[Answered]:
    """Works here if the first batch says that this is quick, else in processes."""
    start = time.monotonic()
    yield from map(work, tasks[:1])
    expected = (time.monotonic() - start) * (len(tasks) - 1)
    rest = tasks[1:]
    yield from (
        _in_pool(rest, workers) if workers > 1 and expected > POOL_SECONDS else map(work, rest)
    )


def _in_pool(tasks: Sequence[Task], workers: int) -> Iterator[Answered]:
    """Decodes in processes and yields results in order, with a bounded number of them waiting."""
    processes = [_Process() for _ in range(min(workers, len(tasks)))]
    idle: SimpleQueue[_Process] = SimpleQueue()
    for process in processes:
        idle.put(process)

    def run(task: Task) -> Answered:
        process = idle.get()  # as many threads as processes: there always is one
        try:
            return process.run(task)
        finally:
            idle.put(process)

    with ThreadPoolExecutor(len(processes)) as threads:
        waiting: deque[Future[Answered]] = deque()
        try:
            for task in tasks:
                waiting.append(threads.submit(run, task))
                if len(waiting) > 4 * len(processes):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        # also when the reader stops early: a thread that waits for a process sees its pipe end
        finally:
            for process in processes:
                process.kill()
            threads.shutdown(wait=True, cancel_futures=True)
            for process in processes:
                process.close()


class _Process:
    """A running ``image_files.py``."""

    def __init__(self) -> None:
        # -P: the script's folder must not come before the installed packages on the import path
        command = [sys.executable, "-P", image_files.__file__]
        self._child = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def run(self, task: Task) -> Answered:
        """Runs `image_files.decode_batch` or `image_files.survey_batch` in the process."""
        root, paths, *_ = task
        stdin = self._child.stdin
        stdout = self._child.stdout
        assert stdin is not None  # both are pipes; this is for the type checker
        assert stdout is not None
        try:
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
            shape, remarks = json.loads(stdout.readline())
            return np.frombuffer(stdout.read(math.prod(shape)), np.uint8).reshape(shape), remarks
        except (OSError, ValueError) as error:  # it died: a broken pipe, or half an answer
            first = readable(os.path.join(root, paths[0]))
            raise UserError(
                f"a process that decodes images died at one of {len(paths)} files from {first} on "
                f"(out of memory?); type data.workers=1 to decode in this process"
            ) from error

    def kill(self) -> None:
        """Ends the process, whatever it is doing."""
        self._child.kill()

    def close(self) -> None:
        """Frees what an ended process leaves behind."""
        with suppress(OSError), self._child:  # closing its standard input may find unsent bytes
            pass


def _with_progress(
    results: Iterator[Answered], total: int, report: Report, title: str
) -> Iterator[Answered]:
    """Passes results on and shows progress, if it takes a while."""
    from fedx_pl.display import Display, make_console  # Here: rich takes a while to import.

    console = make_console(stderr=True)
    done = 0
    with Display(console, title, report=report, delay=_QUIET_SECONDS) as display:
        for result in results:
            yield result
            done += len(result[1])
            display.update(done, total, line=f"{title}: {done:,} of {total:,}")
