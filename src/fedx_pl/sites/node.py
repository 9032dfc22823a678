"""A site's side of Flower: connect, take messages, answer them.

Flower's own SuperNode would load an app from the coordinator and run it here, in a new process for every message. A
site of ours speaks the same protocol by Flower's own client classes, but runs nothing that comes over the wire, and
keeps its model and images in one process. Undocumented modules, as in `link`.
"""

import ssl
import threading
from collections.abc import Callable
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
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedx_pl.sites import wire
from fedx_pl.sites.door import SIGNED, sign
from fedx_pl.sites.keys import public_pem
from fedx_pl.sites.records import read, record
from fedx_pl.sites.seal import Trust

HEARTBEAT_SECONDS = 10.0  # Flower's shortest; after two without one a site counts as gone.


class Unreachable(Exception):
    """Nobody answers, or somebody who has forgotten us: try again."""


class Refused(Exception):
    """The other side answers and will not have us."""


class WrongCertificate(Refused):
    """It is not who it should be."""


class Incoming(NamedTuple):
    """A message for this site."""

    kind: str
    content: wire.Content | None
    error: str  # why there is no content
    message: Message


class Signing:
    """Signs path and body of every request; Flower's own interceptor signs the time alone."""

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        self._sign = lambda text: private.sign(text, ec.ECDSA(hashes.SHA384()))

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Called by Flower's client for each attempt."""
        request = context.request
        request.headers[SIGNED] = sign(request.url.path, request.read(), self._sign)
        return call_next(context)


class Node:
    """A connection to the coordinator; make a new one when it is lost."""

    def __init__(
        self,
        server: str,
        ca: Path | None,
        private: ec.EllipticCurvePrivateKey,
        before: int | None = None,
        *,
        trust: Trust | None = None,
    ) -> None:
        """Connects.

        Args:
            server: HOST:PORT.
            ca: who vouches for the coordinator; None: no TLS, and this site makes its key known by itself.
            private: the site's key.
            before: number of this site's last connection. The coordinator may not have seen that it ended, and would
                not let the site in a second time.
            trust: which messages are the coordinator's; one for all connections remembers those that have come.
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
            raise WrongCertificate(f"{ca} is no usable certificate ({error})") from error
        public = public_pem(private)
        self._stop = threading.Event()
        self._lost = False
        try:
            if ca is None:
                with suppress(Refused):  # Known already.
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
        """A message, if there is one."""
        if self._lost:
            raise Unreachable("the coordinator has forgotten this site")
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        envelope, tree = (
            message_from_proto(response.messages_list[0]),
            response.message_object_trees[0],
        )
        run = envelope.metadata.run_id
        pull = objects.make_pull_object_fn_protobuf(
            self._calling(self._client.PullObject), self._node, run
        )
        confirm = objects.make_confirm_message_received_fn_protobuf(
            self._calling(self._client.ConfirmMessageReceived), self._node, run
        )
        try:
            message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
        except (ObjectPullError, KeyError, TypeError, ValueError) as error:
            raise Unreachable("a message broke off") from error
        message.metadata.__dict__["_message_id"] = tree.object_id
        kind = message.metadata.message_type
        try:
            if message.has_error():
                raise wire.BadMessage("it is an error, which the coordinator never sends")
            content = read(
                message.content, check=partial(self._trust.check, kind) if self._trust else None
            )
        except wire.BadMessage as error:
            return Incoming(kind, None, wire.plain(error), message=message)
        return Incoming(kind, content, "", message=message)

    def answer(self, incoming: Incoming, content: wire.Content) -> None:
        """Sends the answer to a message."""
        run = incoming.message.metadata.run_id
        TaskIdentity.run_id, TaskIdentity.node_id = run, self._node.node_id
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
        """Ends the connection.

        Args:
            leave: for good, so that nobody waits for this site; else it is asked again when it is back.
        """
        self._stop.set()
        self._heart.join()
        if leave:
            self._leave(self.number)
        self._client.close()

    def _leave(self, number: int) -> None:
        with suppress(Unreachable, Refused):
            self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=number))

    def _beat(self) -> None:
        """Says that this site is there; gives up when the coordinator does not know it any more."""
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        while not self._stop.wait(HEARTBEAT_SECONDS * 0.7):
            try:
                if not self._call(self._client.SendNodeHeartbeat, request).success:
                    raise Refused
            except Unreachable:
                continue
            except Refused:
                self._lost = True
                return

    def _calling(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda request: self._call(function, request)

    def _call(self, function: Callable[[Any], Any], request: Any) -> Any:
        try:
            return function(request)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (502, 503, 504):  # A proxy whose coordinator is away.
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
        except ValueError as error:  # Something else listens there.
            raise Unreachable("whoever answers does not speak Flower's protocol") from error


def _certificate_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
