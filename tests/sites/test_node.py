"""A site survives any answer of a hostile coordinator, within bounds on memory and time."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedx_pl.cli import sites as commands
from fedx_pl.sites import node, records, wire
from fedx_pl.sites.node import Node, Refused, Unreachable
from fedx_pl.sites.wire import Content

NUMBER = 7
HELLO = Content({"run": "ab"}, {"w": torch.arange(6.0)})
Answer = Callable[[], bytes]


class Coordinator:
    """A loopback server whose answers a test sets, keyed by the last part of the path."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        self.parts: dict[str, bytes] = {}
        self.answers: dict[str, Answer] = {
            "activate-node": ActivateNodeResponse(node_id=NUMBER).SerializeToString,
            "send-node-heartbeat": SendNodeHeartbeatResponse(success=True).SerializeToString,
            "push-messages": PushMessagesResponse().SerializeToString,
        }
        coordinator = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                coordinator._answer(self, self.path.rpartition("/")[2], body)

            def do_GET(self) -> None:
                coordinator._answer(self, self.path.rpartition("/")[2], b"")

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler, name: str, body: bytes) -> None:
        self.asked.append(name)
        if name == "pull-object":
            part = next(part for part in self.parts if part.encode() in body)
            found = PullObjectResponse(
                object_found=True, object_available=True, object_content=self.parts[part]
            )
            content = found.SerializeToString()
        else:
            content = self.answers.get(name, lambda: b"")()
        with suppress(OSError):  # A site that has read enough hangs up.
            handler.send_response(self.status)
            for key, value in {"content-length": str(len(content)), **self.headers}.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(content)

    def post(self, content: Content, change: Callable[[ObjectTree], None] | None = None) -> None:
        """Sets the message that the site gets each time it asks."""
        message = Message(records.record(content), NUMBER, wire.HELLO, ttl=600)
        message.metadata.__dict__["_message_id"] = message.object_id
        tree = get_object_tree(message)
        self.parts = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        if change is not None:
            change(tree)
        found = PullMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[tree],
        )
        self.answers["pull-messages"] = found.SerializeToString

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower has one identity per process.
        monkeypatch.setattr(TaskIdentity, name, 1)
    found = Coordinator()
    yield found
    found.close()


@pytest.fixture
def join(coordinator: Coordinator) -> Iterator[Callable[..., Node]]:
    joined: list[Node] = []

    def make(**settings: Any) -> Node:
        private = ec.generate_private_key(ec.SECP384R1())
        joined.append(Node(coordinator.address, None, private, **settings))
        return joined[-1]

    yield make
    coordinator.status, coordinator.headers = 200, {}
    for one in joined:
        one.close(leave=False)


def test_a_message_is_read(coordinator: Coordinator, join: Callable[..., Node]) -> None:
    coordinator.post(HELLO)
    incoming = join().next()
    assert incoming is not None
    assert incoming.content is not None
    assert incoming.content.meta == HELLO.meta
    assert torch.equal(incoming.content.tensors["w"], HELLO.tensors["w"])
    assert "confirm-message-received" in coordinator.asked


# --- large responses ------------------------------------------------------------------------------


def test_a_message_larger_than_the_site_reads_is_an_answer(
    coordinator: Coordinator, join: Callable[..., Node]
) -> None:
    coordinator.post(Content({}, {"w": torch.zeros(10_000)}))
    site = join(max_bytes=20_000)
    incoming = site.next()
    assert incoming is not None
    assert incoming.content is None
    assert "more than 20,000 bytes" in incoming.error
    assert "site.max_memory_gb" in incoming.error
    site.answer(incoming, Content({"site": "a", "error": incoming.error}, {}))
    assert "push-messages" in coordinator.asked


def test_a_message_that_names_one_part_many_times_is_not_unfolded(
    coordinator: Coordinator, join: Callable[..., Node]
) -> None:
    """An array that names one chunk of 4 kB a thousand times would take 4 MB."""
    coordinator.post(Content({}, {"w": torch.zeros(1000)}))
    (name,) = [name for name, part in coordinator.parts.items() if part.startswith(b"Array ")]
    head, _, body = coordinator.parts[name].partition(b"\0")
    about = json.loads(body)
    about["arraychunk_ids"] *= 1000
    changed = json.dumps(about).encode()
    kind, children, _ = head.split(b" ")
    coordinator.parts[name] = kind + b" " + children + b" %d\0" % len(changed) + changed
    incoming = join(max_bytes=1_000_000).next()
    assert incoming is not None
    assert "bytes of tensors, 1,000,000 are allowed" in incoming.error


def test_a_message_of_very_many_parts_is_not_pulled(
    coordinator: Coordinator, join: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "MAX_PARTS", 50)
    coordinator.post(
        HELLO, lambda tree: tree.children.extend([ObjectTree(object_id="0" * 64)] * 50)
    )
    incoming = join().next()
    assert incoming is not None
    assert "parts; at most 50 are read" in incoming.error
    assert "pull-object" not in coordinator.asked


