"""A machine without a network, for tests that must not reach anybody."""

import sys
import textwrap
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10, CIFAR100, SVHN, FashionMNIST

from fedx_pl.data.sources import fetch

CLOSED = "http://127.0.0.1:1/"  # nothing listens on port 1: refused at once


def close(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the addresses of all data sets unreachable and hides all package clients."""
    monkeypatch.setattr(fetch, "PROBE_SECONDS", 300.0)  # a loopback server may take its time
    monkeypatch.setattr(CIFAR10, "url", CLOSED + CIFAR10.filename)
    monkeypatch.setattr(CIFAR100, "url", CLOSED + CIFAR100.filename)
    split_list = {name: [CLOSED + part[1], *part[1:]] for name, part in SVHN.split_list.items()}
    monkeypatch.setattr(SVHN, "split_list", split_list)
    monkeypatch.setattr(FashionMNIST, "mirrors", [CLOSED])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def install(folder: Path, name: str, code: str) -> None:
    """Puts a stand-in for a program into ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}\n")
    (folder / name).chmod(0o755)
