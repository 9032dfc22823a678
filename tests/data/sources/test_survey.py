"""Images of more than 8 bits per value: one range for a whole set, said and kept; nothing is lost in silence."""

import json
from pathlib import Path

import deep_files
import numpy as np
import pytest
from PIL import Image

from fedx_pl.config.compose import compose
from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import decode, describe, image_files, load, survey
from fedx_pl.errors import UserError

SIDE = 32


@pytest.fixture
def lines() -> list[str]:
    return []


def options(tmp_path: Path, **changes: object) -> DataOptions:
    settings = {
        "name": "folder",
        "root": str(tmp_path / "images"),
        "cache": str(tmp_path / "cache"),
        "grayscale": True,
    }
    return DataOptions(**settings | {"image_size": SIDE} | changes)  # type: ignore[arg-type]


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

    @pytest.mark.parametrize("alpha", [False, True])
    @pytest.mark.parametrize("kind", ["png", "tif", "tif, big-endian", "tif, packed"])
    def test_color_keeps_all_levels_as_well(self, tmp_path: Path, kind: str, alpha: bool) -> None:
        """Pillow alone keeps the upper byte, here 4 or 5 of 400 values."""
        color = np.stack([ramp(1000, 1200), ramp(1200, 1400), ramp(1400, 1000)], axis=2)
        if kind == "png":
            more = [ramp(0, 65535)[..., None]] if alpha else []
            deep_files.png16(tmp_path / "images/a.png", np.concatenate([color, *more], axis=2))
        else:
            order, packed = ">" if "big" in kind else "<", "packed" in kind
            deep_files.tiff(tmp_path / "images/a.tif", color, order=order, packed=packed)
        image = load(options(tmp_path, grayscale=False), report=lambda line: None).train.images[0]
        np.testing.assert_array_equal(image, (color.astype(int) - 1000) * 255 // 400)

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
    @pytest.mark.parametrize("packed", [False, True])
    def test_white_is_zero(self, tmp_path: Path, dtype: type, packed: bool) -> None:
        """X-rays are saved so. Pillow inverts 8 bits only, and the image would be the negative of its neighbors."""
        top = np.iinfo(dtype).max
        deep_files.gray(tmp_path / "images/a.tif", ramp(0, top, dtype))
        negative = (top - ramp(0, top, dtype))[..., None]
        deep_files.tiff(tmp_path / "images/b.tif", negative, white_is_zero=True, packed=packed)
        black_is_zero, white_is_zero = load(
            options(tmp_path), report=lambda line: None
        ).train.images
        np.testing.assert_array_equal(white_is_zero, black_is_zero)

    def test_white_is_zero_in_floats_is_refused_by_name(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        """There is no largest float that could be black."""
        deep_files.gray(tmp_path / "images/a.tif", ramp(0, 1, np.float32))
        deep_files.tiff(
            tmp_path / "images/b.tif", ramp(0, 1, np.float32)[..., None], white_is_zero=True
        )
        assert load(options(tmp_path), report=lines.append).skipped == 1
        assert "b.tif (float TIFF in which 0 is white" in lines[-1]

    def test_gray_with_alpha(self, tmp_path: Path) -> None:
        deep_files.png16(
            tmp_path / "images/a.png", np.stack([ramp(7, 4095), ramp(65535, 0)], axis=2)
        )
        assert levels(load(options(tmp_path), report=lambda line: None).train.images) == 256

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_floats_and_negative_values(self, tmp_path: Path, dtype: type) -> None:
        """As of computed tomography: -1000 is air."""
        values = ramp(-1000, 3000, dtype)
        if dtype is np.float32:
            values[0, 0] = np.nan
        deep_files.gray(tmp_path / "images/a.tif", values)
        data = load(options(tmp_path), report=lambda line: None)
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
        data = load(options(tmp_path, **changes), report=lambda line: None)
        assert data.value_range == (0, 4000)
        assert data.test is not None
        assert data.train.images.reshape(2, -1).max(axis=1).tolist() == [63, 127]
        assert data.test.images.max() == 255

    def test_eight_bit_images_stay_as_they_are(self, tmp_path: Path, lines: list[str]) -> None:
        """Beside others, with any range."""
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

    @pytest.mark.parametrize(
        "bad", [[1.0], [5.0, 5.0], [9.0, 1.0], [0.0, float("nan")], [0.0, 1.0, 2.0]]
    )
    def test_no_range(self, tmp_path: Path, bad: list[float]) -> None:
        with pytest.raises(UserError, match=r"data\.value_range=.*e\.g\. \[0,4095\]"):
            load(options(tmp_path, value_range=bad))

    def test_processes_give_the_same_as_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(130):
            deep_files.gray(tmp_path / f"images/{number:03}.png", ramp(number, 3 * number + 1))
        here = load(
            options(tmp_path, cache=str(tmp_path / "one"), workers=1), report=lambda line: None
        )
        monkeypatch.setattr(decode, "_POOL_SECONDS", 0.0)
        pool = load(
            options(tmp_path, cache=str(tmp_path / "two"), workers=2), report=lambda line: None
        )
        assert pool.value_range == here.value_range == (0, 388)
        assert pool.fingerprint == here.fingerprint


class TestWarnings:
    def test_an_outlier_that_leaves_few_levels_is_told_with_what_to_type(
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

    def test_images_of_different_depth_are_told(self, tmp_path: Path, lines: list[str]) -> None:
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

    def test_only_the_first_page_is_used_and_that_is_said(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        (tmp_path / "images").mkdir()
        pages = [Image.fromarray(np.full((SIDE, SIDE), shade, np.uint8)) for shade in (10, 20, 30)]
        pages[0].save(tmp_path / "images/stack.tif", save_all=True, append_images=pages[1:])
        data = load(options(tmp_path), report=lines.append)
        assert (data.train.images == 10).all()
        (line,) = lines
        assert "only the first of each is used (stack.tif has 3)" in line

    @pytest.mark.parametrize("order", ["<", ">"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_planar_color_is_refused_by_name(
        self, tmp_path: Path, lines: list[str], order: str, packed: bool
    ) -> None:
        deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
        color = np.stack([ramp(0, 4095)] * 3, axis=2)
        deep_files.tiff(tmp_path / "images/b.tif", color, planar=True, order=order, packed=packed)
        assert load(options(tmp_path), report=lines.append).skipped == 1
        assert "b.tif (planar TIFF of 16 bits; convert it: tiffcp -p contig" in lines[-1]

    def test_other_kinds_that_would_be_misread_are_refused_by_name(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
        (tmp_path / "images/b.ppm").write_bytes(b"P6 1 1 4095\n" + bytes(6))
        (tmp_path / "images/c.dcm").write_bytes(bytes(128) + b"DICM")
        (tmp_path / "images/d.heic").write_bytes(b"\0\0\0\x18ftypheic")
        (tmp_path / "images/e.tif").write_bytes(b"II*\0\x08\0\0\0" + bytes(6))
        assert load(options(tmp_path), report=lines.append).skipped == 4
        for part in (
            "b.ppm (color PPM of more than 8 bits",
            "c.dcm (DICOM",
            "d.heic (HEIC",
            "e.tif (a TIFF with",
        ):
            assert part in lines[-1]

    def test_deep_color_jpeg_2000_is_refused_by_name(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        file = tmp_path / "images/a.jp2"
        file.parent.mkdir()
        Image.new("RGB", (SIDE, SIDE), "red").save(file)
        assert load(options(tmp_path), report=lines.append).skipped == 0
        content = bytearray(file.read_bytes())
        content[content.index(b"\xff\x4f\xff\x51") + 42] = 11  # claims 12 bits
        file.write_bytes(content)
        deep_files.gray(tmp_path / "images/b.png", ramp(0, 255, np.uint8))
        assert load(options(tmp_path), report=lines.append).skipped == 1
        assert "a.jp2 (color JPEG 2000 of more than 8 bits" in lines[-1]


class TestAvif:
    @pytest.mark.skipif(
        "AVIF" not in image_files.FORMATS, reason="needs Pillow 11.3 or newer, built with AVIF"
    )
    def test_avif_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "images").mkdir()
        Image.new("RGB", (40, 40), (200, 30, 30)).save(tmp_path / "images/a.avif")
        image = load(options(tmp_path, grayscale=False)).train.images[0]
        np.testing.assert_allclose(image[8, 8], (200, 30, 30), atol=6)

    def test_without_support_it_is_refused_by_name(
        self, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            image_files, "FORMATS", tuple(name for name in image_files.FORMATS if name != "AVIF")
        )
        deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
        (tmp_path / "images/b.avif").write_bytes(b"\0\0\0\x20ftypavif" + bytes(16))
        assert load(options(tmp_path), report=lines.append).skipped == 1
        assert "b.avif (AVIF cannot be read by the Pillow that is installed" in lines[0]
