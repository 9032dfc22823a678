"""Coordinator, SuperLink and sites as separate processes, with TLS and keys, from the command line.

The sites start before any coordinator and serve several coordinators in turn. Client numbers, and
therefore all random numbers, are derived from the sites' names, so a simulation on the same
folders must give bit-identical weights.
"""

import json
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import federation_parts as parts
import numpy as np
import pytest
from helpers import PATIENCE, THREADS

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from commands import Command
from federation_parts import BYOL_FEDX, WORDS

from fedx_pl.cli.main import main
from fedx_pl.config.compose import REAL_SITES

pytestmark = pytest.mark.slow

# Trains again and again in the round whose number is in the file `hold`, as long as it is there.
HELD = """
import contextlib, pathlib
from fedx_pl.federation.client import LocalTrainer
run, hold = LocalTrainer.run, pathlib.Path("hold")
def held(self, context, **rest):
    found = run(self, context, **rest)
    with contextlib.suppress(FileNotFoundError):
        while hold.read_text() == str(context.round):
            run(self, context, **rest)
    return found
LocalTrainer.run = held
"""

# Sends a normal update, but with NaN in round 1, a wrong shape in round 2 and an unknown tensor in
# round 3.
BAD_SITE = """
import torch
from fedx_pl.sites.site import Site

train = Site._train

def bad(self, content):
    found = train(self, content)
    changed = [
        {"backbone.conv1.weight": torch.full((4, 3, 3, 3), float("nan"))},
        {"backbone.bn1.weight": torch.ones(5)},
        {"surprise": torch.ones(1)},
    ]
    return found._replace(tensors=found.tensors | changed[content.meta["round"] - 1])

Site._train = bad
"""

# Round 1: inverted weights. Round 2: an impossible metric. Round 3: far too many images, a loss of
# 1e308 and too many metrics.
LIAR = """
from fedx_pl.sites.site import Site

train = Site._train

def lie(self, content):
    found, number = train(self, content), content.meta["round"]
    if number == 1:
        turned = {name: -2 * t for name, t in found.tensors.items() if name.endswith("weight")}
        return found._replace(tensors=found.tensors | turned)
    if number == 2:
        return found._replace(meta=found.meta | {"metrics": {"rankme": 0.5}})
    names = {f"n{i}": 1.0 for i in range(60)}
    lies = {"images": 10**7, "losses": {"total": 1e308}, "metrics": names}
    return found._replace(meta=found.meta | lies)

Site._train = lie
"""

