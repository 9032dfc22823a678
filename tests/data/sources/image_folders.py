"""Writes folders of small images."""

import struct
import zlib
from pathlib import Path

from PIL import Image

from fedx_pl.data.images import DataOptions, ImageData


def options(tmp_path: Path, **changes: object) -> DataOptions:
    """Options for images in ``images``, cached in ``cache``."""
    settings: dict[str, object] = {
        "name": "folder",
        "root": str(tmp_path / "images"),
        "cache": str(tmp_path / "cache"),
        "image_size": 8,
        "workers": 1,
    }
    return DataOptions(**settings | changes)  # type: ignore[arg-type]


def paint(
    path: Path, color: int | tuple[int, int, int] = 0, size: tuple[int, int] = (12, 10)
) -> None:
    """Writes an image of one color."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(color, int) else "RGB", size, color).save(path)


def paint_classes(folder: Path, classes: int = 2, images: int = 3) -> None:
    """Writes images of different gray levels, some of each class."""
    for label in range(classes):
        for number in range(images):
            paint(folder / "images" / f"class{label}" / f"{number}.png", 40 * label + 9 * number)


def grays(data: ImageData) -> list[int]:
    """The gray level of each training image."""
    return data.train.images[:, 4, 4, 0].tolist()


def header_of_png(width: int, height: int) -> bytes:
    """A PNG that claims a size; its pixels are missing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(bytes(9))
    chunks = [
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in (header, pixels)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
