"""The SuperLink's door: which requests it lets in, and which answers of sites it accepts."""

import asyncio
import base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers import PATIENCE

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node

from fedx_pl.sites import door
from fedx_pl.sites.certificates import public_pem
from fedx_pl.sites.door import CALLS, FLEET, Door, Ledger
from fedx_pl.sites.guard import Guard

ELSEWHERE, HERE = ("203.0.113.9", 5000), ("127.0.0.1", 5000)
PULL = FLEET + "pull-messages"
SITE = 77  # a site's number


class Caller:
    """A client with a key, and the door that it sends requests to."""

    def __init__(self, *, registered: bool = True, curve: Any = None) -> None:
        self.private = ec.generate_private_key(curve or ec.SECP384R1())
        self.ledger, self.stored, self.reached = Ledger(), dict[str, Any](), 0
        sites = frozenset([public_pem(self.private)] if registered else [b"another"])
        self.door = Door(
            self._app, sites=sites, ledger=self.ledger, guard=Guard(), tree_of=self.stored.get
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await receive()
        await send({"type": "http.response.start", "status": 200})

    def headers(self, path: str, body: bytes = b"") -> dict[str, str]:
        signed = door.sign(
            path, body, lambda text: self.private.sign(text, ec.ECDSA(hashes.SHA384()))
        )
        key = base64.b64encode(public_pem(self.private)).decode()
        return {"flwr-public-key": key, "x-fedx-signed": signed, "content-length": str(len(body))}

    def knock(
        self, path: str, headers: dict[str, str], body: bytes | None = b"", **scope: Any
    ) -> int:
        """Returns a request's status, 200 if it is let in; a body of None never arrives."""
        sent: list[dict[str, Any]] = []

        async def send(event: dict[str, Any]) -> None:
            sent.append(event)

        async def receive() -> dict[str, Any]:
            if body is None:
                await asyncio.sleep(PATIENCE)
            return {"type": "http.request", "body": body}

        lines = [(name.encode(), value.encode()) for name, value in headers.items()]
        full_scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "client": ELSEWHERE,
            "headers": lines,
        } | scope
        asyncio.run(self.door(full_scope, receive, send))
        return int(sent[0]["status"])

    def ask(self, call: str, request: Any = None) -> int:
        """Sends a correctly signed request and returns its status."""
        path, body = FLEET + call, request.SerializeToString() if request is not None else b""
        return self.knock(path, self.headers(path, body), body)


