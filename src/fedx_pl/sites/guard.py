"""Limits on connections to the coordinator's port: their number, and how long one may be silent."""

import errno
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fedx_pl.errors import UserError

HEAD_SECONDS = 10.0  # for the TLS handshake and the head of a request
FREE_SECONDS = 10.0  # until a port that is taken is free again
BACKLOG = 16
MOST_CONNECTIONS = 4096
MOST_WAITING = 64  # of one address, before a signed request has come


class Held(socket.socket):
    """A connection that the guard counts until it is closed."""

    guard: "Guard"
    ends: tuple[Any, ...]
    waiting: float | None = None  # since when there has been no signed request
    served: bool = False

    def close(self) -> None:
        """Closes it, and frees its place."""
        self.guard.forget(self)
        super().close()

    def cut(self) -> None:
        """Shuts it down, so that whoever reads from it sees its end."""
        self.waiting = None
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class Guard:
    """Bounds the number of connections: a new one replaces the one that has waited longest."""

    def __init__(self, most: int = MOST_CONNECTIONS, each: int = MOST_WAITING) -> None:
        """Starts without connections.

        Args:
            most: the number of connections in all.
            each: the number of connections of one address that wait for a signed request.
        """
        self.most = most
        self.each = each
        # By both ends: one caller may use one port of his for several addresses of this machine.
        self._held: dict[tuple[Any, ...], Held] = {}
        self._lock = threading.RLock()

    def admit(self, held: Held, place: tuple[Any, ...]) -> None:
        """Counts a new connection; raises `BlockingIOError` if there is no room for it."""
        with self._lock:
            waiting = [one for one in self._held.values() if one.waiting is not None]
            same = [one for one in waiting if one.ends[0] == place[0]]
            if len(same) >= self.each or len(self._held) >= self.most:
                candidates = same if len(same) >= self.each else waiting
                # A caller that has sent a signed request may well send another one.
                for one in sorted(candidates, key=lambda one: (one.served, one.waiting or 0.0))[:1]:
                    one.cut()
            if len(self._held) >= self.most + BACKLOG:  # Those that were cut are not gone yet.
                socket.socket.close(held)
                raise BlockingIOError
            held.guard = self
            held.waiting = time.monotonic()
            held.ends = _ends(place, held.getsockname())
            self._held[held.ends] = held

    def forget(self, held: Held) -> None:
        """Stops counting a connection that is closed."""
        with self._lock:
            if self._held.get(held.ends) is held:
                del self._held[held.ends]

    def signed(self, scope: Mapping[str, Any], *, busy: bool) -> None:
        """Restarts the clock of a connection when a signed request has come or been answered."""
        client = scope.get("client")
        server = scope.get("server")
        if client is None or server is None:
            return
        with self._lock:
            if (held := self._held.get(_ends(client, server))) is not None:
                held.served = True
                held.waiting = None if busy else time.monotonic()

    def sweep(self) -> None:
        """Cuts connections that have waited for too long."""
        late = time.monotonic() - HEAD_SECONDS
        with self._lock:
            for held in list(self._held.values()):
                if held.waiting is not None and held.waiting < late:
                    held.cut()


def _ends(caller: Any, here: Any) -> tuple[Any, ...]:
    """A connection's addresses and ports; IPv6 has further numbers beside them."""
    return (*caller[:2], *here[:2])


class Listener(socket.socket):
    """A listening socket whose connections are guarded."""

    guard: Guard

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection if the guard admits it."""
        number, place = self._accept()  # type: ignore[attr-defined]
        held = Held(self.family, self.type, self.proto, fileno=number)
        self.guard.admit(held, place)
        return held, place


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens for sites, and on 127.0.0.1 for sites on this machine.

    The certificate always names that address.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = place[0] == "::" and socket.has_dualstack_ipv6()
    found = [socket.create_server(place[:2], family=family, dualstack_ipv6=both)]
    if not both and place[0] not in ("0.0.0.0", "127.0.0.1"):
        found.append(socket.create_server(("127.0.0.1", port)))
    return found


def listen_patiently(host: str, port: int) -> list[socket.socket]:
    """Listens; waits a moment for a port that the SuperLink of a killed coordinator still holds."""
    give_up = time.monotonic() + FREE_SECONDS
    while True:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                raise UserError(
                    f"--host {host} --port {port} cannot be used ({error}); type another --port, "
                    "or --host 0.0.0.0"
                ) from error
        time.sleep(0.5)
