"""A site's connection to the coordinator: receives messages and answers them.

Flower's own SuperNode would load an app from the coordinator and run it here, in a new process for
every message. A site speaks the same protocol through Flower's client classes, but runs nothing
that comes over the wire, and keeps its model and images in one process. As in `link`, these modules
of Flower are not documented.
"""

import math
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.supercore.inflatable import inflatable_protobuf_utils as objects
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedx_pl.sites import wire
from fedx_pl.sites.certificates import public_pem
from fedx_pl.sites.door import SIGNED, sign
from fedx_pl.sites.records import read, record, require_small
from fedx_pl.sites.seal import Trust

HEARTBEAT_SECONDS = 10.0  # Flower's shortest; after two missed ones a site counts as gone.
LEAVE_SECONDS = 5.0  # how long a site that ends waits for a coordinator that does not answer
MAX_RESPONSE = 64 * 2**20  # bytes of one HTTP response; Flower splits weights into parts of 5 MiB
MAX_PARTS = 20_000  # of one message


class Unreachable(Exception):
    """Raised when nobody answers or the coordinator has forgotten this site; connect again."""


class Refused(Exception):
    """Raised when the coordinator rejects this site."""


class WrongCertificate(Refused):
    """Raised when the coordinator's certificate is not one of this federation."""


class Incoming(NamedTuple):
    """A message for this site."""

    kind: str
    content: wire.Content | None
    error: str  # why there is no content
    message: Message


class Signing:
    """Signs the path and body of every request; Flower's own interceptor signs only the time."""

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        self._sign = lambda text: private.sign(text, ec.ECDSA(hashes.SHA384()))

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Called by Flower's client for each attempt."""
        request = context.request
        request.headers[SIGNED] = sign(request.url.path, request.read(), self._sign)
        return call_next(context)


