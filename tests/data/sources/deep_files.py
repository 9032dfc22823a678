"""Writes image files of more than 8 bits per value that Pillow reads but does not write."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def gray(path: Path, values: np.ndarray) -> None:
    """A gray image, uint16 (PNG, TIFF), int32 or float32 (TIFF)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def png16(path: Path, values: np.ndarray) -> None:
    """uint16 (H, W, C): gray with alpha, color, or color with alpha."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    content = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def tiff(
    path: Path,
    values: np.ndarray,
    *,
    planar: bool = False,
    order: str = "<",
    packed: bool = False,
    white_is_zero: bool = False,
) -> None:
    """Unsigned integers or floats, (H, W, 3) or (H, W, 1), in one strip or one per channel."""
    height, width, channels = values.shape
    planes = [values[..., channel] for channel in range(channels)] if planar else [values]
    strips = [plane.astype(values.dtype.newbyteorder(order)).tobytes() for plane in planes]
    strips = [zlib.compress(strip) for strip in strips] if packed else strips
    strips = [strip + b"\0" * (len(strip) % 2) for strip in strips]
    offsets = [8 + sum(map(len, strips[:at])) for at in range(len(strips))]
    body = b"".join(strips)
    meaning = 2 if channels == 3 else 0 if white_is_zero else 1
    tags = {
        256: [width],
        257: [height],
        258: [8 * values.dtype.itemsize] * channels,
        259: [8 if packed else 1],
        262: [meaning],
        273: offsets,
        277: [channels],
        278: [height],
        279: [len(strip) for strip in strips],
        284: [2 if planar else 1],
        339: [3 if values.dtype.kind == "f" else 1] * channels,
    }
    entries, beyond = b"", b""
    for tag, numbers in tags.items():
        content = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(content) > 4:
            content, beyond = (
                struct.pack(f"{order}I", 8 + len(body) + len(beyond)),
                beyond + content,
            )
        entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + content
    start = struct.pack(f"{order}I", 8 + len(body) + len(beyond))
    directory = struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((b"II*\0" if order == "<" else b"MM\0*") + start + body + beyond + directory)
