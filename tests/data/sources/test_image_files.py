"""Decoding of single image files: every mode and orientation; what is refused, and why."""

from pathlib import Path

import deep_files
import numpy as np
import pytest
from dataset_files import silent
from image_folders import header_of_png, options, paint, paint_classes
from PIL import Image

from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import image_files, load

SIDE = 32


def ramp(low: float, high: float, dtype: type = np.uint16) -> np.ndarray:
    """An image whose pixels go evenly from one value to another."""
    return np.linspace(low, high, SIDE * SIDE).astype(dtype).reshape(SIDE, SIDE)


def levels(image: np.ndarray) -> int:
    return len(np.unique(image))


def deep(tmp_path: Path, **changes: object) -> DataOptions:
    return options(tmp_path, **{"image_size": SIDE, "grayscale": True} | changes)


def test_absurd_size_is_refused_before_decoding(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    paint(tmp_path / "images/a.png", size=(11, 10))
    paint(tmp_path / "images/b.png", size=(10, 10))
    assert load(options(tmp_path), report=lines.append).skipped == 1
    assert "11 x 10 pixels are too many" in lines[0]


def test_short_side_is_resized_and_the_center_kept(tmp_path: Path) -> None:
    strip = np.zeros((20, 60, 3), np.uint8)
    strip[:, 20:40] = 255
    (tmp_path / "images").mkdir()
    Image.fromarray(strip).save(tmp_path / "images/strip.png")
    image = load(options(tmp_path)).train.images[0]
    assert (image[:, 1:-1] == 255).all()
    assert image.min() > 200  # the filter sees a little of what lies beside


def test_camera_orientation_is_respected(tmp_path: Path) -> None:
    top_white = np.zeros((16, 16, 3), np.uint8)
    top_white[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    (tmp_path / "images").mkdir()
    Image.fromarray(top_white).save(tmp_path / "images/photo.jpg", exif=exif, quality=100)
    image = load(options(tmp_path)).train.images[0]
    assert image[:3].max() < 30
    assert image[-3:].min() > 225


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("grayscale", [True, False])
def test_every_color_mode(tmp_path: Path, mode: str, grayscale: bool) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (9, 9), "white").convert(mode).save(tmp_path / "images/a.tif")
    images = load(options(tmp_path, grayscale=grayscale)).train.images
    assert images.shape == (1, 8, 8, 1 if grayscale else 3)
    assert images.min() > 250


def test_a_side_that_no_image_has_is_refused_by_the_header(tmp_path: Path) -> None:
    """The pixels are few, but each of 80 million rows needs a pointer."""
    paint_classes(tmp_path)
    for name, size in (("tall", (1, 80_000_000)), ("wide", (80_000_000, 1))):
        (tmp_path / "images" / "class0" / f"{name}.png").write_bytes(header_of_png(*size))
    lines: list[str] = []
    data = load(options(tmp_path, labels="none"), report=lines.append)
    assert len(data.train.images) == 6
    assert data.skipped == 2
    assert "1 x 80000000 pixels are too many" in lines[0]


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("kind", ["png", "tif", "tif, big-endian", "tif, packed"])
def test_color_keeps_all_levels_as_well(tmp_path: Path, kind: str, alpha: bool) -> None:
    """Pillow alone keeps the upper byte, here 4 or 5 of 400 values."""
    color = np.stack([ramp(1000, 1200), ramp(1200, 1400), ramp(1400, 1000)], axis=2)
    if kind == "png":
        more = [ramp(0, 65535)[..., None]] if alpha else []
        deep_files.png16(tmp_path / "images/a.png", np.concatenate([color, *more], axis=2))
    else:
        order, packed = ">" if "big" in kind else "<", "packed" in kind
        deep_files.tiff(tmp_path / "images/a.tif", color, order=order, packed=packed)
    image = load(deep(tmp_path, grayscale=False), report=silent).train.images[0]
    np.testing.assert_array_equal(image, (color.astype(int) - 1000) * 255 // 400)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("packed", [False, True])
def test_white_is_zero(tmp_path: Path, dtype: type, packed: bool) -> None:
    """X-rays are often saved this way.

    Pillow inverts 8 bits only, and the image would be the negative of its neighbors.
    """
    top = np.iinfo(dtype).max
    deep_files.gray(tmp_path / "images/a.tif", ramp(0, top, dtype))
    negative = (top - ramp(0, top, dtype))[..., None]
    deep_files.tiff(tmp_path / "images/b.tif", negative, white_is_zero=True, packed=packed)
    black_is_zero, white_is_zero = load(deep(tmp_path), report=silent).train.images
    np.testing.assert_array_equal(white_is_zero, black_is_zero)


def test_white_is_zero_in_floats_is_refused_by_name(tmp_path: Path, lines: list[str]) -> None:
    """There is no largest float that could be black."""
    deep_files.gray(tmp_path / "images/a.tif", ramp(0, 1, np.float32))
    deep_files.tiff(
        tmp_path / "images/b.tif", ramp(0, 1, np.float32)[..., None], white_is_zero=True
    )
    assert load(deep(tmp_path), report=lines.append).skipped == 1
    assert "b.tif (float TIFF in which 0 is white" in lines[-1]


def test_gray_with_alpha(tmp_path: Path) -> None:
    deep_files.png16(tmp_path / "images/a.png", np.stack([ramp(7, 4095), ramp(65535, 0)], axis=2))
    assert levels(load(deep(tmp_path), report=silent).train.images) == 256


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("packed", [False, True])
def test_planar_color_is_refused_by_name(
    tmp_path: Path, lines: list[str], order: str, packed: bool
) -> None:
    deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
    color = np.stack([ramp(0, 4095)] * 3, axis=2)
    deep_files.tiff(tmp_path / "images/b.tif", color, planar=True, order=order, packed=packed)
    assert load(deep(tmp_path), report=lines.append).skipped == 1
    assert "b.tif (planar TIFF of 16 bits; convert it: tiffcp -p contig" in lines[-1]


def test_other_kinds_that_would_be_misread_are_refused_by_name(
    tmp_path: Path, lines: list[str]
) -> None:
    deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
    (tmp_path / "images/b.ppm").write_bytes(b"P6 1 1 4095\n" + bytes(6))
    (tmp_path / "images/c.dcm").write_bytes(bytes(128) + b"DICM")
    (tmp_path / "images/d.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (tmp_path / "images/e.tif").write_bytes(b"II*\0\x08\0\0\0" + bytes(6))
    assert load(deep(tmp_path), report=lines.append).skipped == 4
    for part in (
        "b.ppm (color PPM of more than 8 bits",
        "c.dcm (DICOM",
        "d.heic (HEIC",
        "e.tif (a TIFF with",
    ):
        assert part in lines[-1]


def test_deep_color_jpeg_2000_is_refused_by_name(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "images/a.jp2"
    file.parent.mkdir()
    Image.new("RGB", (SIDE, SIDE), "red").save(file)
    assert load(deep(tmp_path), report=lines.append).skipped == 0
    content = bytearray(file.read_bytes())
    content[content.index(b"\xff\x4f\xff\x51") + 42] = 11  # claims 12 bits
    file.write_bytes(content)
    deep_files.gray(tmp_path / "images/b.png", ramp(0, 255, np.uint8))
    assert load(deep(tmp_path), report=lines.append).skipped == 1
    assert "a.jp2 (color JPEG 2000 of more than 8 bits" in lines[-1]


@pytest.mark.skipif(
    "AVIF" not in image_files.FORMATS, reason="needs Pillow 11.3 or newer, built with AVIF"
)
def test_avif_is_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 40), (200, 30, 30)).save(tmp_path / "images/a.avif")
    image = load(deep(tmp_path, grayscale=False)).train.images[0]
    np.testing.assert_allclose(image[8, 8], (200, 30, 30), atol=6)


def test_without_support_it_is_refused_by_name(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        image_files, "FORMATS", tuple(name for name in image_files.FORMATS if name != "AVIF")
    )
    deep_files.gray(tmp_path / "images/a.png", ramp(0, 255, np.uint8))
    (tmp_path / "images/b.avif").write_bytes(b"\0\0\0\x20ftypavif" + bytes(16))
    assert load(deep(tmp_path), report=lines.append).skipped == 1
    assert "b.avif (AVIF cannot be read by the Pillow that is installed" in lines[0]
