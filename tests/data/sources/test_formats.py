"""CIFAR-10's binary batches, packed and unpacked; broken and hostile archives."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from dataset_files import binary_members, cifar_expected, write_cifar10, write_tar

from fedx_pl.data.sources import formats
from fedx_pl.data.sources.formats import FormatError

NAMES = list(binary_members())


def test_binary_batches_become_images_and_labels():
    train_images, train_labels, test_images, test_labels = cifar_expected()
    images, labels = formats.cifar_binary(binary_members(), NAMES[:-1])
    np.testing.assert_array_equal(images, train_images)
    np.testing.assert_array_equal(labels, train_labels)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert labels.dtype == np.int64
    images, labels = formats.cifar_binary(binary_members(), NAMES[-1:])
    np.testing.assert_array_equal(images, test_images)
    np.testing.assert_array_equal(labels, test_labels)


def test_binary_batches_must_be_whole_and_complete():
    members = binary_members()
    with pytest.raises(FormatError, match=r"data_batch_2\.bin is missing"):
        formats.cifar_binary({NAMES[0]: members[NAMES[0]]}, NAMES)
    with pytest.raises(FormatError, match=r"12291 bytes are not a whole number of 3073-byte"):
        formats.cifar_binary(members | {NAMES[0]: members[NAMES[0]][:-1]}, NAMES)
    with pytest.raises(FormatError, match="0 bytes"):
        formats.cifar_binary(members | {NAMES[0]: b""}, NAMES)


def test_archives_and_folders_hold_the_same(tmp_path: Path):
    archive = write_cifar10(tmp_path)
    for name, content in binary_members().items():
        (tmp_path / name).write_bytes(content)
    from_archive = formats.read_tar(archive, [*NAMES, "absent"])
    assert from_archive == formats.read_files(tmp_path, [*NAMES, "absent"]) == binary_members()


def test_archive_members_cannot_leave_the_archive(tmp_path: Path):
    members = {f"../../../{name}": content for name, content in binary_members().items()}
    write_tar(tmp_path / "deep/er/archive.tar.gz", members)
    assert formats.read_tar(tmp_path / "deep/er/archive.tar.gz", NAMES) == binary_members()
    assert not list(tmp_path.rglob("data_batch_1*"))


def test_broken_archives_are_refused_in_one_line(tmp_path: Path):
    archive = write_cifar10(tmp_path)
    content = archive.read_bytes()
    for broken in (content[: len(content) // 2], b"not an archive", b""):
        archive.write_bytes(broken)
        with pytest.raises(FormatError, match=r"^cifar-10-binary\.tar\.gz: .*$") as caught:
            formats.read_tar(archive, NAMES)
        assert "\n" not in str(caught.value)


def test_members_that_are_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "MAX_MEMBER_BYTES", 1000)
    with pytest.raises(FormatError, match="too large"):
        formats.read_tar(write_cifar10(tmp_path), NAMES)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10_000)))
    assert len(formats.read_unzipped(tmp_path / "bomb.gz")) == 1000


def test_gzipped_files_are_unpacked_and_others_read(tmp_path: Path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"content"))
    (tmp_path / "b").write_bytes(b"content")
    assert formats.read_unzipped(tmp_path / "a.gz") == b"content"
    assert formats.read_unzipped(tmp_path / "b") == b"content"
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"content")[:-9])
    with pytest.raises(FormatError, match=r"a\.gz: "):
        formats.read_unzipped(tmp_path / "a.gz")
