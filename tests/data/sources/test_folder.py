"""Folders of images: the user's own, and class folders of a local ImageNet."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from dataset_files import silent
from image_folders import grays, header_of_png, options, paint, paint_classes

from fedx_pl.cli import main as cli
from fedx_pl.config.compose import compose
from fedx_pl.data.sources import describe, load
from fedx_pl.errors import UserError


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A temporary folder of an unprivileged user.

    Root becomes that user for the test, since root may read everything.
    """
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        home = Path(tempfile.mkdtemp())
        yield home
    finally:
        if is_root:
            os.seteuid(0)
    shutil.rmtree(home)


class TestUnlabeled:
    def test_images_are_found_recursively_in_path_order(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        for color, name in enumerate(
            ["a.png", "site b/2.jpg", "site b/deep/er/3.bmp", "site c/no ending"]
        ):
            paint(tmp_path / "images" / f"{name}.png", color * 60)
            (tmp_path / "images" / f"{name}.png").rename(tmp_path / "images" / name)
        data = load(options(tmp_path), report=lines.append)
        assert data.train.images.shape == (4, 8, 8, 3)
        assert data.train.images.dtype == np.uint8
        assert grays(data) == [0, 60, 120, 180]
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
        (tmp_path / "images/huge.png").write_bytes(header_of_png(50_000, 50_000)[:33])
        (tmp_path / "images/empty.jpg").touch()
        (tmp_path / "images/.DS_Store").write_text("hidden files are not even counted")
        (tmp_path / "images/gone.png").symlink_to("nowhere")
        os.mkfifo(tmp_path / "images/pipe")
        for _ in range(2):  # decoded, and from the cache
            lines.clear()
            data = load(options(tmp_path), report=lines.append)
            assert grays(data) == [200]
            assert data.skipped == 6
            assert len(lines) == 1
            assert "skipped 6 of 7" in lines[0]
            for file, reason in (
                ("4 like .*cut.png", "no readable image"),
                ("gone.png", "No such file"),
                ("pipe", "not a file"),
            ):
                assert re.search(rf"{file} \([^()]*{reason}", lines[0]), lines[0]

    def test_link_loops_end(self, tmp_path: Path) -> None:
        paint(tmp_path / "images/sub/a.png")
        (tmp_path / "images/sub/loop").symlink_to(tmp_path / "images")
        (tmp_path / "images/self").symlink_to(tmp_path / "images/self")
        assert len(load(options(tmp_path), report=silent).train.images) == 1

    def test_an_unreadable_folder_is_named(self, lines: list[str]) -> None:
        with without_privileges() as home:
            paint(home / "images/site a/1.png", 10)
            paint(home / "images/site b/2.png", 20)
            (home / "images/site b").chmod(0)
            try:
                assert grays(load(options(home), report=lines.append)) == [10]
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


class TestLabels:
    @pytest.fixture
    def classes(self, tmp_path: Path) -> Path:
        for name, color in (("site 1/cat", 10), ("site 2/cat", 20), ("site 2/dog", 30)):
            for number in range(5):
                paint(tmp_path / f"images/{name}/{number}.png", color + number)
        paint(tmp_path / "images/stray.png", 99)
        return tmp_path

    def test_held_out_images_are_labeled_and_never_trained_on(self, classes: Path) -> None:
        data = load(options(classes, labels="folders", test_fraction=0.4))
        assert data.test is not None
        assert data.train.labels is not None
        assert data.classes == ("cat", "dog")
        assert np.bincount(data.test.labels).tolist() == [4, 2]
        # The stray one has no label
        assert np.bincount(data.train.labels + 1).tolist() == [
            1,
            6,
            3,
        ]
        held_out = set(data.test.images[:, 4, 4, 0].tolist())
        assert held_out.isdisjoint(grays(data))
        assert len(held_out) + len(data.train.images) == 16
        assert all(
            (color >= 30) == label
            for color, label in zip(grays(data)[:-1], data.train.labels, strict=False)
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
        assert grays(data) == [10, 11, 12, 13, 14, 99]
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
        """All four are the same number.

        As strings a set has them in another order in each process.
        """
        for name in ("1", "01", "001", "0001", "2"):
            for number in range(2):
                paint(tmp_path / f"images/{name}/{number}.png")
        expected = ["0001", "001", "01", "1", "2"]
        wanted = options(tmp_path, labels="folders")
        assert list(load(wanted, report=silent).classes) == expected
        code = (
            "import sys\nfrom fedx_pl.data.images import DataOptions\nfrom fedx_pl.data.sources "
            "import load\nroot, cache = sys.argv[1:]\noptions = DataOptions(\n    name='folder', "
            "root=root, cache=cache, labels='folders', image_size=8, "
            "workers=1)\nprint(*load(options, report=lambda line: None).classes)\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, wanted.root, wanted.cache],
            env={**os.environ, "PYTHONHASHSEED": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.split() == expected

    def test_two_labels_for_one_image_are_refused(self, classes: Path) -> None:
        table = classes / "labels.csv"
        # The same twice is no harm
        table.write_text("stray.png,cat\nsite 1/cat/0.png,dog\n./stray.png,cat\n")
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
                load(options(classes, **changes), report=silent)


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

    def test_missing_pieces(self, imagenet: Path) -> None:
        for changes, message in (
            ({"classes": []}, r"data\.classes=\[n01,n02,n03\]"),
            ({"classes": ["n1"]}, "no folder n1 .*did you mean n01"),
            ({"classes": ["n01"], "root": str(imagenet)}, "sub-folders train and val"),
        ):
            with pytest.raises(UserError, match=message):
                load(options(imagenet, name="imagenet10", **changes))


def test_classes_that_are_no_text_are_readable_and_stay_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paint_classes(tmp_path, classes=3)
    names = [b"caf\xe9", rb"caf\xe9", b"\x1b[31mred\n"]
    for label, name in enumerate(names):
        os.rename(
            tmp_path / "images" / f"class{label}",
            os.path.join(os.fsencode(tmp_path / "images"), name),
        )
    data = load(options(tmp_path, labels="folders"), report=silent)
    assert set(data.classes) == {r"caf\xe9", r"caf\\xe9", r"\x1b[31mred\x0a"}
    assert set(data.group_names) == set(data.classes)
    assert data.train.labels is not None
    assert np.bincount(data.train.labels).tolist() == [2, 2, 2]
    words = [
        f"data.root={tmp_path / 'images'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.labels=folders",
    ]
    assert cli.main(["data", "folder", *words]) == 0
    shown = capsys.readouterr().out
    assert r"caf\xe9 2" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("command", "what"), [("data", "decoding images"), ("train", "training on 128 images")]
)
def test_images_beyond_the_memory_are_refused_with_their_size(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    what: str,
) -> None:
    """One image takes 12 GB, and the machine has 8 GB."""
    paint_classes(tmp_path)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2_000_000}
    monkeypatch.setattr("os.sysconf", lambda name: pages[name])
    words = [
        f"data.root={tmp_path / 'images'}",
        f"data.cache={tmp_path / 'cache'}",
        "data.image_size=65000",
    ]
    first = (
        ["data", "folder"]
        if command == "data"
        else ["train", "data=folder", "profile=paper", "--yes"]
    )
    assert cli.main([*first, *words, f"run.dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert f"data.image_size=65000: {what}" in error
    assert re.search(r"would take [0-9.]+ [GT]B of memory, and [0-9.]+ GB are there", error)
    assert not list((tmp_path / "cache").glob("folder-[0-9a-f]*"))