def test_a_registered_site_is_let_in() -> None:
    caller = Caller()
    for call in CALLS.keys() - {
        "register-node",
        "push-messages",
        "pull-object",
        "confirm-message-received",
    }:
        assert caller.ask(call) == 200
    assert caller.ask("register-node") == 403  # The coordinator does that.


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/health",
        "/docs",
        "/",
        "",
        "/v1/fleet",
        "/V1/FLEET/x",
        "//v1/fleet/x",
        "/v1/control/../fleet/x",
        "http://host/v1/fleet/x",
        "/v1/fleet/get-run",
        "/v1/fleet/get-fab",
        "/v1/fleet/unregister-node",
    ],
)
@pytest.mark.parametrize(
    "client", [ELSEWHERE, HERE, ("::1", 5000, 0, 0), ("::ffff:127.0.0.1", 5000), None]
)
def test_other_paths_are_refused_for_every_address(path: str, client: Any) -> None:
    caller = Caller()
    headers = caller.headers(path)
    for more in ({}, {"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}):
        assert caller.knock(path, headers | more, client=client) == 403
    assert caller.knock(path, headers, client=client, type="websocket") == 403
    assert not caller.reached


def test_only_post() -> None:
    caller = Caller()
    assert caller.knock(PULL, caller.headers(PULL), method="GET") == 403


def test_a_body_is_not_read_before_the_key_is_looked_at() -> None:
    """A body of None never arrives, so reading it would hang."""
    stranger, caller = Caller(registered=False), Caller()
    large = {"content-length": str(300_000_000)}
    assert stranger.knock(PULL, stranger.headers(PULL) | large, None) == 401
    assert caller.knock(PULL, large, None) == 401
    assert caller.knock(PULL, caller.headers(PULL) | large, None) == 413
    assert caller.knock(PULL, caller.headers(PULL) | {"content-length": "9" * 5000}, None) == 413
    for wrong in ("", "-1", "1e3", "many"):
        assert caller.knock(PULL, caller.headers(PULL) | {"content-length": wrong}, None) == 411
    assert caller.knock(PULL, caller.headers(PULL) | {"x-fedx-signed": "a b c d"}, None) == 401
    assert caller.knock(PULL, caller.headers(PULL) | {"flwr-public-key": "%"}, None) == 401


def test_path_body_and_time_are_signed() -> None:
    caller = Caller()
    assert caller.knock(PULL, caller.headers(PULL, b"one"), b"one") == 200
    assert caller.knock(PULL, caller.headers(PULL, b"one"), b"two") == 401
    assert caller.knock(FLEET + "deactivate-node", caller.headers(PULL)) == 401
    other = {"x-fedx-signed": Caller().headers(PULL)["x-fedx-signed"]}
    assert caller.knock(PULL, caller.headers(PULL) | other) == 401
    when, *rest = caller.headers(PULL)["x-fedx-signed"].split(" ")
    later = (datetime.fromisoformat(when) + timedelta(seconds=1)).isoformat()
    assert (
        caller.knock(PULL, caller.headers(PULL) | {"x-fedx-signed": " ".join([later, *rest])})
        == 401
    )


def test_a_request_cannot_be_replayed() -> None:
    caller = Caller()
    headers = caller.headers(PULL)
    assert [caller.knock(PULL, headers) for _ in range(2)] == [200, 401]


@pytest.mark.parametrize(
    ("seconds", "status"), [(-70, 401), (-50, 200), (6, 200), (50, 200), (70, 401)]
)
def test_clocks_may_differ_by_a_minute(
    monkeypatch: pytest.MonkeyPatch, seconds: float, status: int
) -> None:
    caller = Caller()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(UTC) + timedelta(seconds=seconds)

    with monkeypatch.context() as patch:
        patch.setattr(door, "datetime", Clock)
        headers = caller.headers(PULL)
    assert caller.knock(PULL, headers) == status


def test_a_body_is_as_long_as_its_call_allows_whatever_its_head_says() -> None:
    """A chunked body has no length, and its Content-Length must be ignored."""
    caller = Caller()
    body = bytes(CALLS["pull-messages"] + 1)
    headers = caller.headers(PULL, body) | {"content-length": "1", "transfer-encoding": "chunked"}
    assert caller.knock(PULL, headers, body) == 413
    assert not caller.reached


@pytest.mark.parametrize("name", ["flwr-public-key", "flwr-signature", "x-fedx-signed"])
def test_doubled_headers_are_refused(name: str) -> None:
    """Flower reads the first of two headers, so the door and Flower could see different keys."""
    caller, victim = Caller(), Caller()
    first = {name.upper(): victim.headers(PULL).get(name, "x")}
    second = {"flwr-signature": "y"} | caller.headers(PULL)
    assert caller.knock(PULL, first | second) == 400
    assert not caller.reached


def test_only_the_kind_of_key_that_we_make() -> None:
    caller = Caller(curve=ec.SECP256R1())
    assert caller.ask("pull-messages") == 401


def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.01)
    caller = Caller()
    assert caller.knock(PULL, caller.headers(PULL, b"one"), None) == 408
    assert not caller.reached


def test_a_site_has_a_few_requests_at_once() -> None:
    caller = Caller()
    caller.door._busy[public_pem(caller.private)] = door.AT_ONCE
    assert caller.ask("pull-messages") == 429


# --- what a site may say --------------------------------------------------------------------------


def tree(name: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name, children=children)


def answer(
    source: int = SITE, reply_to: str = "question", parts_of: ObjectTree | None = None
) -> PushMessagesRequest:
    about = Metadata(
        src_node_id=source, dst_node_id=1, reply_to_message_id=reply_to, message_id="answer"
    )
    found = tree("answer", tree("part")) if parts_of is None else parts_of
    return PushMessagesRequest(
        node=Node(node_id=SITE),
        messages_list=[Message(metadata=about)],
        message_object_trees=[found],
    )


@pytest.fixture
def asked() -> Caller:
    caller = Caller()
    caller.ledger.note(SITE, "question", ["question", "a", "b"])
    caller.ledger.note(SITE + 1, "another's", ["another's", "c"])
    return caller


def test_a_site_answers_what_it_was_asked(asked: Caller) -> None:
    assert asked.ask("push-messages", answer()) == 200


@pytest.mark.parametrize(
    ("request_of", "status"),
    [
        (lambda: answer(source=1), 403),  # in the coordinator's name
        (lambda: answer(source=SITE + 1), 403),
        (lambda: answer(source=1, reply_to=""), 403),
        (lambda: answer(reply_to=""), 410),  # not an answer
        (lambda: answer(reply_to="another's"), 410),
        (lambda: answer(parts_of=tree("something else")), 400),
        (
            lambda: answer(parts_of=tree("answer", *(tree(str(number)) for number in range(22)))),
            413,
        ),
        (lambda: PushMessagesRequest(node=Node(node_id=SITE)), 400),
    ],
)
def test_a_site_can_send_nothing_else(
    asked: Caller, request_of: Callable[[], Any], status: int
) -> None:
    assert asked.ask("push-messages", request_of()) == status
    assert not asked.reached


def test_a_tree_of_parts_must_match_what_is_stored(asked: Caller) -> None:
    """`twice` is stored as two parts, so nesting one `twice` in another would keep growing."""
    asked.stored["twice"] = tree("twice", tree("a"), tree("b"))
    for small in (tree("twice"), tree("x", tree("twice")), tree("twice", tree("a"), tree("a"))):
        assert asked.ask("push-messages", answer(parts_of=tree("answer", small))) == 400
    assert asked.ask("push-messages", answer(parts_of=tree("answer", asked.stored["twice"]))) == 200


def test_a_site_fetches_and_confirms_its_own_messages(asked: Caller) -> None:
    for part, status in (("a", 200), ("c", 403), ("unknown", 403)):
        assert (
            asked.ask("pull-object", PullObjectRequest(node=Node(node_id=SITE), object_id=part))
            == status
        )
    for message, status in (("question", 200), ("another's", 403), ("a", 403)):
        request = ConfirmMessageReceivedRequest(node=Node(node_id=SITE), message_object_id=message)
        assert asked.ask("confirm-message-received", request) == status


def test_a_part_is_the_same_wherever_an_answer_names_it(asked: Caller) -> None:
    """`d1` has two parts and `d2` names `d1` twice, so each level would double the parts."""
    levels = [tree("d1", tree("d0"), tree("d0"))]
    levels += [tree(f"d{n}", tree(f"d{n - 1}"), tree(f"d{n - 1}")) for n in range(2, 6)]
    assert asked.ask("push-messages", answer(parts_of=tree("answer", *levels))) == 400
    assert asked.ask("push-messages", answer(parts_of=tree("answer", tree("answer")))) == 400
    twice = tree("answer", levels[0], levels[0])
    assert asked.ask("push-messages", answer(parts_of=twice)) == 200


def test_a_message_is_answered_once(asked: Caller) -> None:
    assert asked.ask("push-messages", answer()) == 200
    assert asked.ask("push-messages", answer()) == 410


def test_leftovers_of_a_site_are_deleted_with_their_message(asked: Caller) -> None:
    """Unread messages and half-uploaded answers would otherwise fill the memory over the rounds."""
    deleted: list[str] = []
    asked.ledger.delete = deleted.append
    assert asked.ask("push-messages", answer()) == 200
    for number in range(door.REMEMBERED + 1):
        asked.ledger.note(SITE, str(number), [])
    assert deleted == ["question", "answer", "0"]


def test_what_cannot_be_read_is_refused(asked: Caller) -> None:
    path = FLEET + "push-messages"
    assert asked.knock(path, asked.headers(path, b"\xff"), b"\xff") == 400


def test_old_messages_are_forgotten(asked: Caller) -> None:
    for number in range(door.REMEMBERED):
        asked.ledger.note(SITE, str(number), [])
    assert asked.ask("push-messages", answer()) == 410


def test_the_start_and_end_of_the_server_pass() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    opened = Door(app, sites=frozenset(), ledger=Ledger(), guard=Guard(), tree_of=lambda _: None)
    asyncio.run(opened({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
