"""Caches, images and names that are damaged, forged, or somebody else's."""

import json
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from dataset_files import cifar_members, write_tar
from PIL import Image

from fedx_pl.cli import main as cli
from fedx_pl.data.images import DataOptions, ImageData
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.data.partition import IID
from fedx_pl.data.sources import load
from fedx_pl.errors import UserError
from fedx_pl.files import clear_unfinished


def silent(line: object) -> None:
    """Takes lines that nobody reads."""


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def named(root: Path, **changes: object) -> DataOptions:
    settings: dict[str, object] = {
        "name": "cifar10",
        "root": str(root),
        "verify": False,
        "download": False,
    }
    return DataOptions(**settings | changes)  # type: ignore[arg-type]


def own(folder: Path, **changes: object) -> DataOptions:
    """Images in ``folder/images``, cached in ``folder/cache``."""
    settings: dict[str, object] = {
        "name": "folder", "root": str(folder / "images"), "cache": str(folder / "cache"), "image_size": 4,
        "labels": "folders", "workers": 1,
    }  # fmt: skip
    return DataOptions(**settings | changes)  # type: ignore[arg-type]


def paint(folder: Path, classes: int = 2, images: int = 3) -> None:
    """Images of different gray levels, some of each class."""
    for label in range(classes):
        for number in range(images):
            path = folder / "images" / f"class{label}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (6, 5), 40 * label + 9 * number).save(path)


