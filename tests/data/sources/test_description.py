"""What `fedx-pl data` prints."""

from pathlib import Path

import pytest
from dataset_files import options, silent, write_cifar10

from fedx_pl.data.sources import SOURCES, describe, load, overview


def test_a_data_set_is_described_by_counts_and_statistics(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    data = load(options(tmp_path), report=silent)
    text = describe(data)
    pixels = data.train.images.reshape(-1, 3) / 255
    assert "mean: " + " ".join(f"{value:.4f}" for value in pixels.mean(0)) in text
    assert "std: " + " ".join(f"{value:.4f}" for value in pixels.std(0)) in text
    assert "train: 20 images" in text
    assert "frog" in text
    assert data.fingerprint in text


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "arrays"])
def test_the_overview_says_what_to_type_for_each(name: str) -> None:
    assert f"fedx-pl data {name}" in overview()
