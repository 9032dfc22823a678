"""Decides how images of more than 8 bits per value become bytes, once for a whole set.

Values of 12- or 16-bit detectors, or floats, have no range of their own that fits: the container's
would leave a 12-bit image 16 gray levels. So one range is taken from all images that belong
together, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedx_pl.data.images import DataOptions, ValueRange, cache_folder
from fedx_pl.data.sources import cache
from fedx_pl.data.sources.decode import batches, cached, key_of, run
from fedx_pl.data.sources.image_files import Facts, survey_batch
from fedx_pl.errors import Report, readable

Parts = Sequence[tuple[Path, Sequence[str]]]

_FEW_LEVELS = 32  # of 256: less than this is said
# The share of a set's deep images that may have few levels without a report: dark frames, blanks.
_SHARE = 0.05


def survey(
    parts: Parts, options: DataOptions, report: Report, origin: str = ""
) -> ValueRange | None:
    """Chooses the values that become black and white in all images of a set, and reports them.

    The range is that of all values, not of most: nothing is cut off, since the small and bright may
    be what matters. An outlier makes it too wide; then a line says what to type instead.

    Args:
        parts: folders and the files in them, relative; all that is trained and evaluated on.
        options: ``value_range`` if the user has chosen, ``workers``, and where the result is kept.
        report: receives a line on the range, and others on what is lost.
        origin: where the range is from, for the report, if ``data.value_range`` cannot be typed.

    Returns:
        The range; None if no image has more than 8 bits per value.
    """
    content = cached(
        cache_folder(options)
        / f"{options.name}-survey-{key_of(parts, [options.value_range, origin])}",
        lambda folder: _fill(folder, parts, options, report=report, origin=origin),
        options,
        report=report,
    )
    for line in content.info["lines"]:
        report(f"{options.name}: {line}")
    low_high = content.info["value_range"]
    return None if low_high is None else (low_high[0], low_high[1])


def number(value: float) -> str:
    """Formats the value of a pixel; reading it back gives the same float32."""
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


@dataclass
class _Deep:
    """The images of more than 8 bits per value.

    Attributes:
        paths: of each image.
        values: of each image, see `Facts`.
        whole: of each image, see `Facts`.
    """

    paths: list[str] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)

    def lines(self, low: float, high: float, origin: str, *, typed: bool) -> list[str]:
        """Reports how values become bytes, and what is lost."""
        total = len(self.values)
        setting = f"data.value_range=[{number(low)},{number(high)}]"
        because = origin or (
            f"as {setting} says" if typed else f"the range of all of them ({setting} sets it)"
        )
        lines = [
            f"{total} {'image has' if total == 1 else 'images have'} more than 8 bits per value: "
            f"{number(low)}..{number(high)} becomes 0..255, {because}"
        ]
        outside = sum(values[0] < low or values[1] > high for values in self.values)
        if outside:
            lines.append(f"values outside it, in {outside} of them, become black or white")
        few = [at for at in range(total) if self._loses(at, low, high)]
        if len(few) > _SHARE * total:
            first = few[0]
            span = "..".join(number(value) for value in self.values[first][2:])
            lines.append(
                f"warning: {len(few)} of them keep fewer than {_FEW_LEVELS} of 256 gray levels, "
                f"first {self.paths[first]} ({span} keeps {self._levels(first, low, high)})"
            )
            lines[-1] += "" if origin else f"; {self._advice(low, high)}"
        return lines

    def _levels(self, at: int, low: float, high: float) -> int:
        """The number of gray levels that 99 % of an image's pixels are spread over."""
        first, last = (min(max(value, low), high) for value in self.values[at][2:])
        return int((last - low) * 255 / (high - low)) - int((first - low) * 255 / (high - low)) + 1

    def _loses(self, at: int, low: float, high: float) -> bool:
        first, last = self.values[at][2:]
        levels = self._levels(at, low, high)
        # An image that has no more levels than it keeps loses nothing: a mask, a blank page.
        return (
            levels < _FEW_LEVELS and last > first and not (self.whole[at] and last - first < levels)
        )

    def _advice(self, low: float, high: float) -> str:
        """Advises what to type, if a narrower range holds most pixels."""
        edge = len(self.values) // 100  # an odd image in a hundred must not decide
        first = sorted(values[2] for values in self.values)[edge]
        last = sorted(values[3] for values in self.values)[-1 - edge]
        if last > first and last - first < (high - low) / 2:
            bounds = f"[{number(first)},{number(last)}]"
            return f"if what lies beyond is noise or padding, type data.value_range={bounds}"
        return "images of different depth or units need a set of their own each, or a common scale"


def _fill(folder: Path, parts: Parts, options: DataOptions, report: Report, origin: str) -> None:
    """Reads all files and writes the decision as a cache without arrays."""
    deep = _Deep()
    several: list[tuple[str, int]] = []
    tasks = batches(parts, 0, options.grayscale, value_range=None)
    results = run(survey_batch, tasks, options, report=report, title="looking at images, once")
    for (_, paths, *_), (_, remarks) in zip(tasks, results, strict=True):
        facts: Facts | None
        for path, facts in zip(paths, remarks, strict=True):
            if facts is None:
                continue
            if facts["pages"] > 1:
                several.append((readable(path), facts["pages"]))
            if facts["values"] is not None:
                deep.paths.append(readable(path))
                deep.values.append(facts["values"])
                deep.whole.append(facts["whole"])
    info: dict[str, Any] = {"value_range": None, "lines": []}
    if several:
        path, pages = several[0]
        info["lines"].append(
            f"several pages or frames in {len(several)} of the files: only the first of each is "
            f"used ({path} has {pages}); to use all, save each as a file of its own"
        )
    if deep.values:
        low = min(values[0] for values in deep.values)
        high = max(values[1] for values in deep.values)
        if options.value_range:
            low, high = options.value_range
        elif low == high:  # all pixels of all images are the same
            high = low + 1
        info["value_range"] = [low, high]
        info["lines"] += deep.lines(low, high, origin, typed=bool(options.value_range))
    cache.write(folder, {}, info, private=True)
