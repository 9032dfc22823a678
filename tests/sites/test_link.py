"""Sites at a real SuperLink with TLS and keys: who is let in, and what bad answers do."""

import base64
import itertools
import json
import math
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import federation_parts as parts
import pytest
import torch
from helpers import PATIENCE

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from fedx_pl.cli import sites as commands
from fedx_pl.cli.main import main
from fedx_pl.errors import UserError
from fedx_pl.sites import door, keys, link, node, records, wire
from fedx_pl.sites.link import Link
from fedx_pl.sites.node import Node, Refused, Unreachable, WrongCertificate
from fedx_pl.sites.records import Reply
from fedx_pl.sites.wire import Content

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:GitWildMatchPattern")]

DESCRIPTORS = 256  # open files that the SuperLink starts with
HELLO = Content({"run": "ab"}, {"w": torch.arange(6.0).reshape(2, 3)})


@contextmanager
def at_the_site() -> Iterator[None]:
    """Lets the coordinator and its sites share this process, as Flower has one identity each."""
    from flwr.supercore.task_identity import TaskIdentity

    before = TaskIdentity.run_id, TaskIdentity.node_id
    try:
        yield
    finally:
        TaskIdentity.run_id, TaskIdentity.node_id = before


@pytest.fixture(scope="module")
def port() -> int:
    return parts.free_port()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, port: int) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    keys.make(folder, "coordinator.example.org", port, ["a", "b"])
    return folder


