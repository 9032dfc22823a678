"""Flower's SuperLink as a process of its own, with a door for sites and a unix socket for the coordinator.

    python -P superlink.py PARENT_PID SOCKET,SOCKET UNIX_SOCKET [flower-superlink's options]    (about the sites: stdin)

The SuperLink would serve everything on one port: the Fleet API for sites, but also the Control and Runtime APIs, by
which anyone who reaches them may register nodes, submit runs and greet sites. Here the port leads to `Door`, which lets
nothing but signed Fleet requests of registered sites through; everything else is for who can open the unix socket, in
a folder that is the coordinator's alone. It never runs an app: the coordinator itself acts as the ServerApp.
"""

import asyncio
import base64
import hashlib
import json
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any

FLEET = "/v1/fleet/"
SIGNED = (
    "x-fedx-signed"  # header: time, nonce, SHA-256 of the body, signature of these and the path
)
CLOCK_SECONDS = 60.0  # that a site's clock may differ
HEAD_SECONDS = 10.0  # for the TLS handshake and the head of a request
BODY_SECONDS = 600.0
SMALL, PART = 2**14, 5 * 2**20  # PART: of Flower, which cuts what is larger
# What a site of ours calls, and how many bytes it may send. With keys, nobody registers himself.
CALLS = {
    "register-node": SMALL, "activate-node": SMALL, "deactivate-node": SMALL, "send-node-heartbeat": SMALL,
    "pull-messages": SMALL, "pull-object": SMALL, "confirm-message-received": SMALL,
    "push-messages": 2**20, "push-object": PART + SMALL,
}  # fmt: skip
REMEMBERED = 4  # messages to a site that it may still answer; the coordinator waits for two at most
AT_ONCE = 16  # requests of one site; Flower's client makes four at most
BACKLOG = 16
OWN_DESCRIPTORS = 64
MOST_CONNECTIONS, MOST_WAITING = 4096, 64  # in all; of one address before a signed request has come


class NotLetIn(Exception):
    """A request that is refused, with the HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(kw_only=True)
class Sent:
    """A message of the coordinator, and the answer that its site has announced."""

    message: str
    parts: frozenset[str]
    answer: str = ""


class Ledger:
    """The last messages to each site: only they may be fetched and answered.

    What a site leaves behind, unread or half uploaded, is deleted with the message it belongs to.
    """

    def __init__(self) -> None:
        """Starts without messages."""
        self.delete: Callable[[str], None] = lambda identifier: None  # of Flower's object store
        self._sent: dict[int, deque[Sent]] = {}
        self._lock = threading.Lock()  # The coordinator's requests have a thread of their own.

    def note(self, node: int, message: str, parts: Iterable[str]) -> None:
        """Takes note of a message to a site, and forgets one that is too old to be answered."""
        with self._lock:
            sent = self._sent.setdefault(node, deque())
            sent.append(Sent(message=message, parts=frozenset(parts)))
            old = sent.popleft() if len(sent) > REMEMBERED else None
        if old is not None:
            for identifier in filter(None, (old.message, old.answer)):
                self.delete(identifier)

    def sent(self, node: int) -> list[Sent]:
        """The last messages to a site."""
        with self._lock:
            return list(self._sent.get(node, ()))


class Held(socket.socket):
    """A connection that counts until it is closed."""

    guard: "Guard"
    ends: tuple[Any, ...]
    waiting: float | None = None  # since when there has been no signed request
    served: bool = False

    def close(self) -> None:
        """Ends it."""
        self.guard.forget(self)
        super().close()

    def cut(self) -> None:
        """Whoever reads from it sees its end."""
        self.waiting = None
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class Guard:
    """Bounds connections, also those that never say anything: the longest waiting one makes place for a new one."""

    def __init__(self, most: int = MOST_CONNECTIONS, each: int = MOST_WAITING) -> None:
        """Starts without any.

        Args:
            most: connections in all.
            each: of one address that wait for a signed request.
        """
        self.most, self.each = most, each
        # By both ends: one caller may use one port of his for several addresses of this machine.
        self._held: dict[tuple[Any, ...], Held] = {}
        self._lock = threading.RLock()

    def admit(self, held: Held, place: tuple[Any, ...]) -> None:
        """Takes note of a new connection; raises BlockingIOError if there is no place for it."""
        with self._lock:
            waiting = [one for one in self._held.values() if one.waiting is not None]
            same = [one for one in waiting if one.ends[0] == place[0]]
            if len(same) >= self.each or len(self._held) >= self.most:
                candidates = same if len(same) >= self.each else waiting
                # Who has sent a signed request before may well send another one.
                for one in sorted(candidates, key=lambda one: (one.served, one.waiting or 0.0))[:1]:
                    one.cut()
            if len(self._held) >= self.most + BACKLOG:  # Those that were cut are not gone yet.
                socket.socket.close(held)
                raise BlockingIOError
            held.guard, held.waiting = self, time.monotonic()
            held.ends = _ends(place, held.getsockname())
            self._held[held.ends] = held

    def forget(self, held: Held) -> None:
        """It is closed."""
        with self._lock:
            if self._held.get(held.ends) is held:
                del self._held[held.ends]

    def signed(self, scope: Mapping[str, Any], *, busy: bool) -> None:
        """A signed request has come, or has been answered: a new time begins."""
        client, server = scope.get("client"), scope.get("server")
        if client is None or server is None:
            return
        with self._lock:
            if (held := self._held.get(_ends(client, server))) is not None:
                held.served = True
                held.waiting = None if busy else time.monotonic()

    def sweep(self) -> None:
        """Ends connections that have waited for too long."""
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
        """The next connection; not an accept of the event loop's own, which would ask nobody."""
        number, place = self._accept()  # type: ignore[attr-defined]
        held = Held(self.family, self.type, self.proto, fileno=number)
        self.guard.admit(held, place)
        return held, place


