"""Decodes image files: a library for ``decode.py``, and a program that it runs in processes.

As a program it imports nothing of this package: with torch and Lightning each process would take
seconds to start. And unlike multiprocessing it leaves the user's script alone, which needs no ``if
__name__ == "__main__"``.

It reads one task per line from standard input, a `Task` as JSON, and answers with a line of JSON,
the shape of the images and a remark on each file, followed by the bytes of the readable images.
"""

import json
import os
import stat
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

# Folder, paths relative to it, side length (0: look only, decode nothing), one channel?, the two
# values of a deep image that become black and white (none: unknown).
Task = tuple[str, Sequence[str], int, bool, Sequence[float]]
Answered = tuple[np.ndarray, list[Any]]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # an older Pillow warns that it does not know the word
    _AVIF = bool(features.check("avif"))
# Pillow reads more, but some readers start other programs (EPS) or are rarely tested: files may
# come from anywhere.
FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "GIF",
    "TIFF",
    "WEBP",
    "PPM",
    "JPEG2000",
    *(["AVIF"] if _AVIF else []),
)

# Tags of TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_PLANAR_CONFIGURATION = 284
_SIZ = b"\xff\x4f\xff\x51"  # how a JPEG 2000 codestream begins; the bits of a value are 42 bytes on
_SAMPLE = 2**16  # pixels of an image that its bulk is estimated from
_BULK = (0.005, 0.995)
_MAX_SIDE = 2**16  # pixels; as long as JPEG can be. Pillow keeps a pointer for each row
_ROWS = 256  # scaled at once: pixels as float64 take eight times the memory


class Facts(TypedDict):
    """Facts about a file that are known before it is decoded.

    Attributes:
        pages: how many images it holds.
        values: smallest and largest value, then those that hold 99 % of all; None for 8 bits.
        whole: whether values are integers.
    """

    pages: int
    values: list[float] | None
    whole: bool


def decode_batch(task: Task) -> Answered:
    """Decodes a few files.

    Returns:
        The readable images, uint8 ``(n, size, size, C)``, and for each file why it was skipped,
        empty if it was not.
    """
    root, paths, size, grayscale, value_range = task
    images = np.empty((len(paths), size, size, 1 if grayscale else 3), np.uint8)
    reasons: list[str] = []
    count = 0
    with warnings.catch_warnings():
        # Pillow warns about harmless flaws; what is not harmless is an error below
        warnings.simplefilter("ignore")
        for path in paths:
            try:
                images[count] = decode_file(
                    os.path.join(root, path), size, grayscale, value_range=value_range
                )
                count += 1
                reasons.append("")
            except Exception as error:  # decoders fed with foreign bytes fail in any way they like
                text = (
                    error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                )
                reasons.append(" ".join(text.split())[:200] or type(error).__name__)
    return images[:count], reasons


def survey_batch(task: Task) -> Answered:
    """Reads the headers of a few files, and the pixels of those with more than 8 bits per value.

    Returns:
        No images, and `Facts` of each file; None for one that cannot be read, which `decode_batch`
        will explain.
    """
    root, paths, *_ = task
    facts: list[Facts | None] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths:
            try:
                facts.append(survey_file(os.path.join(root, path)))
            except Exception:  # as above
                facts.append(None)
    return np.empty(0, np.uint8), facts


def decode_file(
    path: str, size: int, grayscale: bool, value_range: Sequence[float] = ()
) -> np.ndarray:
    """Decodes one file: its short side becomes ``size``, the center is kept.

    Args:
        path: of the file.
        size: side length.
        grayscale: keep one channel only.
        value_range: the values of an image with more than 8 bits per value that become 0 and 255.

    Returns:
        uint8 ``(size, size, C)``.
    """
    mode = "L" if grayscale else "RGB"
    with _open(path) as opened:  # reads the header only
        image: Image.Image
        if _is_deep(opened):
            if not value_range:
                raise ValueError("more than 8 bits per value, and data.value_range is not known")
            image = Image.fromarray(_to_bytes(_deep_values(opened, path), *value_range))
        else:
            # Lets JPEG decode at a fraction of its size, not below twice ours
            opened.draft(mode, (2 * size, 2 * size))
            image = ImageOps.exif_transpose(opened)
        pixels = np.asarray(
            ImageOps.fit(image.convert(mode), (size, size), Image.Resampling.BICUBIC)
        )
    return pixels.reshape(size, size, -1)


