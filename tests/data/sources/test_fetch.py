"""Downloads over a network that is closed, silent or slow; all traffic stays on the loopback."""

import hashlib
import http.server
import re
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from dataset_files import make_official, options, python_members, silent, write_tar
from torchvision.datasets import CIFAR10

from fedx_pl.data.sources import fetch, load
from fedx_pl.errors import UserError

pytestmark = pytest.mark.usefixtures("closed")


def test_a_silent_server_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(fetch, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.getsockname()[1]}/x")
        with pytest.raises(UserError):
            load(options(tmp_path, download=True), report=lines.append)
    assert any(re.search("no answer within 0.3 s|timed out", line) for line in lines)


def test_a_name_server_that_hangs_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    over = threading.Event()
    monkeypatch.setattr(fetch, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(600))
    monkeypatch.setattr(CIFAR10, "url", "http://images.invalid/x")
    try:
        with pytest.raises(UserError):
            load(options(tmp_path, download=True), report=lines.append)
    finally:
        over.set()
    assert any("no answer within 0.3 s" in line for line in lines)


def test_download_false_sends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(UserError, match=r"data\.download=true"):
        load(options(tmp_path), report=silent)


@pytest.mark.parametrize("intact", [True, False])
def test_torchvision_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], intact: bool
) -> None:
    make_official(monkeypatch, CIFAR10, python_members())
    write_tar(tmp_path / "server/cifar-10-python.tar.gz", python_members())
    content = (tmp_path / "server/cifar-10-python.tar.gz").read_bytes()
    md5 = hashlib.md5(content if intact else b"other").hexdigest()
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "server"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz"
        monkeypatch.setattr(CIFAR10, "url", address)
        try:
            if intact:
                data = load(options(tmp_path / "root", download=True), report=lines.append)
                assert data.source == "torchvision download, not verified"
                assert len(data.train.images) == 20
            else:
                with pytest.raises(UserError):
                    load(options(tmp_path / "root", download=True), report=lines.append)
                assert any("corrupted" in line for line in lines)
        finally:
            server.shutdown()
    assert (tmp_path / "root/cifar10/cifar-10-python.tar.gz").exists() == intact
    assert socket.getdefaulttimeout() is None