class Door:
    """ASGI middleware: signed Fleet requests of registered sites, about messages between them and the coordinator."""

    def __init__(
        self,
        app: Any,
        *,
        sites: frozenset[bytes] | None,
        ledger: Ledger,
        guard: Guard,
        tree_of: Callable[[str], Any],
    ) -> None:
        """Opens.

        Args:
            app: Flower's.
            sites: registered public keys (PEM); None: any key, which must register itself.
            ledger: of what the coordinator has sent.
            guard: of the connections.
            tree_of: finds the stored object tree of an identifier, or None.
        """
        self.app, self.sites, self.ledger, self.guard, self.tree_of = (
            app,
            sites,
            ledger,
            guard,
            tree_of,
        )
        self._seen: dict[str, float] = {}  # requests by their nonce, until their time is over
        self._busy: Counter[bytes] = Counter()  # by key
        self._pushing = asyncio.Lock()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes a request on, or refuses it; its body is not read before its signature is."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise NotLetIn(403, "HTTP only")
            call = self._call(scope)
            headers = _headers(scope)
            public, digest = self._signed(scope["path"], headers)
            length = headers.get(b"content-length", b"")
            if not length.isdigit():
                raise NotLetIn(411, "a request needs a Content-Length")
            if len(length) > 12 or int(length) > CALLS[call]:
                raise NotLetIn(413, f"{call} takes {CALLS[call]} bytes")
            if self._busy[public] >= AT_ONCE:
                raise NotLetIn(429, f"more than {AT_ONCE} requests of one site at once")
        except NotLetIn as refused:
            await _refuse(send, refused)
            return
        self.guard.signed(scope, busy=True)
        self._busy[public] += 1
        try:
            body = await _body(receive, CALLS[call])
            if hashlib.sha256(body).hexdigest() != digest:
                raise NotLetIn(401, "the body is not the one that was signed")
            # One at a time: what is looked up for one is not changed by another.
            async with self._pushing if call == "push-messages" else nullcontext():
                self._require_own(call, body)
                await self.app(scope, _again(body, receive), send)
        except NotLetIn as refused:
            await _refuse(send, refused)
        finally:
            self._busy[public] -= 1
            self.guard.signed(scope, busy=False)

    def _call(self, scope: dict[str, Any]) -> str:
        path = scope["path"]
        call = str(path.removeprefix(FLEET))
        known = call in CALLS and (call != "register-node" or self.sites is None)
        if not path.startswith(FLEET) or not known or scope["method"] != "POST":
            raise NotLetIn(403, "for sites there is the Fleet API only")
        return call

    def _signed(self, path: str, headers: dict[bytes, bytes]) -> tuple[bytes, str]:
        """The key, and the digest that the body must have, if a site has signed it and the request is a new one."""
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

        try:
            public = base64.b64decode(
                headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()], validate=True
            )
            if self.sites is not None and public not in self.sites:
                raise NotLetIn(401, "this key is not registered")
            when, nonce, digest, signature = headers[SIGNED.encode()].decode("ascii").split(" ")
            ahead = datetime.fromisoformat(when).timestamp() - time.time()
            key = serialization.load_pem_public_key(public)
            if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
                key.curve, ec.SECP384R1
            ):
                raise ValueError("another kind of key")
            text = signed_text(path, when, nonce, digest)
            key.verify(base64.b64decode(signature, validate=True), text, ec.ECDSA(hashes.SHA384()))
        except KeyError as error:
            raise NotLetIn(401, "a request needs a key and a signature") from error
        except (
            ValueError,
            TypeError,
            OverflowError,
            InvalidSignature,
            UnsupportedAlgorithm,
        ) as error:
            raise NotLetIn(401, "the signature is not right") from error
        if abs(ahead) > CLOCK_SECONDS:
            late = f"{abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
            raise NotLetIn(401, f"the site's clock is {late}, {CLOCK_SECONDS:.0f} s are allowed")
        self._require_new(f"{digest} {nonce} {when}")
        return public, digest

    def _require_new(self, request: str) -> None:
        now = time.monotonic()
        while self._seen and next(iter(self._seen.values())) < now:  # In the order of time.
            del self._seen[next(iter(self._seen))]
        if request in self._seen:
            raise NotLetIn(401, "this request has come before")
        self._seen[request] = now + 2 * CLOCK_SECONDS

    def _require_own(self, call: str, body: bytes) -> None:
        """What a site fetches or answers is a message to it. That the node is the caller's, Flower has seen to."""
        if call not in ("push-messages", "pull-object", "confirm-message-received"):
            return
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
        from google.protobuf.message import DecodeError

        kinds = {"push-messages": PushMessagesRequest, "pull-object": PullObjectRequest}
        request: Any = kinds.get(call, ConfirmMessageReceivedRequest)()
        try:
            request.ParseFromString(body)
        except DecodeError as error:
            raise NotLetIn(400, "the body cannot be read") from error
        sent = self.ledger.sent(request.node.node_id)
        if call == "push-messages":
            self._require_answer(request, {one.message: one for one in sent})
        elif call == "pull-object":
            if not any(request.object_id in one.parts for one in sent):
                raise NotLetIn(403, "that is no part of a message to this site")
        elif request.message_object_id not in {one.message for one in sent}:
            raise NotLetIn(403, "that is no message to this site")

    def _require_answer(self, request: Any, sent: dict[str, Sent]) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise NotLetIn(400, "one answer at a time")
        about, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if about.src_node_id != request.node.node_id:
            raise NotLetIn(403, "a message in the name of another")
        if (asked := sent.get(about.reply_to_message_id)) is None:
            raise NotLetIn(410, "an answer to nothing that this site was sent")
        if asked.answer:
            raise NotLetIn(410, "an answer has been announced before")
        if about.message_id != tree.object_id:
            raise NotLetIn(400, "another message than its parts")
        most = (
            2 * len(asked.parts) + 16
        )  # An answer is about as large as the question: both are the weights.
        if _count(tree, most) > most:
            raise NotLetIn(413, f"an answer of more than {most} parts")
        if not self._agrees(tree, {}):
            raise NotLetIn(400, "parts that are known with other parts")
        asked.answer = tree.object_id

    def _agrees(self, tree: Any, seen: dict[str, Any]) -> bool:
        """Whether a part is the same wherever it is named: else a small tree would stand for a huge one.

        Args:
            tree: of an answer, or a part of it.
            seen: parts of the answer so far, by their identifiers.
        """
        known = self.tree_of(tree.object_id)
        if known is None:
            known = seen.setdefault(tree.object_id, tree)
        if known is not tree:
            return bool(known == tree)
        return all(self._agrees(child, seen) for child in tree.children)


