"""Folders of images: the user's own, and class folders of a local ImageNet."""

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedx_pl.config.compose import compose
from fedx_pl.data.images import DataOptions, ImageData
from fedx_pl.data.sources import (
    cache,
    decode,
    describe,
    image_files,
    load,
    stored_channels,
    stored_side,
)
from fedx_pl.errors import UserError


@pytest.fixture
def lines() -> list[str]:
    return []


def options(tmp_path: Path, **changes: object) -> DataOptions:
    settings = {
        "name": "folder",
        "root": str(tmp_path / "images"),
        "cache": str(tmp_path / "cache"),
        "image_size": 8,
    }
    return DataOptions(**settings | changes)  # type: ignore[arg-type]


def paint(
    path: Path, colour: int | tuple[int, int, int] = 0, size: tuple[int, int] = (12, 10)
) -> None:
    """Writes an image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def colours(data: ImageData) -> list[int]:
    """The grey level of each training image."""
    return data.train.images[:, 4, 4, 0].tolist()


def header_of_png(width: int, height: int) -> bytes:
    """A PNG that claims a size; its pixels are missing."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder of one's own; root, who may read everything, is somebody else meanwhile."""
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        home = Path(tempfile.mkdtemp())
        yield home
    finally:
        if is_root:
            os.seteuid(0)
    shutil.rmtree(home)


