"""The file that keeps which client owns which image: RUN/split.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedx_pl.files import write_atomically
from fedx_pl.files.reading import read_json
from fedx_pl.options import OptionError

FORMAT = 1


def save(
    path: str | Path, clients: list[np.ndarray], *, fingerprint: str, options: dict[str, Any]
) -> None:
    """Writes a partition as JSON, atomically.

    `load` checks the data set's fingerprint; `options` (how the partition was made) are for people
    to read.
    """
    path = Path(path)
    text = json.dumps(
        {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "num_images": sum(map(len, clients)),  # dealt; a split given by file need not use all
            "options": options,
            "clients": [indices.tolist() for indices in clients],
        },
        separators=(",", ":"),
    )
    write_atomically(path, text.encode())


def load(path: str | Path, *, fingerprint: str, num_images: int) -> list[np.ndarray]:
    """Reads a partition, which may leave images unused but gives none to two clients.

    Args:
        path: A file written by `save`, or by hand in the same format.
        fingerprint: Of the data set at hand.
        num_images: Size of the data set at hand.

    Returns:
        One sorted int64 index array per client.

    Raises:
        OptionError: If the file cannot be read, is no split file, or was made for other data.
    """

    def wrong(what: str) -> OptionError:
        return OptionError("file", str(path), what, "the path of a split.json")

    try:
        content = read_json(Path(path))
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise wrong(f"is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise wrong(f"is not a split file of format {FORMAT}")
    if content.get("fingerprint") != fingerprint:
        raise wrong(
            f"was made for other images (fingerprint {content.get('fingerprint')}, these have "
            f"{fingerprint})"
        )
    lists = content.get("clients")
    if not isinstance(lists, list) or not lists:
        raise wrong("has no clients")
    used = np.zeros(num_images, dtype=bool)
    split = []
    for client, indices in enumerate(lists):
        if not isinstance(indices, list) or not indices:
            raise wrong(f"gives client {client} no images")
        if not all(type(index) is int and 0 <= index < num_images for index in indices):
            raise wrong(
                f"gives client {client} something that is no image number from 0 to "
                f"{num_images - 1}"
            )
        array = np.unique(np.array(indices, dtype=np.int64))
        if len(array) < len(indices) or used[array].any():
            raise wrong(f"gives client {client} an image twice, or one of another client")
        used[array] = True
        split.append(array)
    return split