# Waits long for a site that is gone.
PATIENT = """
from fedx_pl.sites import engine as flower
flower.GRACE_SECONDS = 300.0
"""
# Has loaded all that takes time, and begins when a file is there.
READY = """
import pathlib, time
from fedx_pl.cli import sites as commands
from fedx_pl.sites import node
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


class Federation:
    """Folders, keys and running sites."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, parts.free_port()
        self.images = parts.make_images(folder / "images", {"a": 40, "b": 30, "c": 160})
        self.sites: dict[str, Command] = {}
        words = ["--host", "localhost", "--port", str(self.port), "--out", str(folder / "keys")]
        assert main(["federate", "keys", "--sites", "a,b,c,d", *words]) == 0

    def start(self, name: str, images: str = "", code: str = HELD) -> Command:
        """Starts a site with the private state of its previous process."""
        place = self.folder / f"at-{name}"
        place.mkdir(exist_ok=True)
        log = place / f"{len(list(place.glob('*.log')))}.log"
        keys = self.folder / "keys" / "sites" / name
        words = [
            "--data",
            str(self.images / (images or name)),
            "--keys",
            str(keys),
            "--stay",
            f"run.threads={THREADS}",
        ]
        return Command(log, "federate", "client", *words, code=code)

    def hold(self, round: int, names: str = "c") -> None:
        """Keeps sites training in a round until they are killed or released."""
        for name in names:
            (self.folder / f"at-{name}" / "hold").write_text(str(round))

    def let_go(self) -> None:
        for file in self.folder.glob("at-*/hold"):
            file.unlink()

    def server(self, run: str, *words: str, clients: int = 3, code: str = "") -> Command:
        """Starts a coordinator; it resumes a ``run`` that exists."""
        for site in self.sites.values():
            site.look_from_here()
        more = [
            "--clients",
            str(clients),
            "--keys",
            str(self.folder / "keys" / "server"),
            "--port",
            str(self.port),
        ]
        more += [
            "--timeout",
            str(PATIENCE),
            "--wait",
            str(PATIENCE),
            f"run.dir={self.folder / run}",
        ]
        log = self.folder / f"{run}-{time.monotonic_ns()}.log"
        return Command(log, "federate", "server", *more, *WORDS, *words, code=code)

    def others(self) -> Path:
        """The images of a and b alone."""
        folder = self.folder / "others"
        folder.mkdir(exist_ok=True)
        for name in "ab":
            if not (folder / name).exists():
                (folder / name).symlink_to(self.images / name)
        return folder

    def logs(self) -> str:
        """The logs of all processes, for assertion messages."""
        files = sorted(self.folder.glob("**/*.log"))
        return "\n".join(
            f"--- {file.relative_to(self.folder)}\n{file.read_text(errors='replace')}"
            for file in files
        )


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    found = Federation(tmp_path_factory.mktemp("federation"))
    try:
        found.sites |= {name: found.start(name) for name in "abc"}
        yield found
    finally:
        for site in found.sites.values():
            site.kill()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> Path:
    """Three rounds of BYOL with FedX in one process."""
    words = (*REAL_SITES, *BYOL_FEDX, "federation.rounds=3")
    return parts.serial(federation.images, federation.folder / "serial-3", *words)


def assert_same(federation: Federation, run: str, expected: Path, rounds: int) -> None:
    for round in range(1, rounds + 1):
        found = parts.weights(federation.folder / run, round)
        assert parts.same(found, parts.weights(expected, round)), (
            f"round {round}\n{federation.logs()}"
        )


@pytest.mark.parametrize("method", [("method=simclr",), BYOL_FEDX], ids=["simclr", "byol+fedx"])
def test_two_rounds_give_the_weights_of_a_simulation(
    federation: Federation, method: tuple[str, ...]
) -> None:
    words = (*method, "federation.rounds=2")
    expected = parts.serial(
        federation.images, federation.folder / f"serial-{len(method)}", *REAL_SITES, *words
    )
    with federation.server(f"two-{len(method)}", *words) as server:
        assert server.wait() == 0, federation.logs()
    assert_same(federation, f"two-{len(method)}", expected, rounds=2)
    private = list((federation.folder / "at-a" / "fedx-site-a").glob("*/round_00002.safetensors"))
    assert private, federation.logs()
    assert not list((federation.folder / f"two-{len(method)}" / "clients").glob("*"))


def test_a_site_restarts_inside_a_round_with_its_private_state(
    federation: Federation, undisturbed: Path
) -> None:
    """c is killed and restarted during round 2; it is asked again, and the weights are the same."""
    again = federation.start("c", code=READY + HELD)
    federation.hold(2)
    try:
        with federation.server(
            "restart", *BYOL_FEDX, "federation.rounds=3", code=PATIENT
        ) as server:
            federation.sites["c"].wait_for("round 2: training")
            federation.sites["c"].kill()
            federation.let_go()
            (again.log.parent / "go").touch()
            assert server.wait() == 0, federation.logs()
            assert "site c was away and is asked again" in server.output, federation.logs()
        assert "starting anew" not in again.output
        assert "round 2: training" in again.output
    finally:
        federation.sites["c"] = again
    assert_same(federation, "restart", undisturbed, rounds=3)


