"""Mistakes in ``fedx-pl federate``: exit code 2, and what to type instead."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import federation_parts as parts
import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from fedx_pl.cli import sites as commands
from fedx_pl.cli.main import main
from fedx_pl.data import sources
from fedx_pl.errors import UserError
from fedx_pl.files import lock
from fedx_pl.sites import keys


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with keys for two sites, and images."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "FLWR_HOME",
        "FLWR_TELEMETRY_ENABLED",
        "FLWR_DISABLE_UPDATE_CHECK",
        "NO_PROXY",
        "no_proxy",
    ):
        monkeypatch.setenv(name, "")  # Put back afterwards: the commands set them.
    keys.make(tmp_path / "keys", "localhost", 8000, ["a", "b"])
    parts.make_images(tmp_path / "images", {"a": 3})
    return tmp_path


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["federate", *words]) == 2
    return capsys.readouterr().err


def test_mistakes_of_a_coordinator_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["server", *parts.WORDS]
    assert "type --clients 2, or fedx-pl federate keys" in mistake(capsys, *words, "--clients", "3")
    assert "federation.clients=0 is not possible" in mistake(capsys, *words, "--clients", "0")
    assert "type --clients N" in mistake(capsys, *words, "--clients", "2", "federation.clients=2")
    for option in ("--port=0", "--port=99999", "--timeout=0", "--timeout=nan", "--wait=-1"):
        error = mistake(capsys, *words, "--clients", "2", option)
        assert error.startswith(f"error: {option}")
        assert "is not possible; type " in error
    assert "engine=ray is for fedx-pl train" in mistake(
        capsys, *words, "--clients", "2", "engine=ray"
    )
    assert "fedca=true needs" in mistake(capsys, *words, "--clients", "2", "fedca=true")
    insecure = mistake(capsys, *words, "--clients", "2", "--insecure", "--host", "0.0.0.0")
    assert "without TLS only on this machine; type --host 127.0.0.1" in insecure
    assert not (place / "runs").exists() or not list((place / "runs").glob("**/superlink.log"))


@pytest.mark.usefixtures("place")
def test_a_coordinator_does_not_say_how_long_a_cpu_trains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sites train, and they may have GPUs."""
    assert main(["federate", "server", *parts.WORDS, "--clients", "3"]) == 2
    out = capsys.readouterr().out
    assert "3 clients" in out
    assert "GPU" not in out


@pytest.mark.usefixtures("place")
def test_a_coordinator_says_how_far_it_trusts_its_sites(capsys: pytest.CaptureFixture[str]) -> None:
    """Clipping is the default; an override wins."""
    assert main(["federate", "server", *parts.WORDS, "--clients", "3"]) == 2
    out = capsys.readouterr().out
    assert "aggregate=clip: updates are clipped to the usual length\n" in out
    assert "aggregate.max_share=0.5: no site counts for more than 50% of a round's images\n" in out
    assert max(map(len, out.splitlines())) <= 80
    words = ["aggregate=mean", "aggregate.max_share=0.9", "--clients", "3"]
    assert main(["federate", "server", *parts.WORDS, *words]) == 2
    out = capsys.readouterr().out
    assert "aggregate=mean: a site that lies may ruin the model\n" in out
    assert "aggregate.max_share=0.9: no site" in out


def test_a_new_run_does_not_wait_for_a_site_whose_key_was_revoked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected: list[int] = []

    def choose(engine: commands.FlowerEngine, *_: Any, **__: Any) -> None:
        expected.append(engine.expected)
        raise UserError("enough")

    nobody = SimpleNamespace(sites=lambda: [], close=lambda: None)
    monkeypatch.setattr(commands, "Link", lambda *_, **__: nobody)
    monkeypatch.setattr(commands.FlowerEngine, "choose", choose)
    keys.revoke(place / "keys", ["b"])
    words = ["server", *parts.WORDS, "--clients", "2", f"run.dir={place / 'run'}"]
    assert "enough" in mistake(capsys, *words)
    assert expected == [1]


@pytest.mark.usefixtures("place")
def test_a_coordinator_names_a_wrong_backbone_before_it_loads_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "load", lambda *_, **__: pytest.fail("data were loaded"))
    words = ["server", "data=cifar10", "backbone.name=vit_tiny", "--clients", "2"]
    assert "backbone.name=vit_tiny is not known" in mistake(capsys, *words)