class TestUnlabelled:
    def test_images_are_found_recursively_in_path_order(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        for colour, name in enumerate(
            ["a.png", "site b/2.jpg", "site b/deep/er/3.bmp", "site c/no ending"]
        ):
            paint(tmp_path / "images" / f"{name}.png", colour * 60)
            (tmp_path / "images" / f"{name}.png").rename(tmp_path / "images" / name)
        data = load(options(tmp_path), report=lines.append)
        assert data.train.images.shape == (4, 8, 8, 3)
        assert data.train.images.dtype == np.uint8
        assert colours(data) == [0, 60, 120, 180]
        assert data.train.labels is None
        assert data.test is None
        assert data.train.groups is not None
        assert [data.group_names[group] for group in data.train.groups] == [
            ".",
            "site b",
            "site b",
            "site c",
        ]
        assert lines == []
        assert "test: none" in describe(data)

    def test_other_files_are_skipped_and_counted_in_one_line(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        paint(tmp_path / "images/good.png", 200)
        content = (tmp_path / "images/good.png").read_bytes()
        (tmp_path / "images/cut.png").write_bytes(content[: len(content) // 2])
        (tmp_path / "images/notes.txt").write_text("not an image")
        (tmp_path / "images/huge.png").write_bytes(header_of_png(50_000, 50_000))
        (tmp_path / "images/empty.jpg").touch()
        (tmp_path / "images/.DS_Store").write_text("hidden files are not even counted")
        (tmp_path / "images/gone.png").symlink_to("nowhere")
        os.mkfifo(tmp_path / "images/pipe")
        for _ in range(2):  # decoded, and from the cache
            lines.clear()
            data = load(options(tmp_path), report=lines.append)
            assert colours(data) == [200]
            assert data.skipped == 6
            assert len(lines) == 1
            assert "skipped 6 of 7" in lines[0]
            for file, reason in (
                ("4 like .*cut.png", "no readable image"), ("gone.png", "No such file"), ("pipe", "not a file"),
            ):  # fmt: skip
                assert re.search(rf"{file} \([^()]*{reason}", lines[0]), lines[0]

    def test_absurd_size_is_refused_before_decoding(
        self, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        paint(tmp_path / "images/a.png", size=(11, 10))
        paint(tmp_path / "images/b.png", size=(10, 10))
        assert load(options(tmp_path), report=lines.append).skipped == 1
        assert "11 x 10 pixels are too many" in lines[0]

    def test_short_side_is_resized_and_the_centre_kept(self, tmp_path: Path) -> None:
        strip = np.zeros((20, 60, 3), np.uint8)
        strip[:, 20:40] = 255
        (tmp_path / "images").mkdir()
        Image.fromarray(strip).save(tmp_path / "images/strip.png")
        image = load(options(tmp_path)).train.images[0]
        assert (image[:, 1:-1] == 255).all()
        assert image.min() > 200  # the filter sees a little of what lies beside

    def test_camera_orientation_is_respected(self, tmp_path: Path) -> None:
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
    def test_every_colour_mode(self, tmp_path: Path, mode: str, grayscale: bool) -> None:
        (tmp_path / "images").mkdir()
        Image.new("RGB", (9, 9), "white").convert(mode).save(tmp_path / "images/a.tif")
        images = load(options(tmp_path, grayscale=grayscale)).train.images
        assert images.shape == (1, 8, 8, 1 if grayscale else 3)
        assert images.min() > 250

    def test_link_loops_end(self, tmp_path: Path) -> None:
        paint(tmp_path / "images/sub/a.png")
        (tmp_path / "images/sub/loop").symlink_to(tmp_path / "images")
        (tmp_path / "images/self").symlink_to(tmp_path / "images/self")
        assert len(load(options(tmp_path), report=lambda line: None).train.images) == 1

    def test_an_unreadable_folder_is_named(self, lines: list[str]) -> None:
        with without_privileges() as home:
            paint(home / "images/site a/1.png", 10)
            paint(home / "images/site b/2.png", 20)
            (home / "images/site b").chmod(0)
            try:
                assert colours(load(options(home), report=lines.append)) == [10]
            finally:
                (home / "images/site b").chmod(0o700)
        (line,) = lines
        assert "cannot read the folder" in line
        assert "site b (Permission denied)" in line

    def test_a_folder_must_be_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        paint(tmp_path / "data/a.png")  # where other data sets are kept
        with pytest.raises(UserError, match=r"type data\.root=/path/to/images"):
            load(compose(["data=folder"]).data)

    def test_processes_give_the_same_as_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(150):
            paint(tmp_path / f"images/{number:03}.png", number)
        (tmp_path / "images/100.png").write_text("broken")
        here = load(
            options(tmp_path, cache=str(tmp_path / "one"), workers=1), report=lambda line: None
        )
        monkeypatch.setattr(decode, "_POOL_SECONDS", 0.0)
        pool = load(
            options(tmp_path, cache=str(tmp_path / "two"), workers=2), report=lambda line: None
        )
        np.testing.assert_array_equal(pool.train.images, here.train.images)
        assert pool.fingerprint == here.fingerprint
        assert pool.skipped == 1

    def test_process_that_dies_is_a_user_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(150):
            paint(tmp_path / f"images/{number:03}.png", number)
        (tmp_path / "dies.py").touch()
        monkeypatch.setattr(decode, "_POOL_SECONDS", 0.0)
        monkeypatch.setattr(image_files, "__file__", str(tmp_path / "dies.py"))
        with pytest.raises(UserError, match=r"data\.workers=1"):
            load(options(tmp_path, workers=2))
        assert list((tmp_path / "cache").glob("*")) == []


class TestFolderCache:
    def test_decoded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        paint(tmp_path / "images/a.png", 7)
        first = load(options(tmp_path))
        monkeypatch.setattr(decode, "decode_batch", None)
        again = load(options(tmp_path))
        np.testing.assert_array_equal(first.train.images, again.train.images)
        assert first.fingerprint == again.fingerprint

    def test_large_caches_are_mapped_and_stay_untouched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paint(tmp_path / "images/a.png", 7)
        monkeypatch.setattr(cache, "MAP_BYTES", 0)
        data = load(options(tmp_path))
        assert isinstance(data.train.images, np.memmap)
        data.train.images[:] = 0  # writable, as torch wants it, but not on the disk
        assert colours(load(options(tmp_path))) == [7]

    def test_changed_folder_is_decoded_again(self, tmp_path: Path) -> None:
        paint(tmp_path / "images/a.png", 7)
        first = load(options(tmp_path))
        paint(tmp_path / "images/a.png", 8, size=(50, 50))
        second = load(options(tmp_path))
        assert colours(second) == [8]
        assert first.fingerprint != second.fingerprint
        assert load(options(tmp_path, image_size=9)).train.images.shape == (1, 9, 9, 3)

    def test_flipped_bit_is_mended(self, tmp_path: Path, lines: list[str]) -> None:
        paint(tmp_path / "images/a.png", 7)
        load(options(tmp_path))
        (path,) = (tmp_path / "cache").rglob("images.npy")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        assert colours(load(options(tmp_path), report=lines.append)) == [7]
        assert len(lines) == 1
        assert "changed" in lines[0]

    def test_unwritable_cache_says_what_to_type(self, tmp_path: Path) -> None:
        paint(tmp_path / "images/a.png")
        (tmp_path / "cache").write_text("a file where the folder should be")
        with pytest.raises(UserError, match=r"set data\.cache=DIR"):
            load(options(tmp_path))


class TestLabels:
    @pytest.fixture
    def classes(self, tmp_path: Path) -> Path:
        for name, colour in (("site 1/cat", 10), ("site 2/cat", 20), ("site 2/dog", 30)):
            for number in range(5):
                paint(tmp_path / f"images/{name}/{number}.png", colour + number)
        paint(tmp_path / "images/stray.png", 99)
        return tmp_path

    def test_held_out_images_are_labelled_and_never_trained_on(self, classes: Path) -> None:
        data = load(options(classes, labels="folders", test_fraction=0.4))
        assert data.test is not None
        assert data.train.labels is not None
        assert data.classes == ("cat", "dog")
        assert np.bincount(data.test.labels).tolist() == [4, 2]
        assert np.bincount(data.train.labels + 1).tolist() == [
            1,
            6,
            3,
        ]  # the stray one has no label
        held_out = set(data.test.images[:, 4, 4, 0].tolist())
        assert held_out.isdisjoint(colours(data))
        assert len(held_out) + len(data.train.images) == 16
        assert all(
            (colour >= 30) == label
            for colour, label in zip(colours(data)[:-1], data.train.labels, strict=False)
        )

    def test_held_out_images_do_not_depend_on_the_seed(self, classes: Path) -> None:
        first, second = (load(options(classes, labels="folders"), seed=seed) for seed in (0, 1))
        assert first.fingerprint == second.fingerprint

    def test_nothing_to_evaluate_on(self, classes: Path) -> None:
        assert load(options(classes, labels="folders", test_fraction=0.0)).test is None

    def test_table_labels_some_images(self, classes: Path) -> None:
        table = classes / "images/labels.csv"  # inside the folder: not an image, not counted either
        absolute = classes / "images/site 1/cat/1.png"
        table.write_text(
            f'path,label\nsite 1/cat/0.png,10\n"{absolute}",9\n./site 2/dog/0.png,10\nstray.png,\n'
        )
        data = load(options(classes, labels=str(table), test_fraction=0.5))
        assert data.classes == ("9", "10")
        assert data.skipped == 0
        assert data.test is not None
        assert data.test.labels is not None
        assert data.test.labels.tolist() == [1]
        assert data.train.labels is not None
        assert sorted(data.train.labels.tolist()) == [-1] * 13 + [0, 1]

    def test_test_folder_inside_the_root_is_not_trained_on(self, classes: Path) -> None:
        test_root = classes / "images/site 2"
        data = load(options(classes, labels="folders", test_root=str(test_root)))
        assert data.test is not None
        assert colours(data) == [10, 11, 12, 13, 14, 99]
        assert data.test.labels is not None
        assert data.test.labels.tolist() == [0] * 5 + [1] * 5
        assert data.group_names == (".", "site 1")

    def test_table_may_label_the_test_folder(self, classes: Path) -> None:
        paint(classes / "exam/x.png", 1)
        paint(classes / "exam/y.png", 2)
        (classes / "labels.csv").write_text("x.png,cat\nstray.png,dog\n")
        data = load(
            options(classes, labels=str(classes / "labels.csv"), test_root=str(classes / "exam"))
        )
        assert data.test is not None
        assert data.test.images[:, 0, 0, 0].tolist() == [1]
        assert len(data.train.images) == 16

    def test_the_order_of_classes_does_not_depend_on_the_hash_seed(self, tmp_path: Path) -> None:
        """All four are the same number; as strings a set has them in another order in each process."""
        for name in ("1", "01", "001", "0001", "2"):
            for number in range(2):
                paint(tmp_path / f"images/{name}/{number}.png")
        code = (
            "import sys; from fedx_pl.data.images import DataOptions; from fedx_pl.data.sources import load\n"
            "root, cache = sys.argv[1:]\n"
            "print(*load(DataOptions(name='folder', root=root, cache=cache, labels='folders')).classes)"
        )
        for seed in ("0", "1", "2"):
            found = subprocess.run(
                [sys.executable, "-c", code, str(tmp_path / "images"), str(tmp_path / "cache")],
                env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert found.stdout.split() == ["0001", "001", "01", "1", "2"]

    def test_two_labels_for_one_image_are_refused(self, classes: Path) -> None:
        table = classes / "labels.csv"
        table.write_text(
            "stray.png,cat\nsite 1/cat/0.png,dog\n./stray.png,cat\n"
        )  # the same twice is no harm
        assert load(options(classes, labels=str(table))).classes == ("cat", "dog")
        table.write_text(
            f"stray.png,cat\nsite 1/cat/0.png,dog\n{classes / 'images/stray.png'},dog\n"
        )
        with pytest.raises(
            UserError, match=r"labels\.csv: .*stray\.png has two labels, 'cat' and 'dog'"
        ):
            load(options(classes, labels=str(table)))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                "stray.png,1\nnone.png,2\nnada.png,3\n",
                "2 of its files do not exist.*first none.png",
            ),
            ("stray.png\n", "is not path,label"),
            ("", "no lines"),
            (None, "cannot read it"),
            (b"\xff\xfe\x00", "cannot read it"),
        ],
    )
    def test_bad_tables(self, classes: Path, content: str | bytes | None, message: str) -> None:
        table = classes / "labels.csv"
        if content is not None:
            table.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=message):
            load(options(classes, labels=str(table)))

    def test_missing_folders_and_images(self, classes: Path) -> None:
        (classes / "bare/deep").mkdir(parents=True)
        (classes / "text").mkdir()
        (classes / "text/a.txt").write_text("x")
        for changes, message in (
            ({"root": "nowhere"}, "there is no folder"),
            ({"root": str(classes / "bare")}, "no images in"),
            ({"root": str(classes / "text")}, "no readable images"),
            ({"test_root": "nowhere", "labels": "folders"}, "data.test_root: there is no folder"),
            ({"test_root": str(classes / "text")}, "data.test_root needs labels"),
            (
                {"test_root": str(classes / "text"), "labels": "folders"},
                "none of its images has a label",
            ),
            ({"test_fraction": 1.0}, "data.test_fraction"),
        ):
            with pytest.raises(UserError, match=message):
                load(options(classes, **changes), report=lambda line: None)


class TestImageNet:
    @pytest.fixture
    def imagenet(self, tmp_path: Path) -> Path:
        for number, name in enumerate(("n01", "n02", "n03")):
            for split, count in (("train", 3), ("val", 2)):
                for image in range(count):
                    paint(tmp_path / f"images/{split}/{name}/{image}.JPEG", (number * 40, 0, 0))
        return tmp_path

    def test_chosen_classes_in_the_order_given(self, imagenet: Path) -> None:
        data = load(options(imagenet, name="imagenet10", classes=["n03", "n01"]))
        assert data.test is not None
        assert data.test.labels is not None
        assert data.train.labels is not None
        assert data.classes == ("n03", "n01")
        assert data.train.labels.tolist() == [1, 1, 1, 0, 0, 0]
        assert data.test.labels.tolist() == [1, 1, 0, 0]
        assert data.train.images[0, 0, 0, 0] < 10
        assert data.train.images[-1, 0, 0, 0] > 70

    @pytest.mark.parametrize("name", ["folder", "imagenet10"])
    @pytest.mark.parametrize("grayscale", [False, True])
    def test_the_shape_of_images_is_known_without_loading_them(
        self, imagenet: Path, name: str, grayscale: bool
    ) -> None:
        chosen = options(imagenet, name=name, classes=["n01"], grayscale=grayscale)
        side = stored_side(chosen)
        assert load(chosen).train.images.shape[1:] == (side, side, stored_channels(chosen))

    def test_missing_pieces(self, imagenet: Path) -> None:
        for changes, message in (
            ({"classes": []}, r"data\.classes=\[n01,n02,n03\]"),
            ({"classes": ["n1"]}, "no folder n1 .*did you mean n01"),
            ({"classes": ["n01"], "root": str(imagenet)}, "sub-folders train and val"),
        ):
            with pytest.raises(UserError, match=message):
                load(options(imagenet, name="imagenet10", **changes))