def test_a_response_without_end_is_not_read_to_it(
    coordinator: Coordinator, join: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = join()
    monkeypatch.setattr(node, "MAX_RESPONSE", 1000)
    coordinator.answers["pull-messages"] = lambda: bytes(2000)
    with pytest.raises(Unreachable, match="a response of more than 1,000 bytes"):
        site.next()


def test_a_compressed_response_is_refused(
    coordinator: Coordinator, join: Callable[..., Node]
) -> None:
    """A few compressed kB can expand to gigabytes."""
    site = join()
    coordinator.headers = {"content-encoding": "gzip"}
    with pytest.raises(Unreachable, match="a compressed response"):
        site.next()


def test_a_coordinator_cannot_send_a_site_to_another_address(
    coordinator: Coordinator, join: Callable[..., Node]
) -> None:
    """Otherwise it could reach any server in the site's network."""
    site, inside = join(), Coordinator()
    try:
        for coordinator.status in (302, 307):
            coordinator.headers = {"location": f"http://{inside.address}/reboot"}
            with pytest.raises(Refused, match=f"HTTP {coordinator.status}"):
                site.next()
        assert not inside.asked
    finally:
        inside.close()


# --- faults ---------------------------------------------------------------------------------------


class Panic(BaseException):
    """An error of native code: Rust's panics are not an `Exception`."""


def test_a_panic_while_a_message_is_read_is_an_answer(
    coordinator: Coordinator, join: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any, **__: Any) -> None:
        raise Panic

    coordinator.post(HELLO)
    monkeypatch.setattr(node, "read", panic)
    incoming = join().next()
    assert incoming is not None
    assert (incoming.content, incoming.error) == (None, "it cannot be read (Panic)")


def test_a_heartbeat_that_fails_in_any_way_ends_the_connection_and_prints_nothing(
    coordinator: Coordinator,
    join: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(node, "HEARTBEAT_SECONDS", 0.01)
    call = Node._call

    def panic(self: Node, function: Any, request: Any) -> Any:
        if function.__name__ == "SendNodeHeartbeat":
            raise Panic
        return call(self, function, request)

    monkeypatch.setattr(Node, "_call", panic)
    site = join()
    site._heart.join(60)
    with pytest.raises(Unreachable, match="has forgotten this site"):
        site.next()
    assert not "".join(capfd.readouterr())


class Site:
    """A stand-in for a site that answers nothing and keeps reported faults."""

    def __init__(self, folder: Path) -> None:
        self.name, self.state, self.ended = "a", folder, ""
        self.own = SimpleNamespace(
            site=SimpleNamespace(max_memory_gb=1.0), run=SimpleNamespace(device="cpu")
        )
        self.faults: list[str] = []
        self.kinds: list[str] = []

    def report_fault(self, what: str, error: BaseException) -> None:
        self.faults.append(f"{what} ({type(error).__name__})")

    def answer(self, kind: str, content: Content) -> Content:
        self.kinds.append(kind)
        self.ended = wire.FINISHED
        return Content({"site": "a"}, {})


def serve(coordinator: Coordinator, site: Site) -> list[str]:
    said: list[str] = []
    private = ec.generate_private_key(ec.SECP384R1())
    here: Any = site
    commands._serve(here, coordinator.address, None, private=private, say=said.append, stay=False)
    return said


def test_whatever_the_connection_raises_a_site_connects_again(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a message lacks its parts, then native code panics; the third message works."""
    pauses: list[float] = []
    monkeypatch.setattr(commands.time, "sleep", pauses.append)
    coordinator.post(HELLO)
    good = coordinator.answers["pull-messages"]
    without = PullMessagesResponse.FromString(good())
    del without.message_object_trees[:]
    turns = iter([without.SerializeToString, *[Panic] * 5])

    def pull() -> bytes:
        answer = next(turns, good)
        if answer is Panic:
            monkeypatch.setattr(node, "message_from_proto", panic)
            return good()
        monkeypatch.setattr(node, "message_from_proto", from_proto)
        return answer()

    def panic(*_: Any) -> None:
        raise Panic

    from_proto = node.message_from_proto
    coordinator.answers["pull-messages"] = pull
    site = Site(tmp_path)
    said = serve(coordinator, site)
    again = "failed; connecting again"
    assert site.faults == [f"{again} (IndexError)", *[f"{again} (Panic)"] * 5]
    assert site.kinds == [wire.HELLO]
    assert said == ["connected; waiting for rounds"] * 7
    assert pauses == sorted(pauses)  # The pauses grow, or a fault would fill terminal and log.
    assert pauses[-1] == commands.MAX_PAUSE_SECONDS
    assert coordinator.asked[-1] == "deactivate-node"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_the_owner_s_ctrl_c_ends_the_connection(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    def interrupt(*_: Any) -> None:
        raise kind

    coordinator.post(HELLO)
    monkeypatch.setattr(node, "read", lambda *_, **__: interrupt())
    with pytest.raises(kind):
        serve(coordinator, Site(tmp_path))
    assert coordinator.asked[-1] == "deactivate-node"


def test_a_coordinator_that_cannot_be_left_does_not_keep_a_site(
    coordinator: Coordinator, join: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = join()

    def fail(*_: Any) -> None:
        raise RuntimeError("whatever Flower does")

    monkeypatch.setattr(Node, "_call", fail)
    site.close(leave=True)
