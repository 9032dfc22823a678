"""Decodes image files; a library for ``decode.py``, and the program it runs to decode in several processes.

As a program it imports nothing of this package: with torch and Lightning each process would take seconds to start. And
unlike multiprocessing it leaves the user's script alone, which needs no ``if __name__ == "__main__"``.

It reads one task per line from standard input, ``[root, paths, size, grayscale]`` as JSON, and answers with a line of
JSON, for each file why it was skipped or "", followed by the bytes of the readable images.
"""

import json
import os
import sys
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps

Task = tuple[str, Sequence[str], int, bool]

# Pillow reads more, but some readers start other programs (EPS) or are rarely tested: files may come from anywhere.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000")


def decode_batch(task: Task) -> tuple[np.ndarray, list[str]]:
    """Decodes a few files.

    Args:
        task: the folder, paths relative to it, the side length, and whether to keep one channel only.

    Returns:
        The readable images, uint8 ``(n, size, size, C)``, and for each file why it was skipped, empty if it was not.
    """
    root, paths, size, grayscale = task
    images = np.empty((len(paths), size, size, 1 if grayscale else 3), np.uint8)
    reasons: list[str] = []
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about harmless flaws; what is not harmless is an error below
        for path in paths:
            try:
                images[count] = decode_file(os.path.join(root, path), size, grayscale)
                count += 1
                reasons.append("")
            except Exception as error:  # decoders fed with foreign bytes fail in any way they like
                reasons.append(" ".join(str(error).split())[:200] or type(error).__name__)
    return images[:count], reasons


def decode_file(path: str, size: int, grayscale: bool) -> np.ndarray:
    """Decodes one file: its short side becomes ``size``, the centre is kept.

    Returns:
        uint8 ``(size, size, C)``.
    """
    if not os.path.isfile(path):
        raise ValueError("not a file")  # opening a pipe would wait for ever
    mode = "L" if grayscale else "RGB"
    with Image.open(path, formats=FORMATS) as opened:  # reads the header only
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and opened.width * opened.height > limit:
            raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
        opened.draft(mode, (2 * size, 2 * size))  # lets JPEG decode at a fraction of its size, not below twice ours
        image: Image.Image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):
            # 16-bit greyscale (X-rays, microscopes): keep the upper byte, Pillow's own conversion would clip
            image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8))
        elif image.mode == "F":
            raise ValueError("floating-point pixels have no known range")
        pixels = np.asarray(ImageOps.fit(image.convert(mode), (size, size), Image.Resampling.BICUBIC))
    return pixels.reshape(size, size, -1)


def main() -> None:
    """Serves tasks until standard input ends."""
    for line in sys.stdin.buffer:
        images, reasons = decode_batch(json.loads(line))
        sys.stdout.buffer.write(json.dumps(reasons).encode() + b"\n" + images.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