def test_a_server_that_is_killed_resumes_with_the_same_weights(
    federation: Federation, undisturbed: Path
) -> None:
    """Kills it within round 2, and again once round 2 is saved.

    Its SuperLink ends with it, and the port is free.
    """
    words = (*BYOL_FEDX, "federation.rounds=3")
    federation.hold(2)
    with federation.server("killed", *words) as server:
        federation.sites["c"].wait_for("round 2: training")
        children = server.children()
        assert children, federation.logs()
        server.kill()
    assert not (federation.folder / "killed" / "checkpoints" / "round_00002").exists(), (
        federation.logs()
    )
    parts.wait_until(lambda: not any(map(parts.alive, children)), "the SuperLink ends")
    parts.wait_until(lambda: parts.is_free(federation.port), "the port is free")
    federation.hold(3)
    with federation.server("killed", *words) as server:
        saved = federation.folder / "killed" / "checkpoints" / "round_00002" / "state.json"
        parts.wait_until(saved.exists, "round 2 is saved")
        server.kill()
        assert "resuming after round 1 of 3" in server.output
    federation.let_go()
    with federation.server("killed", *words) as server:
        assert server.wait() == 0, federation.logs()
        assert "resuming after round 2 of 3" in server.output
    assert "starting anew" not in federation.logs()
    assert_same(federation, "killed", undisturbed, rounds=3)


def test_killed_and_bad_sites_are_dropped_by_name(federation: Federation) -> None:
    """c is killed in round 1 and d's updates are broken, so only a and b are in every mean."""
    words = ("federation.rounds=3",)
    expected = parts.serial(
        federation.others(), federation.folder / "serial-others", *REAL_SITES, *words
    )
    federation.hold(1)
    with (
        federation.start("d", images="b", code=BAD_SITE) as bad,
        federation.server("dropped", *words, clients=4) as server,
    ):
        federation.sites["c"].wait_for("round 1: training")
        federation.sites["c"].kill()
        federation.let_go()
        bad.wait_for("round 1: loss")
        assert server.wait() == 0, federation.logs()
        for reason in (
            "round 1: dropped site c: ",
            "round 1: dropped site d: backbone.conv1.weight holds NaN or infinity",
            "round 2: dropped site d: backbone.bn1.weight has shape (5,), expected (4,)",
            "round 3: dropped site d: 1 tensors are unknown, e.g. surprise",
        ):
            assert reason in server.output, federation.logs()
    federation.sites["c"] = federation.start("c")
    assert_same(federation, "dropped", expected, rounds=3)


def test_a_run_resumes_without_a_site_whose_key_is_revoked(federation: Federation) -> None:
    """The server is killed once c's update is saved, and c's key is revoked.

    Every round is then the mean of a and b alone.
    """
    words = ("federation.rounds=2",)
    expected = parts.serial(
        federation.others(), federation.folder / "serial-revoked", *REAL_SITES, *words
    )
    pending = federation.folder / "revoked" / "pending" / "00002"
    federation.hold(1, "ab")
    with federation.server("revoked", *words) as server:
        parts.wait_until(pending.exists, "c's update is saved")
        server.kill()
    keys = [
        "federate",
        "keys",
        "--out",
        str(federation.folder / "keys"),
        "--port",
        str(federation.port),
    ]
    assert main([*keys, "--revoke", "c"]) == 0
    federation.let_go()
    with federation.server("revoked", *words) as server:
        assert server.wait() == 0, federation.logs()
        assert (
            "dropped the update of site c that came before its key was revoked" in server.output
        ), federation.logs()
        assert "site c is here" not in server.output, federation.logs()
    assert_same(federation, "revoked", expected, rounds=2)
    number = federation.folder / "at-a" / "fedx-site-a" / "connection"
    assert stat.S_IMODE(number.stat().st_mode) == 0o600
    federation.sites["c"].kill()
    assert main([*keys, "--sites", "c"]) == 0
    federation.sites["c"] = federation.start("c")


