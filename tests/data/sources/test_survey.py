"""Images of more than 8 bits per value: one range for a whole set, reported and kept."""

import json
from pathlib import Path

import deep_files
import image_folders
import numpy as np
import pytest
from dataset_files import silent
from PIL import Image

from fedx_pl.config.compose import compose
from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import decode, describe, load, survey

SIDE = 32


def options(tmp_path: Path, **changes: object) -> DataOptions:
    return image_folders.options(tmp_path, **{"image_size": SIDE, "grayscale": True} | changes)


def ramp(low: float, high: float, dtype: type = np.uint16) -> np.ndarray:
    """An image whose pixels go evenly from one value to another."""
    return np.linspace(low, high, SIDE * SIDE).astype(dtype).reshape(SIDE, SIDE)


def levels(image: np.ndarray) -> int:
    return len(np.unique(image))


class TestRange:
    @pytest.mark.parametrize(("low", "high"), [(0, 4095), (1000, 1400), (0, 65535)])
    @pytest.mark.parametrize("ending", ["png", "tif"])
    def test_a_range_within_sixteen_bits_keeps_all_gray_levels(
        self, tmp_path: Path, lines: list[str], low: int, high: int, ending: str
    ) -> None:
        deep_files.gray(tmp_path / f"images/a.{ending}", ramp(low, high))
        data = load(options(tmp_path), report=lines.append)
        assert data.value_range == (low, high)
        assert levels(data.train.images) == 256
        np.testing.assert_array_equal(
            data.train.images[0, ..., 0], (ramp(low, high).astype(int) - low) * 255 // (high - low)
        )
        (line,) = lines
        assert f"{low}..{high} becomes 0..255" in line
        assert f"data.value_range=[{low},{high}]" in line
        assert f"value range: {low}..{high}" in describe(data)

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_floats_and_negative_values(self, tmp_path: Path, dtype: type) -> None:
        """Computed tomography has such values: -1000 is air."""
        values = ramp(-1000, 3000, dtype)
        if dtype is np.float32:
            values[0, 0] = np.nan
        deep_files.gray(tmp_path / "images/a.tif", values)
        data = load(options(tmp_path), report=silent)
        assert data.value_range is not None
        assert data.value_range[0] == pytest.approx(-1000, abs=5)
        assert data.value_range[1] == 3000
        assert levels(data.train.images) == 256
        assert data.train.images[0, 0, 0, 0] == 0

    def test_all_folders_and_the_test_images_share_one_range(self, tmp_path: Path) -> None:
        deep_files.gray(tmp_path / "images/site a/1.png", ramp(0, 1000))
        deep_files.gray(tmp_path / "images/site b/2.tif", ramp(0, 2000))
        deep_files.gray(tmp_path / "exam/cat/3.png", ramp(0, 4000))
        changes = {"labels": "folders", "test_root": str(tmp_path / "exam")}
        data = load(options(tmp_path, **changes), report=silent)
        assert data.value_range == (0, 4000)
        assert data.test is not None
        assert data.train.images.reshape(2, -1).max(axis=1).tolist() == [63, 127]
        assert data.test.images.max() == 255

    def test_eight_bit_images_stay_as_they_are(self, tmp_path: Path, lines: list[str]) -> None:
        """This holds next to deeper images, with any range."""
        pixels = ramp(30, 200, np.uint8)
        deep_files.gray(tmp_path / "images/a.png", pixels)
        np.testing.assert_array_equal(
            load(options(tmp_path), report=lines.append).train.images[0, ..., 0], pixels
        )
        assert (
            load(options(tmp_path, value_range=[0.0, 9.0]), report=lines.append).value_range is None
        )
        assert lines == []
        deep_files.gray(tmp_path / "images/b.png", ramp(0, 4095))
        np.testing.assert_array_equal(
            load(options(tmp_path), report=lines.append).train.images[0, ..., 0], pixels
        )
        assert "1 image has more than 8 bits" in lines[0]

    def test_the_decision_is_kept_with_the_images(
        self, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deep_files.gray(tmp_path / "images/a.png", ramp(0, 4095))
        first = load(options(tmp_path), report=lines.append)
        monkeypatch.setattr(decode, "decode_batch", None)
        monkeypatch.setattr(survey, "survey_batch", None)
        again = load(options(tmp_path), report=lines.append)
        assert again.value_range == first.value_range
        np.testing.assert_array_equal(again.train.images, first.train.images)
        assert lines[0] == lines[1]
        kept = [
            json.loads(file.read_text())["info"]
            for file in (tmp_path / "cache").rglob("manifest.json")
        ]
        assert [info["value_range"] for info in kept] == [[0, 4095]] * 2

    def test_a_typed_range_wins(self, tmp_path: Path, lines: list[str]) -> None:
        deep_files.gray(tmp_path / "images/a.png", ramp(1000, 1400))
        config = compose(["data=folder", "data.value_range=[0,65535]"])
        data = load(options(tmp_path, value_range=config.data.value_range), report=lines.append)
        np.testing.assert_array_equal(data.train.images[0, ..., 0], ramp(1000, 1400) // 257)
        narrow = load(options(tmp_path, value_range=[1100.0, 1300.0]), report=lines.append)
        assert (narrow.train.images[0, 0] == 0).all()
        assert (narrow.train.images[0, -1] == 255).all()
        assert any(
            "values outside it, in 1 of them, become black or white" in line for line in lines
        )

    def test_processes_give_the_same_as_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(130):
            deep_files.gray(tmp_path / f"images/{number:03}.png", ramp(number, 3 * number + 1))
        here = load(options(tmp_path, cache=str(tmp_path / "one"), workers=1), report=silent)
        monkeypatch.setattr(decode, "POOL_SECONDS", 0.0)
        pool = load(options(tmp_path, cache=str(tmp_path / "two"), workers=2), report=silent)
        assert pool.value_range == here.value_range == (0, 388)
        assert pool.fingerprint == here.fingerprint


class TestWarnings:
    def test_an_outlier_that_leaves_few_levels_is_reported_with_what_to_type(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        for name in "abc":
            values = ramp(1000, 1400)
            values[0, 0] = 65535 if name == "c" else values[0, 0]  # a broken pixel of the detector
            deep_files.gray(tmp_path / f"images/{name}.png", values)
        data = load(options(tmp_path), report=lines.append)
        assert data.value_range == (1000, 65535)
        warning = lines[-1]
        assert "warning: 3 of them keep fewer than 32 of 256 gray levels, first a.png" in warning
        low, high = json.loads(warning.partition("type data.value_range=")[2])
        better = load(options(tmp_path, value_range=[low, high]), report=lines.append)
        assert levels(better.train.images[0]) > 250
        assert not any("warning" in line for line in lines[2:])

    def test_images_of_different_depth_are_reported(self, tmp_path: Path, lines: list[str]) -> None:
        deep_files.gray(tmp_path / "images/a.png", ramp(0, 4095))
        deep_files.gray(tmp_path / "images/b.png", ramp(0, 65535))
        load(options(tmp_path), report=lines.append)
        assert "first a.png" in lines[-1]
        assert "images of different depth or units" in lines[-1]

    def test_images_with_few_values_lose_nothing(self, tmp_path: Path, lines: list[str]) -> None:
        deep_files.gray(tmp_path / "images/mask.png", (ramp(0, 3) * 100).astype(np.uint16))
        deep_files.gray(tmp_path / "images/blank.png", np.full((SIDE, SIDE), 7, np.uint16))
        load(options(tmp_path), report=lines.append)
        assert len(lines) == 1

    def test_only_the_first_page_is_used_and_that_is_reported(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        (tmp_path / "images").mkdir()
        pages = [Image.fromarray(np.full((SIDE, SIDE), shade, np.uint8)) for shade in (10, 20, 30)]
        pages[0].save(tmp_path / "images/stack.tif", save_all=True, append_images=pages[1:])
        data = load(options(tmp_path), report=lines.append)
        assert (data.train.images == 10).all()
        (line,) = lines
        assert "only the first of each is used (stack.tif has 3)" in line