class Noting:
    """ASGI middleware of the coordinator's own entrance: takes note of what it sends."""

    def __init__(self, app: Any, ledger: Ledger) -> None:
        self.app, self.ledger = app, ledger

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes everything on."""
        if scope["type"] == "http" and scope["path"] == "/v1/runtime/push-messages":
            from flwr.proto.runtime_pb2 import PushAppMessagesRequest
            from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

            body = await _body(receive)
            request = PushAppMessagesRequest.FromString(body)
            for message, tree in zip(
                request.messages_list, request.message_object_trees, strict=True
            ):
                parts = (part.object_id for part in iterate_object_tree(tree))
                self.ledger.note(message.metadata.dst_node_id, message.metadata.message_id, parts)
            receive = _again(body, receive)
        await self.app(scope, receive, send)


def sign(path: str, body: bytes, signature_of: Callable[[bytes], bytes]) -> str:
    """The header `SIGNED` of a request.

    Args:
        path: of the request.
        body: of the request.
        signature_of: signs with the site's key.
    """
    when, nonce = datetime.now(UTC).isoformat(), secrets.token_hex(16)
    digest = hashlib.sha256(body).hexdigest()
    signature = base64.b64encode(signature_of(signed_text(path, when, nonce, digest))).decode()
    return f"{when} {nonce} {digest} {signature}"


def signed_text(path: str, when: str, nonce: str, digest: str) -> bytes:
    """What a site signs."""
    return "\n".join(["fedx-pl request 1", path, when, nonce, digest]).encode()


def listen(host: str, port: int) -> list[socket.socket]:
    """Where sites come in, and 127.0.0.1 for those on this machine, which the certificate names in any case."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = place[0] == "::" and socket.has_dualstack_ipv6()
    found = [socket.create_server(place[:2], family=family, dualstack_ipv6=both)]
    if not both and place[0] not in ("0.0.0.0", "127.0.0.1"):
        found.append(socket.create_server(("127.0.0.1", port)))
    return found