class Node:
    """A connection to the coordinator. Make a new one when it is lost."""

    def __init__(
        self,
        server: str,
        ca: Path | None,
        private: ec.EllipticCurvePrivateKey,
        before: int | None = None,
        *,
        trust: Trust | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        """Connects to the coordinator.

        Args:
            server: HOST:PORT.
            ca: certificates that vouch for the coordinator. None: no TLS, and this site registers
                its own key.
            private: the site's key.
            before: number of this site's last connection. The coordinator may not have noticed that
                it ended, and would refuse a second one.
            trust: checks the coordinator's signatures. Pass the same object to all connections of a
                site, so that a message cannot be repeated.
            max_bytes: the largest message that is read.
        """
        signed = [NodeAuthHttpInterceptor(private, private.public_key()), Signing(private)]
        try:
            self._trust = trust or (Trust(ca, private) if ca else None)
            self._client = FleetHttpClient.from_server_address(
                server,
                ca is None,
                ca and ca.read_bytes(),
                [RuntimeVersionHttpInterceptor("SuperNode"), *signed],
            )
        except (OSError, ValueError) as error:
            raise WrongCertificate(f"{ca} is not a usable certificate ({error})") from error
        _restrict(self._client._client)
        public = public_pem(private)
        self._max_bytes = max_bytes
        self._stop = threading.Event()
        self._lost = False
        try:
            if ca is None:
                with suppress(Refused):  # It is registered already.
                    self._call(
                        self._client.RegisterNode, RegisterNodeFleetRequest(public_key=public)
                    )
            if before is not None:
                self._leave(before)
            request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_SECONDS)
            self.number = self._call(self._client.ActivateNode, request).node_id
        except BaseException:
            self._client.close()
            raise
        self._node = FlowerNode(node_id=self.number)
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    def next(self) -> Incoming | None:
        """The next message, if there is one.

        A message that cannot be read is returned without its content, so that it is answered like
        any other.
        """
        if self._lost:
            raise Unreachable("the coordinator has forgotten this site")
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        tree = response.message_object_trees[0]
        message = message_from_proto(response.messages_list[0])  # without its content
        try:
            message = self._pull(tree, message.metadata.run_id)
            kind = message.metadata.message_type
            if message.has_error():
                raise wire.BadMessage("it is an error, which the coordinator never sends")
            check = partial(self._trust.check, kind) if self._trust else None
            return Incoming(kind, read(message.content, check=check), "", message=message)
        except (Unreachable, Refused, KeyboardInterrupt, SystemExit):
            raise
        except wire.BadMessage as error:
            reason = wire.plain(error)
        except BaseException as error:  # Readers in native code may raise anything, also a panic.
            reason = f"it cannot be read ({type(error).__name__})"
        finally:
            message.metadata.__dict__["_message_id"] = tree.object_id
        return Incoming(message.metadata.message_type, None, reason, message=message)

    def _pull(self, tree: Any, run: int) -> Message:
        """Downloads a message part by part, within the bounds of this site."""
        parts = [part.object_id for part in iterate_object_tree(tree)]
        download = objects.make_pull_object_fn_protobuf(
            self._calling(self._client.PullObject), self._node, run
        )
        confirm = objects.make_confirm_message_received_fn_protobuf(
            self._calling(self._client.ConfirmMessageReceived), self._node, run
        )
        sizes: list[int] = []

        def pull(part: str) -> bytes:
            content: bytes = download(part)
            sizes.append(len(content))
            self._require_size(sum(sizes))
            return content

        if len(parts) > MAX_PARTS:
            raise wire.BadMessage(f"it has {len(parts):,} parts; at most {MAX_PARTS:,} are read")
        try:
            contents = pull_objects(parts, pull)
        except ObjectPullError as error:
            raise Unreachable("a message broke off") from error
        confirm(tree.object_id)
        require_small(contents, self._max_bytes)  # One part may be named many times.
        message = inflate_object_from_contents(tree.object_id, contents)
        if not isinstance(message, Message):
            raise wire.BadMessage(f"it is a {type(message).__name__}")
        return message

    def _require_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise wire.BadMessage(
                f"it has more than {self._max_bytes:,.0f} bytes, which is what this site reads; "
                "its memory limit is site.max_memory_gb"
            )

    def answer(self, incoming: Incoming, content: wire.Content) -> None:
        """Sends the answer to a message."""
        run = incoming.message.metadata.run_id
        TaskIdentity.run_id = run
        TaskIdentity.node_id = self._node.node_id
        reply = Message(record(content), reply_to=incoming.message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],
            )
            response = self._call(self._client.PushMessages, request)
            push = objects.make_push_object_fn_protobuf(
                self._calling(self._client.PushObject), self._node, run, response.session_id
            )
            try:
                push_objects(
                    get_all_nested_objects(reply),
                    push,
                    object_ids_to_push=set(response.objects_to_push),
                )
            except ObjectPushError as error:
                raise Unreachable("the answer came too late") from error

    def close(self, *, leave: bool) -> None:
        """Ends the connection. Does not raise.

        Args:
            leave: tell the coordinator that this site is gone, so that nobody waits for it.
        """
        self._stop.set()
        self._client._client.timeout = LEAVE_SECONDS
        self._heart.join(LEAVE_SECONDS)
        if leave:
            self._leave(self.number)
        with suppress(Exception):
            self._client.close()

    def _leave(self, number: int) -> None:
        with suppress(Exception):  # The coordinator notices it by itself, after two heartbeats.
            self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=number))

    def _beat(self) -> None:
        """Sends heartbeats until the coordinator does not know this site any more."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._stop.wait(HEARTBEAT_SECONDS * 0.7):
            try:
                if not self._call(self._client.SendNodeHeartbeat, request).success:
                    raise Refused
            except Unreachable:
                continue
            except BaseException:  # Whatever it is: a thread would print it, and end unnoticed.
                self._lost = True
                return

    def _calling(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda request: self._call(function, request)

    def _call(self, function: Callable[[Any], Any], request: Any) -> Any:
        try:
            return function(request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (502, 503, 504):  # A proxy that cannot reach the coordinator.
                raise Unreachable(f"HTTP {status}") from error
            if status == 410:
                raise Unreachable("the answer came too late") from error
            raise Refused(f"HTTP {status}: {error.response.text[:200]}") from error
        except httpx.HTTPError as error:
            if _certificate_error(error):
                raise WrongCertificate(
                    f"its certificate is not one of this federation's CA ({error})"
                ) from error
            raise Unreachable(str(error) or type(error).__name__) from error
        except ValueError as error:  # Something else listens on that port.
            raise Unreachable("whoever answers does not speak Flower's protocol") from error


def _restrict(client: httpx.Client) -> None:
    """Limits what a response can make a site do.

    Redirects would send requests to any address of the site's own network. A compressed response of
    a few kB may stand for gigabytes.
    """
    client.follow_redirects = False
    client.headers["accept-encoding"] = "identity"
    client.event_hooks = {"response": [_bound]}


def _bound(response: httpx.Response) -> None:
    """Called before the body of a response is read."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx.RemoteProtocolError("a compressed response")
    response.stream = _BoundedStream(response.stream)


class _BoundedStream(httpx.SyncByteStream):
    """The body of a response, up to `MAX_RESPONSE` bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for chunk in self._stream:
            size += len(chunk)
            if size > MAX_RESPONSE:
                raise httpx.RemoteProtocolError(f"a response of more than {MAX_RESPONSE:,} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
