"""``fedx-pl federate keys | server | client``: a federation of real sites."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedx_pl.callbacks import progress
from fedx_pl.cli.stopping import stopped_by_signals
from fedx_pl.cli.summary import summary
from fedx_pl.config import compose as configuration
from fedx_pl.config.build import Run, build
from fedx_pl.config.describe import announcement
from fedx_pl.config.schema import Config
from fedx_pl.data import sources
from fedx_pl.data.images import ImageData, Split
from fedx_pl.data.partition import Elsewhere
from fedx_pl.errors import UserError, has_controls, require, short
from fedx_pl.files import lock, write_atomically
from fedx_pl.sites import keys, limits, site, wire
from fedx_pl.sites.engine import FlowerEngine
from fedx_pl.sites.link import Link, quiet_flower
from fedx_pl.trainer import FederatedTrainer

POLL_SECONDS = 0.5
AGAIN_SECONDS = 2.0  # between attempts to reach a coordinator that is away
MAX_PAUSE_SECONDS = 60.0  # The pause doubles with each fault in a row.
# A site gives up only after it was refused for a while. A coordinator that has just started knows
# no keys yet, and one that has not noticed that a site was killed refuses its second connection; it
# notices after 20 seconds.
PATIENCE_SECONDS = 30.0


def make_keys(options: SimpleNamespace) -> None:
    """Makes or revokes certificates and keys."""
    names, revoked = (
        [word.strip() for word in words.split(",") if word.strip()]
        for words in (options.sites, options.revoke)
    )
    if not names and not revoked:
        raise UserError("whose keys? Type --sites hospital-a,hospital-b, or --revoke hospital-a")
    require("--port", options.port, 0 < options.port < 2**16, instead="--port 8000")
    for line in keys.revoke(options.out, revoked):
        print(line)
    if not names:
        return
    host = options.host or keys.known_host(options.out) or socket.getfqdn()
    for line in keys.make(options.out, host, options.port, sites=names):
        print(line)


def server(options: SimpleNamespace) -> None:
    """Coordinates the rounds; SIGTERM and SIGUSR1 of a cluster end it cleanly."""
    with stopped_by_signals():
        _coordinate(options)


def _coordinate(options: SimpleNamespace) -> None:
    config = _server_config(options)
    require("--port", options.port, 0 < options.port < 2**16, instead="--port 8000")
    require(
        "--timeout",
        options.timeout,
        0 < options.timeout < inf,
        instead="seconds, e.g. --timeout 3600",
    )
    require("--wait", options.wait, 0 <= options.wait < inf, instead="seconds, e.g. --wait 600")
    console = progress.make_console()
    console.print(announcement(config, trains_here=False), soft_wrap=True)
    known = None if options.insecure else keys.load_server(options.keys)
    if (
        known is not None
        and len(known.sites.keys() | known.revoked.keys()) < config.federation.clients
    ):
        raise UserError(
            f"--clients {config.federation.clients}, but {options.keys} knows {len(known.sites)} "
            f"sites ({', '.join(known.sites)}); type --clients {len(known.sites)}, or fedx-pl "
            "federate keys --sites NAME"
        )

    def make_engine(trainer: FederatedTrainer) -> FlowerEngine:
        link = Link(trainer.folder / "flower", options.host, options.port, keys=known)
        trainer.note(
            "listening on "
            f"{options.host}:{options.port}{'' if known else ', without TLS, for this machine'}"
        )
        images = trainer.datamodule.images
        try:
            _, side, _, channels = images.train.images.shape
            offered = site.offer(config, channels, side, value_range=images.value_range)
            engine = FlowerEngine(
                trainer,
                link,
                offered,
                wait=options.wait,
                timeout=options.timeout,
                leave_encoder=not options.no_encoder,
            )
        except BaseException:
            link.close()
            raise
        if known is not None:
            # A site whose key was revoked is not waited for, and what it had sent until then does
            # not count.
            met = {name: when for name, when in known.revoked.items() if engine.book.knows(name)}
            engine.expected -= len(met.keys() - known.sites.keys())
            engine.expected = min(engine.expected, len(known.sites))  # No other site can come.
            engine.book.expect(sorted(known.sites))
            for name, when in met.items():
                if trainer.unfinished.forget(engine.book.client_of(name), before=when):
                    trainer.note(
                        f"dropped the update of site {name} that came before its key was revoked"
                    )
        return engine

    bar = progress.ProgressBar(console)
    run = coordinator_run(
        config,
        lambda line: console.print(line, soft_wrap=True),
        callbacks=[bar],
        engine=make_engine,
    )
    summary(run.fit(), console)


def client(options: SimpleNamespace) -> None:
    """Takes part as a site, until the federation has finished or the command is stopped."""
    before = os.umask(0o077)  # Nothing that a site writes is for others, Flower's files included.
    try:
        _take_part(options)
    finally:
        os.umask(before)


def _take_part(options: SimpleNamespace) -> None:
    own = [
        word
        for word in options.overrides
        if word.startswith(("run.", "data.", "privacy.", "site."))
    ]
    if other := [word for word in options.overrides if word not in own]:
        raise UserError(
            f"{other[0]} is the coordinator's to set; a site has run.*, data.*, privacy.* and "
            "site.* keys, e.g. run.device=cpu"
        )
    if not options.data.is_dir():
        raise UserError(f"--data {options.data} is not a folder; it must hold this site's images")
    if options.name:
        keys.require_site_name("--name", options.name)
    if options.insecure:
        known = keys.SiteKeys(
            name=options.name or options.data.resolve().name,
            server=options.server,
            ca=Path(),
            private=ec.generate_private_key(ec.SECP384R1()),
        )
        if not known.name or has_controls(known.name):
            raise UserError(
                f"--data {options.data}: its name cannot be a site's; type --name hospital-a"
            )
    else:
        known = keys.load_site(options.keys)
    address = options.server or known.server
    _require_address(address, options.insecure)
    state = options.state or Path(f"fedx-site-{known.name}")
    _require_own(state)
    quiet_flower(state)
    try:
        held = lock(state)
    except UserError:
        raise UserError(
            f"this site runs already: another process uses --state {state}; end that one first"
        ) from None
    console = progress.make_console()

    def say(line: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)

    here = site.Site(
        known.name,
        state,
        [f"data.root={options.data}", *own],
        report=say,
        allow_code=options.allow_code,
    )
    say(f"site {known.name}, coordinator {address}")
    say(f"images: {options.data}")
    say(f"private state: {state}")
    say(f"decoded copies of the images: {here.own.data.cache}")
    if here.copies:
        say("these copies are deleted at the end; data.cache=FOLDER keeps them")
    # A terminal that is closed sends SIGHUP: then, too, the copies are deleted. `nohup` ignores it.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Not all on Windows.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with held, closing(here), suppress(KeyboardInterrupt):
        ca = None if options.insecure else known.ca
        _serve(here, address, ca, private=known.private, say=say, stay=options.stay)
        if here.refusal:
            raise UserError(
                f"the coordinator cannot take this site: {here.refusal}; when it is fixed, start "
                "this site again"
            )
        return
    say("left the federation; start the same command to join again")


def coordinator_run(config: Config, report: Callable[[str], None], **settings: Any) -> Run:
    """The coordinator's run. It trains no clients, and needs no labeled images.

    Args:
        config: the configuration of the run.
        report: called with each line of output.
        settings: further arguments of `build`.
    """
    images = None
    if (
        config.data.name == "folder"
        and config.data.root == configuration.compose(["data=folder"]).data.root
    ):
        report("no labeled images here (data.root): sites report unsupervised measures")
        side = sources.stored_side(config.data)
        nothing = np.zeros((0, side, side, 1 if config.data.grayscale else 3), dtype=np.uint8)
        images = ImageData(
            name="folder",
            train=Split(nothing, None),
            test=None,
            classes=(),
            group_names=(),
            source="images of the sites",
            fingerprint="",
            options=config.data,
        )
    partition = Elsewhere(clients=config.federation.clients)
    return build(config, report, images=images, partition=partition, **settings)


def _server_config(options: SimpleNamespace) -> Config:
    words = options.overrides
    if any(word.startswith("federation.clients=") for word in words):
        raise UserError("type --clients N instead of federation.clients=N")
    fork = [f"fork={options.fork}"] if options.fork else []
    config = configuration.compose(
        [*configuration.REAL_SITES, *words, *fork, f"federation.clients={options.clients}"]
    )
    if config.fedca.enabled:
        raise UserError(
            "fedca=true needs a base encoder on every site; it works in simulations only"
        )
    if config.engine.name != "serial":
        raise UserError(
            f"engine={config.engine.name} is for fedx-pl train; sites train by themselves"
        )
    run = (
        replace(config.run, root=str(Path(config.run.root) / "federations"))
        if not config.run.dir
        else config.run
    )
    return replace(config, run=run)


def _serve(
    here: site.Site,
    address: str,
    ca: Path | None,
    private: ec.EllipticCurvePrivateKey,
    say: Callable[[str], None],
    stay: bool,
) -> None:
    """Answers messages until the federation has ended; reconnects when the connection is lost."""
    from fedx_pl.sites.node import Node, Refused, Unreachable, WrongCertificate
    from fedx_pl.sites.seal import Trust

    last = (wire.REFUSED,) if stay else (wire.REFUSED, wire.FINISHED)
    trust = Trust(ca, private) if ca else None
    max_bytes = limits.max_message(here.own)
    connection = here.state / "connection"
    said_unreachable = False
    refused_since = 0.0
    faults = 0  # in a row
    while here.ended not in last:
        node = None
        pause = POLL_SECONDS
        try:
            before = _number(connection)
            node = Node(address, ca, private, before, trust=trust, max_bytes=max_bytes)
            write_atomically(connection, str(node.number).encode(), private=True)
            say("connected; waiting for rounds")
            said_unreachable = False
            refused_since = 0.0
            while here.ended not in last:
                incoming = node.next()
                if incoming is None:
                    time.sleep(POLL_SECONDS)
                    continue
                if incoming.content is None:
                    say(f"a message that cannot be read: {incoming.error}")
                    reply = wire.Content({"site": here.name, "error": incoming.error}, {})
                    node.answer(incoming, reply)
                elif (answer := here.answer(incoming.kind, incoming.content)) is not None:
                    node.answer(incoming, answer)
                faults = 0
        except Unreachable as error:
            if not said_unreachable and here.ended not in last:
                say(f"{address} cannot be reached, trying again ({error})")
            said_unreachable = True
            pause = AGAIN_SECONDS
        except Refused as error:
            if isinstance(error, WrongCertificate):
                raise UserError(
                    f"{address} is not the coordinator of this site's keys: {error}"
                ) from error
            refused_since = refused_since or time.monotonic()
            if time.monotonic() > refused_since + PATIENCE_SECONDS:
                raise UserError(
                    f"the coordinator at {address} refuses this site ({wire.plain(error)}); ask "
                    "there for this site's key in KEYS/server/sites, and see that this machine's "
                    "clock is right"
                ) from error
        except (KeyboardInterrupt, SystemExit, UserError):
            if node is not None:
                node.close(leave=True)
            raise
        except BaseException as error:  # Flower, or native code below it, may raise anything.
            here.report_fault("failed; connecting again", error)
            pause = min(AGAIN_SECONDS * 2**faults, MAX_PAUSE_SECONDS)
            faults += 1
        if node is not None:
            node.close(leave=here.ended in last)
        if here.ended not in last:
            time.sleep(pause)


def _number(file: Path) -> int | None:
    """The number of this site's last connection, which may be that of a process that was killed."""
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if 0 <= number < 2**64 else None


def _require_address(address: str, insecure: bool) -> None:
    host, _, port = address.rpartition(":")
    known = re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+", host) and not has_controls(host)
    if not (known and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise UserError(
            f"--server {short(repr(address))}: type HOST:PORT, e.g. --server "
            "coordinator.example.org:8000"
        )
    if insecure and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise UserError(
            f"--insecure --server {address}: without TLS only within one machine; use --keys"
        )


def _require_own(state: Path) -> None:
    """Refuses a state folder in which another user could put links to files of this user."""
    if os.name != "posix" or not state.exists():
        return
    about = state.stat()
    if about.st_mode & 0o002 or os.geteuid() not in (0, about.st_uid):
        raise UserError(
            f"--state {state} can be changed by other users; type chmod 700 {state}, or --state "
            "ANOTHER"
        )