def test_missing_keys_of_a_coordinator_are_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before anything is loaded or made."""
    (place / "keys").rename(place / "elsewhere")
    error = mistake(capsys, "server", *parts.WORDS, "--clients", "2")
    assert "keys/server/ca.crt is missing; type fedx-pl federate keys" in error
    assert not (place / "runs").exists()


@pytest.mark.usefixtures("place")
def test_mistakes_of_a_site_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["client", "--data", "images/a", "--keys", "keys/sites/a"]
    assert "optim.lr=1 is the coordinator's to set" in mistake(capsys, *words, "optim.lr=1")
    assert "--data nowhere is not a folder" in mistake(
        capsys, "client", "--data", "nowhere", "--keys", "keys/sites/a"
    )
    assert "does not hold a site's keys" in mistake(
        capsys, "client", "--data", "images/a", "--keys", "keys/server"
    )
    assert "does not hold a site's keys" in mistake(
        capsys, "client", "--data", "images/a"
    )  # No key at all.
    for address in (
        "host",
        "host:",
        ":8000",
        "host:x",
        "host:0",
        "host:99999",
        "https://host:8000",
        "host:²",
        "host:٨٠",
        f"host:{'9' * 5000}",
        "::1:8000",
        "a b:80",
    ):
        assert "type HOST:PORT" in mistake(capsys, *words, "--server", address)
    insecure = mistake(
        capsys, "client", "--data", "images/a", "--insecure", "--server", "example.org:8000"
    )
    assert "without TLS only within one machine" in insecure


def test_a_site_runs_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "fedx-site-a").mkdir()
    with lock(place / "fedx-site-a"):
        error = mistake(capsys, "client", "--data", "images/a", "--keys", "keys/sites/a")
    assert "this site runs already: another process uses --state fedx-site-a" in error


def test_the_coordinator_s_address_has_no_control_characters(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The address comes from the coordinator, with the keys."""
    about = {"name": "a", "server": "host\x1b[2J:8000"}
    (place / "keys" / "sites" / "a" / "site.json").write_text(json.dumps(about))
    error = mistake(capsys, "client", "--data", "images/a", "--keys", "keys/sites/a")
    assert "type HOST:PORT" in error
    assert "\x1b" not in error


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_state_folder_that_others_can_change_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others could put links there to files that this user may write."""
    (place / "fedx-site-a").mkdir()
    (place / "fedx-site-a").chmod(0o777)
    error = mistake(capsys, "client", "--data", "images/a", "--keys", "keys/sites/a")
    assert "--state fedx-site-a can be changed by other users; type chmod 700 fedx-site-a" in error
    assert not list((place / "fedx-site-a").iterdir())


def test_a_folder_whose_name_cannot_be_a_site_s_needs_another(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "images" / "a").rename(place / "images" / "\x1b[2J")
    (place / "images" / "a").symlink_to("\x1b[2J")
    words = ["--insecure", "--server", "127.0.0.1:1"]
    error = mistake(capsys, "client", "--data", "images/a", *words)
    assert "its name cannot be a site's; type --name hospital-a" in error


def test_the_first_lines_of_a_site_fit_a_terminal(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_serve", lambda *_, **__: None)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    assert main(["federate", "client", "--data", "images/a", "--keys", "keys/sites/a"]) == 0
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "site a, coordinator localhost:8000",
        "images: images/a",
        "private state: fedx-site-a",
        "decoded copies of the images: fedx-site-a/.decoded-images",
        "these copies are deleted at the end; data.cache=FOLDER keeps them",
    ]


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_is_closed_ends_a_site_as_ctrl_c_does(
    place: Path, monkeypatch: pytest.MonkeyPatch, before: signal.Handlers
) -> None:
    """So its decoded copies are deleted; after `nohup` the signal is ignored as before."""
    caught: set[int] = set()
    monkeypatch.setattr(commands, "_serve", lambda *_, **__: None)
    monkeypatch.setattr(commands.signal, "getsignal", lambda _: before)
    monkeypatch.setattr(commands.signal, "signal", lambda number, _: caught.add(number))
    assert main(["federate", "client", "--data", "images/a", "--keys", "keys/sites/a"]) == 0
    assert caught == ({signal.SIGTERM, signal.SIGHUP} if before == signal.SIG_DFL else set())


def test_a_bad_number_of_a_connection_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "connection"
    assert commands._number(file) is None
    numbers = {"7": 7, str(2**64 - 1): 2**64 - 1, str(2**64): None, "-1": None, "x": None, "": None}
    for content, number in numbers.items():
        file.write_text(content)
        assert commands._number(file) == number