def main() -> None:
    """Runs until the coordinator ends."""
    os.umask(0o077)
    parent = int(sys.argv.pop(1))
    ledger, guard = Ledger(), Guard(most=_raise_descriptors())
    sockets: list[socket.socket] = []
    for number in sys.argv.pop(1).split(","):
        listener = Listener(fileno=int(number))
        listener.guard = guard
        sockets.append(listener)
    inner = socket.socket(fileno=int(sys.argv.pop(1)))
    threading.Thread(target=_follow, args=(parent, guard, inner.getsockname()), daemon=True).start()
    told = json.load(sys.stdin)
    import uvicorn
    from flwr.supercore.object_store import NoObjectInStoreError
    from flwr.superlink.cli.flower_superlink import (
        SuperLinkLifespan,
        _parse_superlink_lifespan_config,
    )
    from flwr.superlink.main import create_app
    from flwr.superlink.routers.fleet import node_auth

    # Flower signs the time alone, and would refuse a clock that is 6 s ahead. The door has looked at it already.
    node_auth.SYSTEM_TIME_TOLERANCE = node_auth.TIMESTAMP_TOLERANCE = int(2 * CLOCK_SECONDS)
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    store = app.state.linkstate_factory.state().object_store
    ledger.delete = store.delete

    def tree_of(identifier: str) -> Any:
        try:
            return store.get_object_tree(identifier)
        except NoObjectInStoreError:
            return None

    sites = (
        None if told["sites"] is None else frozenset(public.encode() for public in told["sites"])
    )
    door = Door(app, sites=sites, ledger=ledger, guard=guard, tree_of=tree_of)
    # asyncio, whose sockets are the guard's, and h11, which bounds the head of a request.
    common: dict[str, Any] = {
        "access_log": False,
        "log_level": "warning",
        "loop": "asyncio",
        "http": "h11",
        "ws": "none",
    }
    common["proxy_headers"] = (
        False  # The caller is who holds the connection, not who a header says.
    )
    # The coordinator has an entrance, a thread and an event loop of its own: no site can stand in its way.
    own = uvicorn.Server(uvicorn.Config(Noting(app, ledger), lifespan="off", **common))
    threading.Thread(target=own.run, kwargs={"sockets": [inner]}, daemon=True).start()
    serving = uvicorn.Config(
        door,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        backlog=BACKLOG,
        **common,
    )
    serving.load()
    if serving.ssl is not None:
        serving.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    uvicorn.Server(serving).run(sockets=sockets)


def _raise_descriptors() -> int:
    """Raises the limit of open files; returns how many connections fit into it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = int(min(hard if hard != resource.RLIM_INFINITY else inf, 2 * MOST_CONNECTIONS))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(BACKLOG, min(limit - OWN_DESCRIPTORS, MOST_CONNECTIONS))


def _follow(parent: int, guard: Guard, place: str) -> None:
    """Ends with the coordinator, however that ends: its next one needs the port."""
    while os.getppid() == parent:
        guard.sweep()
        time.sleep(0.2)
    with suppress(OSError):
        os.unlink(place)
        os.rmdir(os.path.dirname(place))
    os._exit(0)


def _count(tree: Any, most: int) -> int:
    """Nodes of a tree; stops when there are more than ``most``."""
    count, left = 0, [tree]
    while left and count <= most:
        count += 1
        left.extend(left.pop().children)
    return count


def _headers(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    """The headers of a request by name.

    Flower reads the first of several with one name, and the door must look at the same one.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if (key := name.lower()) in found and key.startswith((b"flwr-", SIGNED.encode())):
            raise NotLetIn(400, f"{key.decode()} comes twice")
        found.setdefault(key, value)
    return found


async def _body(receive: Any, most: float = inf) -> bytes:
    """Reads a body. A chunked one may be longer than its Content-Length, which then means nothing."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                event = await receive()
                if event["type"] != "http.request":
                    raise NotLetIn(400, "the body broke off")
                body += event.get("body", b"")
                if len(body) > most:
                    raise NotLetIn(413, f"a body of more than {most:.0f} bytes")
                if not event.get("more_body"):
                    return bytes(body)
    except TimeoutError as error:
        raise NotLetIn(408, f"the body took more than {BODY_SECONDS:.0f} s") from error


def _again(body: bytes, receive: Any) -> Any:
    """A `receive` that begins with a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Any:
        return left.pop() if left else await receive()

    return first


async def _refuse(send: Any, refused: NotLetIn) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": str(refused).encode()})


if __name__ == "__main__":
    main()