def test_a_liar_decides_nothing(federation: Federation) -> None:
    """Every round is the mean of a, b and c; the last includes the liar's honest weights."""
    with (
        federation.start("d", images="b", code=LIAR),
        federation.server("liar", "federation.rounds=3", "on_collapse=stop", clients=4) as server,
    ):
        assert server.wait() == 0, federation.logs()
        for text in (
            "aggregate=clip: updates are clipped to the usual length",
            "round 1: dropped site d: its weights kept -",
            "round 2: dropped site d: it tells rankme=0.5",
            "round 3: site d: ",
            "its 10,000,000 images count as 230, aggregate.max_share=0.5",
        ):
            assert text in server.output, federation.logs()
    rows = json.loads((federation.folder / "liar" / "metrics.json").read_text())["rounds"]
    assert [row["clients"] for row in rows] == [3, 3, 4]
    assert all(row["loss"] < 100 for row in rows)


def test_stopped_processes_leave_nothing_behind(federation: Federation) -> None:
    """Ctrl-C and SIGTERM stop training sites.

    Ctrl-C stops the server within a round, and a waiting site.
    """
    a, b, c = (federation.sites[name] for name in "abc")
    federation.hold(1, "abc")
    with federation.server("stopped", "federation.rounds=1") as server:
        for site, number in ((b, signal.SIGINT), (c, signal.SIGTERM)):
            site.wait_for("round 1: training")
            site.send(number)
            assert site.wait() == 0, federation.logs()
            assert "left the federation; start the same command to join again" in site.output, (
                federation.logs()
            )
        for name in "bc":
            server.wait_for(f"round 1: dropped site {name}")
        children = server.children()
        assert children
        server.send(signal.SIGINT)
        assert server.wait() == 130, federation.logs()
        assert "run the same command again to resume" in server.output, federation.logs()
    assert not any(map(parts.alive, children))
    assert parts.is_free(federation.port)
    federation.let_go()
    a.wait_for("cannot be reached")  # It has seen that the server is gone, and waits for it.
    a.send(signal.SIGINT)
    assert a.wait() == 0, federation.logs()
    assert "left the federation" in a.output, federation.logs()
    assert "Traceback" not in federation.logs(), federation.logs()


def test_sites_end_when_the_federation_has_and_keep_an_encoder_that_embeds(tmp_path: Path) -> None:
    """Runs sites without --stay; c has unusable images, is refused and exits with the reason."""
    images, port = (
        parts.make_images(tmp_path / "images", {"a": 20, "b": 20, "c": 0}),
        parts.free_port(),
    )
    (images / "c" / "notes.txt").write_text("no image")
    words = ["--insecure", "--server", f"127.0.0.1:{port}", f"run.threads={THREADS}"]
    sites = {}
    for name in "abc":
        (tmp_path / f"at-{name}").mkdir()
        log = tmp_path / f"at-{name}" / "log"
        sites[name] = Command(log, "federate", "client", "--data", str(images / name), *words)
    more = [
        "--insecure",
        "--port",
        str(port),
        "--clients",
        "2",
        "--timeout",
        str(PATIENCE),
        "--wait",
        str(PATIENCE),
    ]
    more += [f"run.dir={tmp_path / 'run'}", "federation.rounds=1"]
    with (
        sites["a"] as a,
        sites["b"] as b,
        sites["c"] as c,
        Command(tmp_path / "log", "federate", "server", *more, *WORDS),
    ):
        assert c.wait() == 2, c.output
        assert "the coordinator cannot take this site" in c.output
        for site in (a, b):
            assert site.wait() == 0, site.output
            assert "the federation has finished, after round 1" in site.output
            assert "next: fedx-pl embed " in site.output
            assert "deleted at the end" in site.output
    for private in (tmp_path / "at-a" / "fedx-site-a", tmp_path / "run" / "flower"):
        assert not [path for path in [private, *private.rglob("*")] if path.stat().st_mode & 0o077]
    assert not list(tmp_path.rglob("images.npy"))
    (encoder,) = (tmp_path / "at-a" / "fedx-site-a").glob("*/encoder")
    assert (
        main(["embed", str(encoder), str(images / "a"), "-o", str(tmp_path / "features.npz")]) == 0
    )
    assert np.load(tmp_path / "features.npz")["embedding"].shape[0] == 20
    for site in (a, b, c):
        assert "Traceback" not in site.output
