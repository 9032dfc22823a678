"""Limits on connections and on idle time, and the addresses where sites connect."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import federation_parts as parts
import pytest
from helpers import PATIENCE

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from fedx_pl.errors import UserError
from fedx_pl.sites import guard as connections
from fedx_pl.sites.guard import Guard, Held, Listener, listen, listen_patiently


@contextmanager
def guarded(**bounds: int) -> Iterator[tuple[Guard, Callable[[], tuple[socket.socket, Held]]]]:
    """A guard, and a function that connects and returns the caller's and the door's socket."""
    ends: list[socket.socket] = []
    with Listener() as listener:
        listener.guard = Guard(**bounds)
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def connect() -> tuple[socket.socket, Held]:
            caller = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
            ends.append(caller)
            held, _ = listener.accept()
            ends.append(held)
            assert isinstance(held, Held)
            return caller, held

        yield listener.guard, connect
        for one in ends:
            one.close()


def ends_of(caller: socket.socket) -> dict[str, Any]:
    """The connection's two addresses, as a request states them."""
    return {"client": caller.getsockname(), "server": caller.getpeername()}


def is_open(held: Held) -> bool:
    held.setblocking(False)
    try:
        return held.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_longest_waiting_connection_is_closed_first() -> None:
    with guarded(each=2) as (_guard, connect):
        held = [connect()[1] for _ in range(3)]
        assert [is_open(one) for one in held] == [False, True, True]
    with guarded(most=2) as (_guard, connect):
        held = [connect()[1] for _ in range(3)]
        assert [is_open(one) for one in held] == [False, True, True]


def test_a_connection_that_has_signed_stays_open() -> None:
    with guarded(each=2) as (guard, connect):
        (first, one), (_, two) = connect(), connect()
        guard.signed(ends_of(first), busy=True)
        guard.signed(ends_of(first), busy=False)
        connect()
        assert (is_open(one), is_open(two)) == (True, False)


def test_connections_of_one_port_to_two_addresses_are_two() -> None:
    """Otherwise the first would be forgotten and stay open forever; possible on one machine."""
    with guarded(each=2) as (guard, connect), socket.create_server(("127.0.0.2", 0)) as other:
        _, one = connect()
        held = Held(fileno=socket.create_connection(other.getsockname(), timeout=PATIENCE).detach())
        with held:
            guard.admit(held, one.getpeername())
            connect()
            assert (is_open(one), is_open(held)) == (False, True)


def test_the_number_of_connections_is_bounded() -> None:
    with guarded(most=1) as (_guard, connect):
        for _ in range(1 + connections.BACKLOG):
            connect()
        with pytest.raises(BlockingIOError):
            connect()


def test_a_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded() as (guard, connect):
        (first, one), (_, two) = connect(), connect()
        guard.signed(ends_of(first), busy=True)
        guard.sweep()
        assert is_open(two)
        monkeypatch.setattr(connections, "HEAD_SECONDS", -1.0)
        guard.sweep()
        assert (is_open(one), is_open(two)) == (True, False)
        guard.signed(ends_of(first), busy=False)
        guard.sweep()
        assert not is_open(one)


def addresses(host: str) -> list[str]:
    sockets = listen(host, parts.free_port())
    try:
        return [one.getsockname()[0] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def test_the_coordinator_s_own_address_is_always_there() -> None:
    """The certificate always names 127.0.0.1, so a local site can connect there."""
    assert addresses("0.0.0.0") == ["0.0.0.0"]
    assert addresses("127.0.0.1") == ["127.0.0.1"]
    assert addresses("localhost") == ["127.0.0.1"]
    assert addresses("127.0.0.2") == ["127.0.0.2", "127.0.0.1"]


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="needs IPv6: sysctl -w net.ipv6.conf.all.disable_ipv6=0"
)
def test_ipv6() -> None:
    assert addresses("::1") == ["::1", "127.0.0.1"]
    (both,) = listen("::", port := parts.free_port())
    with both, socket.create_connection(("127.0.0.1", port), timeout=120):
        assert both.accept()[1][0] == "::ffff:127.0.0.1"


def test_a_port_that_is_taken_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FREE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "127.0.0.2"):
            with pytest.raises(
                UserError, match=rf"--port {port} cannot be used .*type another --port"
            ):
                listen_patiently(host, port)
    with pytest.raises(
        UserError, match=r"--host 203\.0\.113\.9 --port \d+ cannot be used .*--host 0\.0\.0\.0"
    ):
        listen_patiently("203.0.113.9", port)  # Not an address of this machine: no use in waiting.


def test_a_port_that_was_taken_for_a_moment_is_waited_for() -> None:
    from threading import Timer

    taken = socket.create_server(("127.0.0.1", 0))
    Timer(0.3, taken.close).start()
    (found,) = listen_patiently("127.0.0.1", taken.getsockname()[1])
    found.close()


def test_a_place_that_is_too_long_for_a_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedx_pl.sites import link

    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(UserError, match="set TMPDIR to a short path"):
        link._entrance()
    assert not list(long.iterdir())
