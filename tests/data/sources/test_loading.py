"""`load`: its options, and the subsets it draws."""

from pathlib import Path

import image_folders
import numpy as np
import pytest
from dataset_files import options, silent, write_cifar10, write_fmnist
from omegaconf import OmegaConf

from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import load, stored_channels, stored_side
from fedx_pl.errors import UserError


def test_options_are_a_structured_config(tmp_path: Path) -> None:
    assert OmegaConf.to_object(OmegaConf.structured(DataOptions)) == DataOptions()
    assert all(field.metadata["help"] for field in DataOptions.__dataclass_fields__.values())
    write_fmnist(tmp_path)
    node = OmegaConf.structured(options(tmp_path, "fmnist"))
    assert load(node, report=silent).train.images.shape == (5, 28, 28, 1)


@pytest.mark.parametrize(
    ("typed", "meant"), [("cifar-10", "cifar10"), ("SVNH", "svhn"), ("fmnsit", "fmnist")]
)
def test_an_unknown_name_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"data.name={typed} .*did you mean data.name={meant}"):
        load(DataOptions(name=typed))


@pytest.mark.parametrize("key", ["limit", "test_limit", "image_size", "workers"])
def test_negative_numbers_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"{key}=-1 is not possible"):
        load(DataOptions(**{key: -1}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [[1.0], [5.0, 5.0], [9.0, 1.0], [0.0, float("nan")], [0.0, 1.0, 2.0]]
)
def test_a_value_range_is_two_numbers(tmp_path: Path, bad: list[float]) -> None:
    with pytest.raises(UserError, match=r"value_range=.*(two numbers|a list of numbers)"):
        load(image_folders.options(tmp_path, value_range=bad))


@pytest.mark.parametrize("key", ["root", "cache", "test_root", "labels"])
@pytest.mark.parametrize(
    ("path", "reason"), [("a\0b", "NUL"), ("caf\udce9", r"caf\\xe9 is not UTF-8; rename it")]
)
def test_impossible_paths_are_named(tmp_path: Path, key: str, path: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"data\.{key}=.*{reason}"):
        load(image_folders.options(tmp_path, **{key: path}), report=silent)


def test_limit_draws_the_same_subset_for_the_same_seed(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole = load(options(tmp_path), report=silent)
    first, again = (load(options(tmp_path, limit=7, test_limit=2), seed=3) for _ in range(2))
    other = load(options(tmp_path, limit=7, test_limit=2), seed=4)
    assert first.test is not None
    assert len(first.train.images) == 7
    assert len(first.test.images) == 2
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert len({whole.fingerprint, first.fingerprint, other.fingerprint}) == 3
    assert first.fingerprint == again.fingerprint
    rows = [
        next(row for row, image in enumerate(whole.train.images) if (image == drawn).all())
        for drawn in first.train.images
    ]
    assert rows == sorted(set(rows))


def test_a_limit_beyond_the_data_is_the_data(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    limited = load(options(tmp_path, limit=1000), report=silent)
    assert limited.fingerprint == load(options(tmp_path)).fingerprint


@pytest.mark.parametrize("name", ["folder", "imagenet10"])
@pytest.mark.parametrize("grayscale", [False, True])
def test_the_shape_of_images_is_known_without_loading_them(
    tmp_path: Path, name: str, grayscale: bool
) -> None:
    for split in ("train", "val"):
        image_folders.paint(tmp_path / f"images/{split}/n01/1.JPEG", (40, 0, 0))
    chosen = image_folders.options(tmp_path, name=name, classes=["n01"], grayscale=grayscale)
    side = stored_side(chosen)
    assert load(chosen).train.images.shape[1:] == (side, side, stored_channels(chosen))
