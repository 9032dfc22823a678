"""The cache of decoded arrays: complete or absent, verified on every load, nobody else's files."""

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from dataset_files import options as named_options
from dataset_files import silent, write_cifar10
from image_folders import options, paint_classes

from fedx_pl.cli import main as cli
from fedx_pl.data.images import DataOptions, ImageData
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.data.partition import IID
from fedx_pl.data.sources import cache, load
from fedx_pl.errors import UserError


def labeled(folder: Path, **changes: object) -> DataOptions:
    return options(folder, **{"labels": "folders", "image_size": 4} | changes)


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestWhatIsNotACache:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "data"
        (root / "cifar10").mkdir(parents=True)
        write_cifar10(root / "cifar10")
        (root / "cifar10" / "notes.txt").write_text("my own")
        return root

    @pytest.mark.parametrize("place", [".", "cifar10", ".."])
    def test_root_and_cache_are_different_folders(self, root: Path, place: str) -> None:
        """With ``..`` the cache's folder of this set would be the root."""
        wanted = named_options(root, cache=str(root / place))
        if place == "..":
            root = root.rename(root.with_name("cifar10"))
            wanted = named_options(root, cache=str(root.parent))
        before = snapshot(root)
        with pytest.raises(
            UserError, match=r"data\.cache=.* is where data\.root=.* type data\.cache=ANOTHER"
        ):
            load(wanted, report=silent)
        assert snapshot(root) == before

    def test_arrays_and_a_list_of_the_user_are_no_cache(self, root: Path, tmp_path: Path) -> None:
        mine = tmp_path / "cache" / "cifar10"
        mine.mkdir(parents=True)
        (mine / "manifest.json").write_text('{"info": "my own measurements", "owner": "me"}')
        np.save(mine / "mine.npy", np.arange(3))
        before = snapshot(mine)
        load(named_options(root, cache=str(tmp_path / "cache")), report=silent)
        assert snapshot(mine) == before

    def test_a_folder_of_the_user_is_left_as_it_is(self, root: Path, tmp_path: Path) -> None:
        lines: list[str] = []
        mine = tmp_path / "elsewhere" / "cifar10"
        mine.mkdir(parents=True)
        for name in ("manifest.json", "notes.txt"):
            (mine / name).write_text('{"arrays": {}, "info": {}}')
        before = snapshot(mine)
        data = load(named_options(root, cache=str(mine.parent)), report=lines.append)
        assert len(data.train.images) == 20
        assert snapshot(mine) == before
        assert any("not cached" in line and "something else than a cache" in line for line in lines)

    def test_a_damaged_cache_is_replaced(self, root: Path) -> None:
        load(named_options(root), report=silent)
        file = root / "cache" / "cifar10" / "manifest.json"
        file.write_bytes(file.read_bytes()[:-9])
        assert load(named_options(root), report=silent).source.startswith("files")
        assert load(named_options(root), report=silent).source.startswith("cache")

    def test_only_names_of_ours_are_swept(self, root: Path) -> None:
        """Files of a killed writer are deleted after a day; a backup with a similar name stays."""
        backup = root / "cache" / ".cifar10-mybackup"
        unfinished = root / "cache" / f".fedx-pl-cifar10-{'0a' * 16}"
        for folder in (backup, unfinished, unfinished.with_name(f"{unfinished.name}-old")):
            folder.mkdir(parents=True)
            os.utime(folder, times=(time.time() - 1e6,) * 2)
        load(named_options(root), report=silent)
        assert {path.name for path in (root / "cache").iterdir()} == {
            ".cifar10-mybackup",
            "cifar10",
        }

    def test_a_cache_inside_of_the_images_is_no_image(self, tmp_path: Path) -> None:
        paint_classes(tmp_path)
        wanted = labeled(tmp_path, cache=str(tmp_path / "images" / "cache"))
        for _ in range(2):
            assert load(wanted, report=silent).skipped == 0
        # The range, and two splits
        assert len(list((tmp_path / "images" / "cache").iterdir())) == 3


