"""The door: access control at the coordinator's port.

It passes on only Fleet requests that a registered site has signed, and only those about messages
between that site and the coordinator. It checks the key before it reads the body.
"""

import asyncio
import base64
import hashlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any

from fedx_pl.sites.guard import Guard

FLEET = "/v1/fleet/"
# The header with time, nonce, SHA-256 of the body, and the signature of these and the path.
SIGNED = "x-fedx-signed"
CLOCK_SECONDS = 60.0  # that a site's clock may differ
BODY_SECONDS = 600.0
SMALL = 2**14
PART = 5 * 2**20  # Flower cuts what is larger.
# The calls of our sites, and how many bytes each may send. With keys, no site registers itself.
CALLS = {
    "register-node": SMALL,
    "activate-node": SMALL,
    "deactivate-node": SMALL,
    "send-node-heartbeat": SMALL,
    "pull-messages": SMALL,
    "pull-object": SMALL,
    "confirm-message-received": SMALL,
    "push-messages": 2**20,
    "push-object": PART + SMALL,
}
REMEMBERED = 4  # messages to a site that it may still answer; the coordinator waits for two at most
AT_ONCE = 16  # requests of one site; Flower's client makes four at most


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
        self.delete: Callable[[str], None] = lambda _: None  # of Flower's object store
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


class Door:
    """ASGI middleware that passes on what a registered site may ask, and refuses the rest."""

    def __init__(
        self,
        app: Any,
        *,
        sites: frozenset[bytes] | None,
        ledger: Ledger,
        guard: Guard,
        tree_of: Callable[[str], Any],
    ) -> None:
        """Sets who is let in.

        Args:
            app: Flower's app, behind the door.
            sites: registered public keys (PEM); with None, any key that registers itself.
            ledger: the messages that the coordinator has sent.
            guard: counts the connections.
            tree_of: finds the stored object tree of an identifier, or None.
        """
        self.app = app
        self.sites = sites
        self.ledger = ledger
        self.guard = guard
        self.tree_of = tree_of
        self._seen: dict[str, float] = {}  # requests by their nonce, until their time is over
        self._busy: Counter[bytes] = Counter()  # by key
        self._pushing = asyncio.Lock()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes a request on, or refuses it; the signature is checked before the body is read."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise NotLetIn(403, "the port answers nothing but HTTP")
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
            raise NotLetIn(403, "the port answers nothing but the Fleet API")
        return call

    def _signed(self, path: str, headers: dict[bytes, bytes]) -> tuple[bytes, str]:
        """Checks the signature; returns the caller's key and the digest that the body must have."""
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
            raise NotLetIn(401, "the signature is not valid") from error
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
        """Refuses requests that are not about a message to this site.

        Flower checks that the node is the caller's.
        """
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
            raise NotLetIn(400, "a request must hold one answer")
        about = request.messages_list[0].metadata
        tree = request.message_object_trees[0]
        if about.src_node_id != request.node.node_id:
            raise NotLetIn(403, "a message in the name of another site")
        if (asked := sent.get(about.reply_to_message_id)) is None:
            raise NotLetIn(410, "an answer to nothing that this site was sent")
        if asked.answer:
            raise NotLetIn(410, "an answer has been announced before")
        if about.message_id != tree.object_id:
            raise NotLetIn(400, "the message and its parts have different identifiers")
        # An answer is about as large as its question: both hold the weights.
        most = 2 * len(asked.parts) + 16
        if _count(tree, most) > most:
            raise NotLetIn(413, f"an answer of more than {most} parts")
        if not self._agrees(tree, {}):
            raise NotLetIn(400, "a part is named twice, with different parts of its own")
        asked.answer = tree.object_id

    def _agrees(self, tree: Any, seen: dict[str, Any]) -> bool:
        """Whether each part is the same wherever it is named.

        Otherwise a small tree could stand for a huge one.

        Args:
            tree: the object tree of an answer, or of a part of it.
            seen: parts of the answer so far, by their identifiers.
        """
        known = self.tree_of(tree.object_id)
        if known is None:
            known = seen.setdefault(tree.object_id, tree)
        if known is not tree:
            return bool(known == tree)
        return all(self._agrees(child, seen) for child in tree.children)


class Noting:
    """ASGI middleware behind the coordinator's socket that notes which messages it sends."""

    def __init__(self, app: Any, ledger: Ledger) -> None:
        self.app = app
        self.ledger = ledger

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
    """Makes the header `SIGNED` of a request.

    Args:
        path: the path of the request.
        body: the body of the request.
        signature_of: signs bytes with the site's key.
    """
    when = datetime.now(UTC).isoformat()
    nonce = secrets.token_hex(16)
    digest = hashlib.sha256(body).hexdigest()
    signature = base64.b64encode(signature_of(signed_text(path, when, nonce, digest))).decode()
    return f"{when} {nonce} {digest} {signature}"


def signed_text(path: str, when: str, nonce: str, digest: str) -> bytes:
    """The text that a site signs."""
    return "\n".join(["fedx-pl request 1", path, when, nonce, digest]).encode()


def _count(tree: Any, most: int) -> int:
    """Counts the nodes of a tree, up to one more than ``most``."""
    count = 0
    left = [tree]
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
    """Reads a body, and counts it: a chunked one may be longer than its Content-Length."""
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
    """Makes a `receive` that begins with a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Any:
        return left.pop() if left else await receive()

    return first


async def _refuse(send: Any, refused: NotLetIn) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": str(refused).encode()})