@pytest.fixture(scope="module")
def coordinator(made: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    """A coordinator that is not on 127.0.0.1, with a dead proxy in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        patch.setenv("NO_PROXY", "")
        patch.setattr(link, "PATIENCE_SECONDS", 1.0)
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, most))
        try:
            found = Link(
                tmp_path_factory.mktemp("run"), "127.0.0.2", port, keys.load_server(made / "server")
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        yield found
        found.close()


class Joined:
    """A site at the coordinator."""

    def __init__(self, made: Path, name: str, port: int) -> None:
        known = keys.load_site(made / "sites" / name)
        self.node, self.left = Node(f"127.0.0.1:{port}", known.ca, known.private), False

    def next(self) -> node.Incoming:
        give_up = time.monotonic() + PATIENCE
        while (found := self.node.next()) is None:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        return found

    def answer(self, incoming: node.Incoming, content: Content) -> None:
        with at_the_site():
            self.node.answer(incoming, content)

    def leave(self) -> None:
        if not self.left:
            self.node.close(leave=True)
        self.left = True


@pytest.fixture
def join(coordinator: Link, made: Path, port: int) -> Iterator[Callable[[str], Joined]]:
    joined = []

    def make(name: str) -> Joined:
        joined.append(Joined(made, name, port))
        return joined[-1]

    yield make
    for one in joined:
        one.leave()


def wait(coordinator: Link, *messages: str, seconds: float = PATIENCE) -> list[Reply]:
    give_up, found = time.monotonic() + seconds, []
    while len(found) < len(messages):
        assert time.monotonic() < give_up, found
        found += coordinator.receive(
            [one for one in messages if one not in {reply.message for reply in found}]
        )
        time.sleep(0.05)
    return found


def names(coordinator: Link) -> list[str]:
    return sorted(seen.name for seen in coordinator.sites())


# --- who is let in --------------------------------------------------------------------------------


def test_a_registered_site_gets_in_and_answers(
    coordinator: Link, join: Callable[[str], Joined]
) -> None:
    site = join("a")
    (seen,) = coordinator.sites()
    assert (seen.name, seen.node) == ("a", site.node.number)
    message = coordinator.send(seen.node, wire.HELLO, HELLO, 600)
    assert list(coordinator.receive([message])) == []
    incoming = site.next()
    assert incoming.kind == wire.HELLO
    assert incoming.content is not None
    assert incoming.content.meta == HELLO.meta
    assert torch.equal(incoming.content.tensors["w"], HELLO.tensors["w"])
    site.answer(incoming, Content({"site": "a"}, {"w": torch.ones(2)}))
    (reply,) = wait(coordinator, message)
    assert reply.content is not None
    assert reply.content.meta == {"site": "a"}
    assert torch.equal(reply.content.tensors["w"], torch.ones(2))
    site.leave()
    assert coordinator.sites() == []


def test_weights_of_some_size_pass(coordinator: Link, join: Callable[[str], Joined]) -> None:
    """Flower splits these 20 MB into parts of 5 MB."""
    site = join("a")
    large = Content({}, {"w": torch.randn(5_000_000)})
    message = coordinator.send(site.node.number, wire.TRAIN, large, 600)
    incoming = site.next()
    assert incoming.content is not None
    site.answer(incoming, incoming.content)
    (reply,) = wait(coordinator, message)
    assert reply.content is not None
    assert torch.equal(reply.content.tensors["w"], large.tensors["w"])


def test_an_unregistered_key_is_refused(coordinator: Link, made: Path, port: int) -> None:
    stranger = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(Refused):
        Node(f"127.0.0.1:{port}", made / "sites" / "a" / "ca.crt", stranger)
    assert coordinator.sites() == []


def test_without_a_key_nothing_is_answered(coordinator: Link, made: Path, port: int) -> None:
    trusted = ssl.create_default_context(cafile=str(made / "ca.crt"))
    with httpx.Client(
        verify=trusted, base_url=f"https://127.0.0.1:{port}", trust_env=False
    ) as client:
        headers = {"content-type": "application/x-protobuf"}
        for call in (
            "register-node",
            "activate-node",
            "pull-messages",
            "push-messages",
            "pull-object",
        ):
            found = client.post(f"/v1/fleet/{call}", content=b"", headers=headers)
            assert 400 <= found.status_code < 500, (call, found.text)
            assert found.status_code == 401 or not found.content or b"node_id" not in found.content
    assert coordinator.sites() == []


def test_a_coordinator_of_another_ca_is_not_trusted(
    coordinator: Link, made: Path, port: int, tmp_path: Path
) -> None:
    keys.make(tmp_path, "127.0.0.1", port, ["a"])  # The right host, the wrong authority.
    known = keys.load_site(made / "sites" / "a")
    with pytest.raises(WrongCertificate, match="not one of this federation's CA"):
        Node(f"127.0.0.1:{port}", tmp_path / "sites" / "a" / "ca.crt", known.private)
    (tmp_path / "nonsense.crt").write_text("nonsense")
    for file in ("nonsense.crt", "missing.crt"):
        with pytest.raises(WrongCertificate, match="not a usable certificate"):
            Node(f"127.0.0.1:{port}", tmp_path / file, known.private)
    assert coordinator.sites() == []


def test_a_name_that_is_not_the_certificate_s_is_not_trusted(
    coordinator: Link, made: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HTTPS_PROXY")
    known = keys.load_site(made / "sites" / "a")
    with pytest.raises(WrongCertificate, match="not one of this federation's CA"):
        Node(f"127.0.0.2:{port}", known.ca, known.private)


def test_plaintext_is_refused(coordinator: Link, made: Path, port: int) -> None:
    known = keys.load_site(made / "sites" / "a")
    with pytest.raises(Unreachable):
        Node(f"127.0.0.1:{port}", None, known.private)
    with socket.create_connection(("127.0.0.1", port), timeout=120) as plain:
        plain.sendall(
            b"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        )
        plain.settimeout(120)
        assert not plain.recv(100).startswith(b"HTTP/1.1 2")
    assert coordinator.sites() == []


def test_the_command_of_a_site_that_is_refused_ends_and_says_why(
    coordinator: Link,
    made: Path,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(commands, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    keys.make(tmp_path / "keys", "localhost", port, ["stranger"])
    words = [
        "federate",
        "client",
        "--data",
        str(tmp_path),
        "--keys",
        str(tmp_path / "keys" / "sites" / "stranger"),
    ]
    assert main(words) == 2
    assert (
        f"localhost:{port} is not the coordinator of this site's keys: its certificate"
        in capsys.readouterr().err
    )
    (tmp_path / "keys" / "sites" / "stranger" / "ca.crt").write_bytes(
        (made / "ca.crt").read_bytes()
    )
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"the coordinator at localhost:{port} refuses this site" in error
    assert (
        "ask there for this site's key in KEYS/server/sites, "
        "and see that this machine's clock is right"
    ) in error
    assert coordinator.sites() == []


def test_a_key_is_in_use_once_and_its_owner_may_come_back_at_once(
    coordinator: Link, made: Path, port: int, join: Callable[[str], Joined]
) -> None:
    """After a kill, the SuperLink considers the site online for another 20 s."""
    first = join("a")
    (before,) = coordinator.sites()
    with pytest.raises(Refused):
        join("a")
    known = keys.load_site(made / "sites" / "a")
    again = Node(f"127.0.0.1:{port}", known.ca, known.private, first.node.number)
    try:
        (after,) = coordinator.sites()
        assert after.node == before.node
        assert after.since != before.since
    finally:
        again.close(leave=True)


def test_a_node_that_was_put_in_by_another_way_is_no_site(
    coordinator: Link, made: Path, port: int
) -> None:
    """The door only knows the keys that the coordinator started with, whatever Flower knows."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    private = ec.generate_private_key(ec.SECP384R1())
    control = coordinator._control()
    control.RegisterNode(RegisterNodeRequest(public_key=keys.public_pem(private), name="mallory"))
    control.close()
    with pytest.raises(Refused, match="this key is not registered"):
        Node(f"127.0.0.1:{port}", made / "ca.crt", private)
    assert coordinator.sites() == []


def test_a_clock_that_is_half_a_minute_ahead_is_no_reason(
    join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datetime

    from flwr.supernode import node_auth_http_interceptor as flower

    def later() -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)

    monkeypatch.setattr(flower, "now", later)
    monkeypatch.setattr(
        door, "datetime", type("Clock", (), {"now": staticmethod(lambda _: later())})
    )
    join("a")


# --- who is on the same machine, or has no key ----------------------------------------------------


def test_a_local_user_reaches_nothing_of_the_coordinator_s(
    coordinator: Link, made: Path, port: int
) -> None:
    """Registering, listing, stopping and greeting all fail, at the port and at the socket."""
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StopRunRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient

    ca = (made / "ca.crt").read_bytes()
    control = ControlHttpClient.from_server_address(f"127.0.0.1:{port}", False, ca, [])
    run = coordinator._grid.run.run_id
    for call in (
        lambda: control.ListNodes(ListNodesRequest()),
        lambda: control.ListRuns(ListRunsRequest()),
        lambda: control.StopRun(StopRunRequest(run_id=run)),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            call()
        assert refused.value.response.status_code == 403
    control.close()
    trusted = ssl.create_default_context(cafile=str(made / "ca.crt"))
    with httpx.Client(
        verify=trusted, base_url=f"https://127.0.0.1:{port}", trust_env=False
    ) as client:
        for path in ("/health", "/docs", "/v1/runtime/get-nodes", "/v1/runtime/push-messages"):
            assert client.post(path).status_code == 403
            assert client.get(path).status_code == 403
    assert stat.S_IMODE(coordinator._entrance.parent.stat().st_mode) == 0o700
    files = [file for file in coordinator._folder.rglob("*") if file.is_file()]
    assert files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def half_request(
    port: int, head: str, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> ssl.SSLSocket:
    """A TLS connection that has sent some bytes and then waits."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = version
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    found = context.wrap_socket(plain, server_hostname="localhost")
    found.sendall(head.encode())
    return found


def test_a_large_body_without_a_key_is_refused_unread(coordinator: Link, port: int) -> None:
    """The answer arrives when only the head was sent."""
    head = (
        "POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
    )
    with half_request(port, f"{head}Content-Length: 300000000\r\n\r\n") as stranger:
        assert stranger.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_which_versions_of_tls(coordinator: Link, port: int, version: ssl.TLSVersion) -> None:
    with half_request(port, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", version) as found:
        assert found.recv(100).startswith(b"HTTP/1.1 403")


def test_half_requests_do_not_keep_sites_out(
    coordinator: Link, join: Callable[[str], Joined], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than the SuperLink's limit of open files; some never start TLS."""
    half = [
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(DESCRIPTORS)
    ]
    half += [half_request(port, "POST /v1/fleet/pull-messages HTTP/1.1\r\nHo") for _ in range(50)]
    try:
        site = join("a")
        message = coordinator.send(site.node.number, wire.HELLO, HELLO, 600)
        site.answer(site.next(), Content({"site": "a"}, {}))
        (reply,) = wait(coordinator, message)
        assert reply.content is not None
    finally:
        for one in half:
            one.close()


# --- a site that acts as another ------------------------------------------------------------------


def push(site: Joined, tree: Any = None, **metadata: Any) -> Any:
    """Posts a forged message: an error with any sender, any receiver and any tree of parts."""
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.app.message import make_message
    from flwr.app.metadata import Metadata
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    fields: dict[str, Any] = {
        "run_id": 1,
        "message_id": "",
        "src_node_id": site.node.number,
        "dst_node_id": 1,
        "reply_to_message_id": "",
        "group_id": "",
        "created_at": time.time(),
        "ttl": 60.0,
        "message_type": wire.HELLO,
    }
    message: Message = make_message(metadata=Metadata(**fields | metadata), error=Error(0, "boo"))
    tree = tree or get_object_tree(message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    request = PushMessagesRequest(
        node=site.node._node,
        messages_list=[message_to_proto(message)],
        message_object_trees=[tree],
    )
    return site.node._call(site.node._client.PushMessages, request)


def test_a_site_sends_no_instructions_and_none_in_another_s_name(
    coordinator: Link, join: Callable[[str], Joined]
) -> None:
    """b greets a as the coordinator, answers as a, and sends an answer nobody asked for."""
    a, b = join("a"), join("b")
    run, asked = (
        coordinator._grid.run.run_id,
        coordinator.send(a.node.number, wire.TRAIN, HELLO, 600),
    )
    with pytest.raises(Refused, match="in the name of another"):
        push(b, run_id=run, src_node_id=1, dst_node_id=a.node.number)
    with pytest.raises(Refused, match="in the name of another"):
        push(b, run_id=run, src_node_id=a.node.number, reply_to_message_id=asked)
    with pytest.raises(Unreachable, match="too late"):
        push(b, run_id=run, reply_to_message_id=asked)
    with pytest.raises(Unreachable, match="too late"):
        push(b, run_id=run, dst_node_id=a.node.number)
    incoming = a.next()
    assert incoming.kind == wire.TRAIN
    a.answer(incoming, Content({"site": "a"}, {}))
    (reply,) = wait(coordinator, asked)
    assert reply.content is not None
    assert a.node.next() is None


def test_an_error_of_a_site_is_an_answer_like_any_other(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it copies the SuperLink's error for an offline site, which is not a fault."""
    from flwr.app.error import Error
    from flwr.common.constant import ErrorCode

    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    incoming, make = site.next(), node.Message
    error = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
    monkeypatch.setattr(node, "Message", lambda record, *, reply_to: make(error, reply_to=reply_to))
    site.answer(incoming, Content({}, {}))
    (reply,) = wait(coordinator, message)
    assert (reply.content, reply.error, reply.offline) == (None, "gone", False)


def test_a_site_believes_only_what_the_coordinator_signed_for_it(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forges messages as an attacker at the SuperLink or at a TLS proxy could."""
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.app.message import make_message

    a, b = join("a"), join("b")

    def error_of(record: Any) -> str:
        coordinator._grid.push_messages([Message(record, a.node.number, wire.HELLO, ttl=600)])
        incoming = a.next()
        assert incoming.content is None
        return incoming.error

    assert "not signed by the coordinator" in error_of(records.record(HELLO))
    for_another, _ = coordinator._record(b.node.number, wire.HELLO, HELLO)
    assert "for this site" in error_of(for_another)
    another_kind, _ = coordinator._record(a.node.number, wire.TRAIN, HELLO)
    assert "for this site" in error_of(another_kind)
    changed, _ = coordinator._record(a.node.number, wire.HELLO, HELLO)
    changed["meta"]["json"] = '{"run": "cd"}'
    assert "for this site" in error_of(changed)
    right, _ = coordinator._record(a.node.number, wire.HELLO, HELLO)
    coordinator._grid.push_messages([Message(right, a.node.number, wire.HELLO, ttl=600)])
    assert a.next().content is not None
    assert "it has come before" in error_of(right)
    coordinator._grid.push_messages(
        [
            make_message(
                metadata=Message(right, a.node.number, wire.HELLO, ttl=600).metadata,
                error=Error(0, "boo"),
            )
        ]
    )
    incoming = a.next()
    assert (incoming.content, incoming.error) == (
        None,
        "it is an error, which the coordinator never sends",
    )
    a.answer(incoming, Content({"site": "a", "error": "no"}, {}))


# --- small answers that are a lot of work ---------------------------------------------------------


def test_trees_that_double_are_refused(coordinator: Link, join: Callable[[str], Joined]) -> None:
    """Each names the previous one twice, so 20 of them would be a million parts."""
    from flwr.proto.message_pb2 import ObjectTree

    site, run = join("b"), coordinator._grid.run.run_id

    def double(name: str, before: str) -> None:
        asked = coordinator.send(site.node.number, wire.HELLO, HELLO, 600)
        site.next()
        children = [ObjectTree(object_id=before), ObjectTree(object_id=before)]
        push(
            site,
            ObjectTree(object_id=name, children=children),
            run_id=run,
            reply_to_message_id=asked,
        )

    double("1" * 64, before="0" * 64)  # As large as it looks.
    with pytest.raises(Refused, match="a part is named twice"):
        double("2" * 64, before="1" * 64)


def test_a_tree_that_doubles_within_itself_is_refused(
    coordinator: Link, join: Callable[[str], Joined]
) -> None:
    """The same in one answer: 512 parts here, and up to 2^80 with a larger network."""
    from flwr.proto.message_pb2 import ObjectTree

    site, run = join("b"), coordinator._grid.run.run_id
    asked = coordinator.send(site.node.number, wire.HELLO, HELLO, 600)
    site.next()
    identifiers = [f"{level:064x}" for level in range(1, 10)]
    levels = [
        ObjectTree(object_id=name, children=[ObjectTree(object_id=before)] * 2)
        for before, name in itertools.pairwise(identifiers)
    ]
    with pytest.raises(Refused, match="a part is named twice"):
        push(
            site,
            ObjectTree(object_id="f" * 64, children=levels),
            run_id=run,
            reply_to_message_id=asked,
        )


def test_what_a_site_never_reads_does_not_stay_in_memory(
    coordinator: Link, join: Callable[[str], Joined]
) -> None:
    """A site ignores the weights of five rounds; the first are deleted."""
    from flwr.proto.message_pb2 import PullObjectRequest

    site, client = join("a"), coordinator._grid._runtime_client
    where = {"node": coordinator._grid.node, "run_id": coordinator._grid.run.run_id}
    sent = [
        coordinator.send(site.node.number, wire.TRAIN, Content({}, {"w": torch.full((9,), i)}), 600)
        for i in map(float, range(5))
    ]
    found = [client.PullObject(PullObjectRequest(object_id=one, **where)) for one in sent]
    assert [one.object_found for one in found] == [False, True, True, True, True]
    for number in map(float, range(1, 5)):  # The others are there, and read now.
        incoming = site.next()
        assert incoming.content is not None
        assert incoming.content.tensors["w"][0] == number


def test_a_body_without_a_length_is_cut_off(coordinator: Link, made: Path, port: int) -> None:
    """The body is chunked and correctly signed; its Content-Length must be ignored."""
    from cryptography.hazmat.primitives import hashes

    path, body = "/v1/fleet/pull-messages", bytes(door.CALLS["pull-messages"] + 1)
    private = keys.load_site(made / "sites" / "a").private
    signed = door.sign(path, body, lambda text: private.sign(text, ec.ECDSA(hashes.SHA384())))
    public = base64.b64encode(keys.public_pem(private)).decode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n"
        f"flwr-public-key: {public}\r\nx-fedx-signed: {signed}\r\n\r\n"
    )
    with half_request(port, head) as caller:
        caller.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n")  # And no end.
        assert caller.recv(100).startswith(b"HTTP/1.1 413")


def test_an_answer_with_more_tensors_than_the_network_is_not_read(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    many = {f"t{number}": torch.zeros(0) for number in range(10_000)}
    incoming = site.next()
    site.answer(incoming, Content({"site": "a"}, many))
    monkeypatch.setattr(wire, "unpack", lambda *_: pytest.fail("it is read"))
    (reply,) = wait(coordinator, message)
    assert reply.error == "it has more or larger tensors than the network"


def test_an_answer_that_repeats_a_part_is_not_unfolded(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array names one part of 5 MB a thousand times."""
    from flwr.app import Array

    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    incoming, deflate = site.next(), Array.deflate

    def repeated(self: Array) -> bytes:
        from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

        fields = {
            "dtype": "uint8",
            "shape": [9],
            "stype": "safetensors",
            "arraychunk_ids": [0] * 1000,
        }
        return add_header_to_object_body(json.dumps(fields).encode(), self)

    with monkeypatch.context() as patch:
        patch.setattr(Array, "deflate", repeated)
        site.answer(incoming, Content({}, {"w": torch.zeros(1_000_000)}))
    assert Array.deflate is deflate
    (reply,) = wait(coordinator, message)
    assert reply.content is None
    assert "bytes of tensors" in reply.error


# --- answers that break off, or are made up -------------------------------------------------------


def test_an_upload_that_stops_keeps_nobody_waiting(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    """a announces its answer and is cut off; b is read at once; then a uploads the rest."""
    a, b = join("a"), join("b")
    lives = (
        600.0  # A coordinator that waited for a's upload would wait as long as the message lives.
    )
    asked = {
        name: coordinator.send(one.node.number, wire.TRAIN, HELLO, lives)
        for name, one in (("a", a), ("b", b))
    }
    incoming = a.next()
    rest: list[Any] = []
    monkeypatch.setattr(node, "push_objects", lambda *words, **more: rest.append((words, more)))
    a.answer(incoming, Content({"site": "a"}, {"w": torch.ones(2)}))
    monkeypatch.undo()
    started = time.monotonic()
    b.answer(b.next(), Content({"site": "b"}, {}))
    (reply,) = wait(coordinator, asked["b"])
    assert reply.content is not None
    assert all(list(coordinator.receive([asked["a"]])) == [] for _ in range(3))
    assert time.monotonic() - started < lives
    ((words, more),) = rest
    node.push_objects(*words, **more)
    (reply,) = wait(coordinator, asked["a"])
    assert reply.content is not None
    assert reply.content.meta == {"site": "a"}


def test_an_upload_that_never_comes_is_given_up_when_the_site_is_gone(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    incoming = site.next()
    monkeypatch.setattr(node, "push_objects", lambda *words, **more: None)
    site.answer(incoming, Content({"site": "a"}, {}))
    assert list(coordinator.receive([message])) == []
    site.leave()
    assert list(coordinator.receive([message])) == []  # The engine sees that it is gone.
    assert coordinator.sites() == []


def test_made_up_answers_are_refused_and_others_are_read(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    site = join("a")

    def records() -> Iterator[RecordDict]:
        yield RecordDict({})
        yield RecordDict({"meta": ConfigRecord({"json": "{}"})})
        yield RecordDict(
            {"meta": ConfigRecord({"json": 3}), "tensors": ArrayRecord({"blob": blob(b"")})}
        )
        yield RecordDict(
            {"meta": ConfigRecord({"json": "{"}), "tensors": ArrayRecord({"blob": blob(b"")})}
        )
        yield RecordDict(
            {
                "meta": ConfigRecord({"json": "{}"}),
                "tensors": ArrayRecord({"blob": blob(b"junk" * 9)}),
            }
        )

    def blob(data: bytes) -> Array:
        return Array(dtype="uint8", shape=(len(data),), stype="safetensors", data=data)

    for record in records():
        message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
        incoming = site.next()
        with monkeypatch.context() as patch:
            patch.setattr(node, "record", lambda _, record=record: record)
            site.answer(incoming, Content({}, {}))
        (reply,) = wait(coordinator, message)
        assert reply.content is None
        assert reply.error
        assert not reply.offline


@pytest.mark.parametrize(
    "odd",
    [
        {"ttl": math.nan},
        {"ttl": math.inf},
        {"ttl": 1e-9},
        {"created_at": math.nan},
        {"created_at": math.inf},
        {"created_at": 1e300},
        {"message_type": "\x1b[2J" * 1000},
        {"group_id": "x" * 500_000},
        {"dst_node_id": 2**63},
        {"delivered_at": "now"},
    ],
    ids=str,
)
def test_an_envelope_that_makes_no_sense_ends_nothing(
    coordinator: Link, join: Callable[[str], Joined], odd: dict[str, Any]
) -> None:
    """Whether Flower accepts it or not, the same site can answer afterwards."""
    site, run = join("a"), coordinator._grid.run.run_id
    asked = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    site.next()
    with suppress(Refused, Unreachable, TypeError, ValueError):
        push(site, run_id=run, reply_to_message_id=asked, **odd)
    for reply in coordinator.receive([asked]):
        assert reply.content is None
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    site.answer(site.next(), Content({"site": "a"}, {}))
    (reply,) = wait(coordinator, message)
    assert reply.content is not None


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_an_answer_cannot_pass_for_another_site_s(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """b claims to answer a's message, on the envelope that the SuperLink reads or only inside."""
    a, b = join("a"), join("b")
    asked = {
        name: coordinator.send(one.node.number, wire.TRAIN, HELLO, 600)
        for name, one in (("a", a), ("b", b))
    }
    incoming, make, to_proto = b.next(), node.Message, node.message_to_proto

    def forge(record: Any, *, reply_to: Any) -> Any:
        reply = make(record, reply_to=reply_to)
        reply.metadata.__dict__["_reply_to_message_id"] = asked["a"]
        return reply

    def envelope(message: Any) -> Any:
        proto = to_proto(message)
        proto.metadata.reply_to_message_id = asked["a" if where == "outside" else "b"]
        return proto

    monkeypatch.setattr(node, "Message", forge)
    monkeypatch.setattr(node, "message_to_proto", envelope)
    with pytest.raises(Unreachable, match="too late") if where == "outside" else nullcontext():
        b.answer(incoming, Content({"site": "b"}, {}))
    monkeypatch.undo()
    replies = coordinator.receive(list(asked.values()))
    assert [reply.message for reply in replies] == ([asked["b"]] if where == "inside" else [])
    a.answer(a.next(), Content({"site": "a"}, {}))
    (reply,) = wait(coordinator, asked["a"])
    assert reply.content is not None
    assert reply.content.meta == {"site": "a"}


def test_words_in_an_error_do_not_reach_the_terminal_as_commands(
    coordinator: Link, join: Callable[[str], Joined], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.app.error import Error

    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    incoming, make = site.next(), node.Message
    monkeypatch.setattr(
        node,
        "Message",
        lambda record, *, reply_to: make(Error(0, "\x1b[2Jboo\n"), reply_to=reply_to),
    )
    site.answer(incoming, Content({}, {}))
    (reply,) = wait(coordinator, message)
    assert (reply.content, reply.error, reply.offline) == (None, "?[2Jboo", False)


def test_a_message_to_a_site_that_has_left_is_answered_for_it(
    coordinator: Link, join: Callable[[str], Joined]
) -> None:
    site = join("a")
    message = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    site.leave()
    late = coordinator.send(site.node.number, wire.TRAIN, HELLO, 600)
    replies = wait(coordinator, message, late)
    assert all(reply.offline and reply.content is None for reply in replies)
    assert {reply.error for reply in replies} == {wire.GONE}


# --- the end --------------------------------------------------------------------------------------


def test_a_superlink_that_dies_is_reported_and_the_port_is_free(
    coordinator: Link, made: Path, port: int
) -> None:
    """This test is last, since it kills the shared SuperLink."""
    os.kill(coordinator._process.pid, signal.SIGKILL)
    coordinator._process.wait(timeout=120)
    coordinator._grid._retry_invoker.wait_function = lambda _: pytest.fail("it waits for the dead")
    for call in (
        coordinator.sites,
        lambda: list(coordinator.receive(["x"])),
        lambda: coordinator.send(1, "query", HELLO, 9),
    ):
        with pytest.raises(
            UserError,
            match=r"SuperLink does not answer any more .*superlink\.log says why.*to resume",
        ):
            call()
    socket.create_server(("0.0.0.0", port)).close()


def test_without_keys_sites_register_themselves_and_the_rest_is_closed_too(tmp_path: Path) -> None:
    """This test follows the others, since Flower has one identity per process."""
    port = parts.free_port()
    with closing(Link(tmp_path, "127.0.0.1", port, None)) as insecure:
        site = Node(f"127.0.0.1:{port}", None, ec.generate_private_key(ec.SECP384R1()))
        message = insecure.send(site.number, wire.HELLO, HELLO, 600)
        incoming = site.next()
        assert incoming is not None
        with at_the_site():
            site.answer(incoming, Content({"site": "a"}, {}))
        (reply,) = wait(insecure, message)
        assert reply.content is not None
        for path in ("/health", "/v1/control/list-nodes", "/v1/fleet/unregister-node"):
            assert httpx.post(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 403
        site.close(leave=True)
    assert not insecure._entrance.parent.exists()