def header_of_png(width: int, height: int) -> bytes:
    """A PNG that claims a size; its pixels are missing."""
    parts = [
        b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0),
        b"IDAT" + zlib.compress(bytes(9)),
    ]
    chunks = [
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
        for part in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


class TestWhatIsNotACache:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "data"
        (root / "cifar10").mkdir(parents=True)
        write_tar(root / "cifar10" / "cifar-10-python.tar.gz", cifar_members())
        (root / "cifar10" / "notes.txt").write_text("my own")
        return root

    @pytest.mark.parametrize("place", [".", "cifar10", ".."])
    def test_root_and_cache_are_different_folders(self, root: Path, place: str) -> None:
        """With ``..`` the cache's folder of this set would be the root."""
        wanted = named(root, cache=str(root / place))
        if place == "..":
            root = root.rename(root.with_name("cifar10"))
            wanted = named(root, cache=str(root.parent))
        before = snapshot(root)
        with pytest.raises(
            UserError, match=r"data\.cache=.* is where data\.root=.* type data\.cache=ANOTHER"
        ):
            load(wanted, report=silent)
        assert snapshot(root) == before

    def test_arrays_and_a_list_of_the_user_are_no_cache(self, root: Path, tmp_path: Path) -> None:
        own = tmp_path / "cache" / "cifar10"
        own.mkdir(parents=True)
        (own / "manifest.json").write_text('{"info": "my own measurements", "owner": "me"}')
        np.save(own / "mine.npy", np.arange(3))
        before = snapshot(own)
        load(named(root, cache=str(tmp_path / "cache")), report=silent)
        assert snapshot(own) == before

    def test_a_folder_of_the_user_is_left_as_it_is(self, root: Path, tmp_path: Path) -> None:
        lines: list[str] = []
        mine = tmp_path / "elsewhere" / "cifar10"
        mine.mkdir(parents=True)
        for name in ("manifest.json", "notes.txt"):
            (mine / name).write_text('{"arrays": {}, "info": {}}')
        before = snapshot(mine)
        data = load(named(root, cache=str(mine.parent)), report=lines.append)
        assert len(data.train.images) == 20
        assert snapshot(mine) == before
        assert any("not cached" in line and "something else than a cache" in line for line in lines)

    def test_a_damaged_cache_is_replaced(self, root: Path) -> None:
        load(named(root), report=silent)
        file = root / "cache" / "cifar10" / "manifest.json"
        file.write_bytes(file.read_bytes()[:-9])
        assert load(named(root), report=silent).source.startswith("files")
        assert load(named(root), report=silent).source.startswith("cache")

    def test_only_names_of_ours_are_swept(self, root: Path) -> None:
        """What a killed writer left goes after a day; a backup whose name begins alike stays."""
        kept, left = (
            root / "cache" / ".cifar10-mybackup",
            root / "cache" / f".fedx-pl-cifar10-{'0a' * 16}",
        )
        for folder in (kept, left, left.with_name(f"{left.name}-old")):
            folder.mkdir(parents=True)
            os.utime(folder, times=(time.time() - 1e6,) * 2)
        load(named(root), report=silent)
        assert {path.name for path in (root / "cache").iterdir()} == {
            ".cifar10-mybackup",
            "cifar10",
        }

    def test_a_cache_inside_of_the_images_is_no_image(self, tmp_path: Path) -> None:
        paint(tmp_path)
        wanted = own(tmp_path, cache=str(tmp_path / "images" / "cache"))
        for _ in range(2):
            assert load(wanted, report=silent).skipped == 0
        assert (
            len(list((tmp_path / "images" / "cache").iterdir())) == 3
        )  # the range, and two splits


def test_hidden_files_of_a_run_folder_are_kept(tmp_path: Path) -> None:
    for name in (".notes.tmp", ".mine.12.tmp", ".state.json.12.fedx-pl.tmp"):
        (tmp_path / name).write_text("?")
    (tmp_path / "checkpoints" / ".round_00001.fedx-pl.tmp").mkdir(parents=True)
    clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        ".mine.12.tmp",
        ".notes.tmp",
        "checkpoints",
    ]


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
    alike = all((a is None and b is None) or np.array_equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    return alike and first.fingerprint == second.fingerprint and first.classes == second.classes


class TestFlippedBits:
    @pytest.mark.parametrize("flips", [12, pytest.param(400, marks=pytest.mark.slow)])
    def test_every_part_of_a_folder_s_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: int
    ) -> None:
        """Bits all over each file, header and manifest too: the images are decoded again, or nothing has changed."""
        monkeypatch.setattr(os, "fsync", silent)  # no power is lost here, and disks take their time
        paint(tmp_path)
        data = FederatedDataModule(own(tmp_path), partition=IID(clients=2), report=silent)
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
                    own(tmp_path), partition=IID(clients=2), report=lines.append
                )
                again.setup()
                assert same(data.images, again.images), (file, place)
                noticed += bool(lines)
                file.write_bytes(content)
        assert noticed > len(files) * flips / 2

    def test_the_command_line_mends_a_manifest(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A path in it decides the class of an image."""
        paint(tmp_path)
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
        paint(tmp_path)
        first = load(own(tmp_path), report=silent)
        for file in (tmp_path / "cache").rglob("manifest.json"):
            manifest = json.loads(file.read_text())
            del manifest["sha256"]
            file.write_text(json.dumps(manifest))
        lines: list[str] = []
        assert same(first, load(own(tmp_path), report=lines.append))
        assert len(lines) == 3
        assert all("older version" in line for line in lines)


class TestNames:
    @pytest.mark.parametrize("key", ["root", "cache", "test_root", "labels"])
    @pytest.mark.parametrize(
        ("path", "told"), [("a\0b", "NUL"), ("caf\udce9", r"caf\\xe9 is not UTF-8; rename it")]
    )
    def test_paths_that_cannot_be_are_named(
        self, tmp_path: Path, key: str, path: str, told: str
    ) -> None:
        with pytest.raises(UserError, match=rf"data\.{key}=.*{told}"):
            load(own(tmp_path, **{key: path}), report=silent)

    def test_classes_that_are_no_text_are_readable_and_stay_different(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        paint(tmp_path, classes=3)
        names = [b"caf\xe9", rb"caf\xe9", b"\x1b[31mred\n"]
        for label, name in enumerate(names):
            os.rename(
                tmp_path / "images" / f"class{label}",
                os.path.join(os.fsencode(tmp_path / "images"), name),
            )
        data = load(own(tmp_path), report=silent)
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


class TestImages:
    def test_a_side_that_no_image_has_is_refused_by_the_header(self, tmp_path: Path) -> None:
        """Few enough pixels, but a pointer for each of 80 million rows."""
        paint(tmp_path)
        for name, size in (("tall", (1, 80_000_000)), ("wide", (80_000_000, 1))):
            (tmp_path / "images" / "class0" / f"{name}.png").write_bytes(header_of_png(*size))
        lines: list[str] = []
        data = load(own(tmp_path, labels="none"), report=lines.append)
        assert len(data.train.images) == 6
        assert data.skipped == 2
        assert "1 x 80000000 pixels are too many" in lines[0]

    @pytest.mark.parametrize("verify", [True, False])
    def test_pipes_and_devices_are_no_archives(self, tmp_path: Path, verify: bool) -> None:
        os.mkfifo(tmp_path / "cifar-10-python.tar.gz")
        (tmp_path / "cifar-10-binary.tar.gz").symlink_to("/dev/zero")
        (tmp_path / "cifar-100-python").mkdir()
        for name in ("train", "test", "meta"):
            os.mkfifo(tmp_path / "cifar-100-python" / name)
        lines: list[str] = []
        for name in ("cifar10", "cifar100"):
            with pytest.raises(UserError, match="no source had it"):
                load(named(tmp_path, name=name, verify=verify), report=lines.append)
        assert "cifar-10-python.tar.gz: not a file; cifar-10-binary.tar.gz: not a file" in "".join(
            lines
        )

    @pytest.mark.parametrize("kind", ["pipe", "device"])
    def test_pipes_and_devices_are_no_table_and_no_cache(self, tmp_path: Path, kind: str) -> None:
        paint(tmp_path)
        make = os.mkfifo if kind == "pipe" else lambda path: Path(path).symlink_to("/dev/zero")
        make(tmp_path / "labels.csv")
        with pytest.raises(UserError, match=r"data\.labels=.*labels\.csv is not a file"):
            load(own(tmp_path, labels=str(tmp_path / "labels.csv")), report=silent)
        load(own(tmp_path, labels="none"), report=silent)
        (images,) = (tmp_path / "cache").rglob("images.npy")
        images.unlink()
        make(images)
        lines: list[str] = []
        assert len(load(own(tmp_path, labels="none"), report=lines.append).train.images) == 6
        assert "images.npy is not a file" in lines[0]

    def test_a_header_that_claims_terabytes(self, tmp_path: Path) -> None:
        paint(tmp_path)
        load(own(tmp_path, labels="none"), report=silent)
        (images,) = (tmp_path / "cache").rglob("images.npy")
        content = images.read_bytes()
        before, after = b"(6, 4, 4, 3), }" + 11 * b" ", b"(6" + 11 * b"0" + b", 4, 4, 3), }"
        assert before in content
        images.write_bytes(content.replace(before, after, 1))
        lines: list[str] = []
        assert len(load(own(tmp_path, labels="none"), report=lines.append).train.images) == 6
        assert "images.npy has changed" in lines[0]

    @pytest.mark.parametrize(
        ("command", "what"), [("data", "decoding images"), ("train", "training on 128 images")]
    )
    def test_images_beyond_the_memory_are_refused_with_their_size(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        command: str,
        what: str,
    ) -> None:
        """One of them takes 12 GB, and the machine has 8."""
        paint(tmp_path)
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
        assert "GB of memory, and" in error
        assert not list((tmp_path / "cache").glob("folder-[0-9a-f]*"))
