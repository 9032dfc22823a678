"""Writes small data sets in their official file formats."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from fedx_pl.data.images import DataOptions

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def silent(line: object) -> None:
    """A ``report`` function that ignores its lines."""


def options(root: Path, name: str = "cifar10", **changes: object) -> DataOptions:
    settings: dict[str, object] = {
        "name": name,
        "root": str(root),
        "verify": False,
        "download": False,
    }
    return DataOptions(**settings | changes)  # type: ignore[arg-type]


def random_batch(seed: int, count: int = 4, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), rng.integers(0, classes, count)


def planar(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def cifar_expected() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    batches = [random_batch(seed) for seed in range(6)]
    train = [np.concatenate(part) for part in zip(*batches[:5], strict=True)]
    return train[0], train[1], *batches[5]


def write_cifar10(folder: Path) -> Path:
    """Writes a small CIFAR-10 that can be read without a checksum, since it is not a pickle."""
    archive = folder / "cifar-10-binary.tar.gz"
    write_tar(archive, binary_members(), "cifar-10-batches-bin")
    return archive


def python_members(protocol: int = 2) -> dict[str, bytes]:
    """CIFAR-10's pickled batches."""
    content = {}
    for seed, name in enumerate(BATCHES):
        images, labels = random_batch(seed)
        batch = {"data": planar(images), "labels": labels.tolist(), "batch_label": name}
        content[name] = pickle.dumps(batch, protocol=protocol)
    content["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")}, protocol=protocol)
    return content


def make_official(
    monkeypatch: pytest.MonkeyPatch, dataset: type[CIFAR10], members: dict[str, bytes]
) -> None:
    """Tells torchvision the checksums of small pickles, as if they were the official ones."""
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in members.items()}
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(dataset, attribute)]
        monkeypatch.setattr(dataset, attribute, [[name, md5[name]] for name in names])
    meta = dataset.meta | {"md5": md5[dataset.meta["filename"]]}
    monkeypatch.setattr(dataset, "meta", meta)


def write_tar(path: Path, members: dict[str, bytes], folder: str = "cifar-10-batches-py") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def binary_members() -> dict[str, bytes]:
    content = {}
    for seed, name in enumerate(BATCHES):
        images, labels = random_batch(seed)
        content[f"{name}.bin"] = np.column_stack(
            [labels.astype(np.uint8), planar(images)]
        ).tobytes()
    return content


def npm_members() -> dict[str, bytes]:
    content, labels = {}, []
    for seed, name in enumerate(BATCHES):
        images, batch_labels = random_batch(seed)
        stream = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(stream, "PNG")
        content[f"{name}.png"] = stream.getvalue()
        labels.append(batch_labels.tolist())
    content["train_lables.json"] = json.dumps(
        [label for batch in labels[:5] for label in batch]
    ).encode()
    content["test_lables.json"] = json.dumps(labels[5]).encode()
    return content


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + b"".join(n.to_bytes(4, "big") for n in array.shape)
        + array.tobytes()
    )


def write_fmnist(folder: Path, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix, count in (("train", 5), ("t10k", 3)):
        arrays[f"{prefix}-images-idx3-ubyte"] = rng.integers(
            0, 256, (count, 28, 28), dtype=np.uint8
        )
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(content) if zipped else content
        )
    return arrays