def survey_file(path: str) -> Facts:
    """Collects the facts about a file that the survey of a set needs."""
    with _open(path) as opened:
        # Phones hide depth maps behind a JPEG (MPO); nobody takes those for images of their own.
        several = opened.format != "MPO" and getattr(opened, "is_animated", False)
        pages = int(getattr(opened, "n_frames", 1)) if several else 1
        if not _is_deep(opened):
            return {"pages": pages, "values": None, "whole": True}
        values = _deep_values(opened, path)
    whole = values.dtype.kind in "ui"
    flat = values.reshape(-1)
    flat = flat if whole else flat[np.isfinite(flat)]
    if not flat.size:
        raise ValueError("no pixel has a finite value")
    bulk = np.quantile(flat[:: max(1, flat.size // _SAMPLE)], _BULK, method="nearest")
    return {
        "pages": pages,
        "values": [float(v) for v in (flat.min(), flat.max(), *bulk)],
        "whole": whole,
    }


def _open(path: str) -> Image.Image:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("not a file")  # opening a pipe would wait for ever
    try:
        opened = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(_unknown(path)) from None
    limit = Image.MAX_IMAGE_PIXELS
    if max(opened.size) > _MAX_SIDE or (limit is not None and opened.width * opened.height > limit):
        opened.close()
        raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
    return opened


def _unknown(path: str) -> str:
    """Says why Pillow does not open a file, and what the user can do about it."""
    with open(path, "rb") as file:
        head = file.read(132)
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF cannot be read by the Pillow that is installed; convert it to PNG"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC cannot be read; convert it to JPEG or PNG"
    if head[128:132] == b"DICM":
        return "DICOM cannot be read; convert it to 16-bit PNG or TIFF"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return (
            "a TIFF with pixels of a kind that cannot be read; "
            "convert it to 16-bit gray or 8-bit RGB"
        )
    return f"no readable image of the formats {', '.join(FORMATS)}"


def _is_deep(opened: Image.Image) -> bool:
    """Whether values have more than 8 bits, so that they need a range to become bytes.

    Raises:
        ValueError: they have, and Pillow would misread them, or give their upper bytes only.
    """
    if opened.mode == "F" and _white_is_zero(opened):
        raise ValueError(
            "float TIFF in which 0 is white, without the value of black; save it with 0 as black"
        )
    if opened.mode.startswith("I") or opened.mode == "F":
        return True
    if opened.format == "TIFF":
        bits = opened.tag_v2.get(_BITS_PER_SAMPLE, (1,))  # type: ignore[attr-defined]
        if max(bits) <= 8:
            return False
        if opened.tag_v2.get(_PLANAR_CONFIGURATION, 1) == 2:  # type: ignore[attr-defined]
            raise ValueError(
                f"planar TIFF of {max(bits)} bits; convert it: tiffcp -p contig IN OUT"
            )
        if _raw_mode(opened)[:-1] not in ("RGB;16", "RGBA;16", "RGBX;16"):
            raise ValueError(
                f"{max(bits)}-bit {_raw_mode(opened)[:4]} TIFF; convert it to 16-bit RGB"
            )
        return True
    if opened.format == "PPM" and opened.mode == "RGB":
        _, *maximum = _arguments(opened)
        if maximum and maximum[-1] > 255:
            raise ValueError("color PPM of more than 8 bits; convert it to PNG or TIFF")
    if opened.format == "JPEG2000" and _bits_of_jpeg2000(opened) > 8:  # gray is of mode I
        raise ValueError("color JPEG 2000 of more than 8 bits; convert it to PNG or TIFF")
    return opened.format == "PNG" and ";16" in _raw_mode(opened)


def _white_is_zero(opened: Image.Image) -> bool:
    """Whether a TIFF says so; one that says nothing most likely means the opposite."""
    if opened.format != "TIFF":
        return False
    return bool(opened.tag_v2.get(_PHOTOMETRIC) == 0)  # type: ignore[attr-defined]


def _bits_of_jpeg2000(opened: Image.Image) -> int:
    with open(opened.filename, "rb") as file:  # type: ignore[attr-defined]
        head = file.read(2**16)
    at = head.find(_SIZ) + 42
    return (head[at] & 127) + 1 if at > 41 and at < len(head) else 8


def _deep_values(opened: Image.Image, path: str) -> np.ndarray:
    """Reads all bits of a deep image: ``(H, W)`` or ``(H, W, 3)``, upright.

    Pillow has no mode for 16-bit color and keeps the upper byte of each value. Told that the other
    byte is the upper one, it gives that: so two passes give both.
    """
    if opened.mode.startswith("I") or opened.mode == "F":
        values = np.asarray(ImageOps.exif_transpose(opened))
        if not _white_is_zero(opened):
            return values
        # Pillow does this for 8 bits only. Without it, an X-ray would be the negative of the
        # others.
        (bits,) = opened.tag_v2[_BITS_PER_SAMPLE]  # type: ignore[attr-defined]
        inverted: np.ndarray = values.dtype.type(2**bits - 1) - values
        return inverted
    raw = _raw_mode(opened)
    if raw == "LA;16B":  # four bytes per pixel as well: two of gray, two of alpha
        pixels = np.asarray(_upright(opened, "RGBA")).astype(np.uint16)
        return pixels[..., 0] << 8 | pixels[..., 1]
    order = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[raw[-1]]
    upper = np.asarray(ImageOps.exif_transpose(opened))[..., :3].astype(np.uint16)
    with _open(path) as again:
        lower = np.asarray(_upright(again, raw[:-1] + order))[..., :3]
    both: np.ndarray = upper << 8 | lower
    return both


def _upright(opened: Image.Image, raw_mode: str) -> Image.Image:
    """Reads an image as if its bytes meant something else."""
    tiles = []
    for tile in opened.tile:  # type: ignore[attr-defined]
        arguments = raw_mode if isinstance(tile[3], str) else (raw_mode, *tile[3][1:])
        # Before Pillow 11 a tile was a plain tuple.
        tiles.append(
            tile._replace(args=arguments) if hasattr(tile, "_replace") else (*tile[:3], arguments)
        )
    opened.tile = tiles  # type: ignore[attr-defined]
    return ImageOps.exif_transpose(opened)


def _arguments(opened: Image.Image) -> tuple[Any, ...]:
    """The raw mode of the pixels, and what else Pillow's decoder needs to unpack them."""
    arguments = opened.tile[0][3]  # type: ignore[attr-defined]
    return (arguments,) if isinstance(arguments, str) else tuple(arguments)


def _raw_mode(opened: Image.Image) -> str:
    return str(_arguments(opened)[0])


def _to_bytes(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Scales ``low`` to 0 and ``high`` to 255, and clips what lies outside; NaN becomes 0."""
    pixels = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):
        block = np.nan_to_num(
            values[row : row + _ROWS].astype(np.float64), nan=low, posinf=high, neginf=low
        )
        pixels[row : row + _ROWS] = (np.clip(block, low, high) - low) * 255 / (high - low)
    return pixels


def main() -> None:
    """Serves tasks until standard input ends."""
    for line in sys.stdin.buffer:
        task = json.loads(line)
        images, remarks = decode_batch(task) if task[2] else survey_batch(task)
        sys.stdout.buffer.write(
            json.dumps([images.shape, remarks]).encode() + b"\n" + images.tobytes()
        )
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