def test_a_received_run_does_not_choose_the_cache(tiny: list[str], tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    fewer = [
        "federation.clients=2",
        "federation.rounds=1",
        "data.limit=80",
        "evaluation.linear.epochs=1",
    ]
    assert cli.main(["train", *tiny, *fewer, f"run.dir={run}"]) == 0
    text = (run / "config.yaml").read_text()
    assert "cache: ''" in text
    (run / "config.yaml").write_text(text.replace("cache: ''", f"cache: {victim}"))
    assert cli.main(["evaluate", str(run), "knn"]) == 0
    assert not victim.exists()


def content_of(data: ImageData) -> list[np.ndarray | None]:
    splits = [data.train] + ([data.test] if data.test else [])
    return [array for split in splits for array in (split.images, split.labels, split.groups)]


def same(first: ImageData, second: ImageData) -> bool:
    pairs = zip(content_of(first), content_of(second), strict=True)
    alike = all(a is b is None or np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    return alike and first.fingerprint == second.fingerprint and first.classes == second.classes


class TestFlippedBits:
    @pytest.mark.parametrize("flips", [12, pytest.param(400, marks=pytest.mark.slow)])
    def test_every_part_of_a_folder_s_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: int
    ) -> None:
        """Flips bits in all parts of each file, header and manifest included.

        The images are decoded again, or nothing has changed.
        """
        monkeypatch.setattr(os, "fsync", silent)  # no power is lost here, and disks take their time
        paint_classes(tmp_path)
        data = FederatedDataModule(labeled(tmp_path), partition=IID(clients=2), report=silent)
        data.setup()
        rng = np.random.default_rng(0)
        noticed = 0
        files = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
        assert {file.name for file in files} == {"manifest.json", "images.npy"}
        for file in files:
            content = file.read_bytes()
            for place in np.linspace(0, len(content) - 1, flips).astype(int):
                damaged = bytearray(content)
                damaged[place] ^= 1 << int(rng.integers(8))
                file.write_bytes(damaged)
                lines: list[str] = []
                again = FederatedDataModule(
                    labeled(tmp_path), partition=IID(clients=2), report=lines.append
                )
                again.setup()
                assert same(data.images, again.images), (file, place)
                noticed += bool(lines)
                file.write_bytes(content)
        assert noticed > len(files) * flips / 2

    def test_the_command_line_repairs_a_manifest(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A path in it decides the class of an image."""
        paint_classes(tmp_path)
        words = [
            f"data.root={tmp_path / 'images'}",
            f"data.cache={tmp_path / 'cache'}",
            "data.labels=folders",
        ]
        command = ["data", "folder", *words, "data.image_size=4"]
        assert cli.main(command) == 0
        first = capsys.readouterr().out
        for file in (tmp_path / "cache").rglob("manifest.json"):
            file.write_text(file.read_text().replace("class0/", "class1/"))
        assert cli.main(command) == 0
        second = capsys.readouterr().out
        assert "manifest.json has changed since it was written" in second
        assert second.endswith(first)

    def test_a_manifest_without_checksum_is_of_an_older_version(self, tmp_path: Path) -> None:
        paint_classes(tmp_path)
        first = load(labeled(tmp_path), report=silent)
        for file in (tmp_path / "cache").rglob("manifest.json"):
            manifest = json.loads(file.read_text())
            del manifest["sha256"]
            file.write_text(json.dumps(manifest))
        lines: list[str] = []
        assert same(first, load(labeled(tmp_path), report=lines.append))
        assert len(lines) == 3
        assert all("older version" in line for line in lines)


class TestDamage:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write_cifar10(tmp_path)
        load(named_options(tmp_path), report=silent)
        return tmp_path

    @pytest.mark.parametrize("name", ["train_images", "test_labels"])
    def test_flipped_bit_is_detected_and_repaired(
        self, root: Path, lines: list[str], name: str
    ) -> None:
        path = root / f"cache/cifar10/{name}.npy"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert load(named_options(root), report=lines.append).source.startswith("files")
        assert len(lines) == 2
        assert "changed" in lines[0]
        assert "complete" in lines[1]
        assert load(named_options(root)).source.startswith("cache")

    @pytest.mark.parametrize("victim", ["manifest.json", "train_images.npy"])
    @pytest.mark.parametrize("content", [None, b"", b"{}"])
    def test_incomplete_cache_is_not_used(
        self, root: Path, victim: str, content: bytes | None
    ) -> None:
        path = root / "cache/cifar10" / victim
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert load(named_options(root), report=silent).source.startswith("files")

    def test_writer_that_dies_leaves_no_cache(self, tmp_path: Path) -> None:
        def write_and_die() -> None:
            with cache.replacing(tmp_path / "cache/x") as fresh:
                (fresh / "manifest.json").write_text("{}")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_and_die()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_full_disk_names_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        write_cifar10(tmp_path)
        monkeypatch.setattr(cache.ArrayWriter, "append", full)
        with pytest.raises(UserError, match=f"disk is full.*{tmp_path / 'cache'}"):
            load(named_options(tmp_path), report=silent)
        assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_no_table_and_no_cache(tmp_path: Path, kind: str) -> None:
    paint_classes(tmp_path)
    make = os.mkfifo if kind == "pipe" else lambda path: Path(path).symlink_to("/dev/zero")
    make(tmp_path / "labels.csv")
    with pytest.raises(UserError, match=r"data\.labels=.*labels\.csv is not a file"):
        load(labeled(tmp_path, labels=str(tmp_path / "labels.csv")), report=silent)
    load(labeled(tmp_path, labels="none"), report=silent)
    (images,) = (tmp_path / "cache").rglob("images.npy")
    images.unlink()
    make(images)
    lines: list[str] = []
    assert len(load(labeled(tmp_path, labels="none"), report=lines.append).train.images) == 6
    assert "images.npy is not a file" in lines[0]


def test_a_header_that_claims_terabytes(tmp_path: Path) -> None:
    paint_classes(tmp_path)
    load(labeled(tmp_path, labels="none"), report=silent)
    (images,) = (tmp_path / "cache").rglob("images.npy")
    content = images.read_bytes()
    before, after = b"(6, 4, 4, 3), }" + 11 * b" ", b"(6" + 11 * b"0" + b", 4, 4, 3), }"
    assert before in content
    images.write_bytes(content.replace(before, after, 1))
    lines: list[str] = []
    assert len(load(labeled(tmp_path, labels="none"), report=lines.append).train.images) == 6
    assert "images.npy has changed" in lines[0]
