"""The SuperLink's door: who may come in, and where it listens."""

import asyncio
import socket
from typing import Any

import federation_parts as parts
import pytest

from fedx_pl.errors import UserError
from fedx_pl.sites.superlink import SitesOnly, listen

ELSEWHERE, HERE = ("203.0.113.9", 5000), ("127.0.0.1", 5000)


def knock(path: str, client: tuple[str, int] | None, kind: str = "http", **headers: str) -> int:
    """The status that a request gets; 200 if it is let in."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "client": client, "headers": lines}
    asyncio.run(SitesOnly(app)(scope, None, send))
    return int(sent[0]["status"])


def test_sites_come_in_from_anywhere() -> None:
    assert knock("/v1/fleet/pull-messages", ELSEWHERE) == 200
    assert knock("/v1/fleet/pull-messages", HERE, x_forwarded_for="203.0.113.9") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/runtime/acquire-task", "/health", "/docs", "/", "", "/v1/fleet", "/V1/FLEET/x",
        "//v1/fleet/x", "/v1/control/../fleet/x", "http://host/v1/fleet/x",
    ],
)  # fmt: skip
def test_all_else_is_for_this_machine(path: str) -> None:
    assert knock(path, ELSEWHERE) == 403
    assert knock(path, ELSEWHERE, "websocket") == 403
    assert knock(path, None) == 403
    assert knock(path, ("127.0.0.2", 1)) == 403
    assert knock(path, HERE) == 200
    assert knock(path, ("::1", 5000, 0, 0)) == 200  # type: ignore[arg-type]
    assert knock(path, ("::ffff:127.0.0.1", 5000)) == 200


@pytest.mark.parametrize("header", ["x_forwarded_for", "X_Forwarded_For", "forwarded", "Forwarded"])
def test_a_proxy_on_this_machine_does_not_make_others_local(header: str) -> None:
    assert knock("/v1/control/start-run", HERE, **{header: "203.0.113.9"}) == 403


def test_the_start_and_end_of_the_server_pass() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(SitesOnly(app)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def addresses(host: str) -> list[str]:
    sockets = listen(host, parts.free_port())
    try:
        return [one.getsockname()[0] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def test_the_coordinator_s_own_address_is_always_there() -> None:
    """Its certificate names 127.0.0.1, and the door takes it for this machine's: any other --host needs it beside."""
    assert addresses("0.0.0.0") == ["0.0.0.0"]
    assert addresses("127.0.0.1") == ["127.0.0.1"]
    assert addresses("localhost") == ["127.0.0.1"]
    assert addresses("127.0.0.2") == ["127.0.0.2", "127.0.0.1"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6: sysctl -w net.ipv6.conf.all.disable_ipv6=0")
def test_ipv6() -> None:
    assert addresses("::1") == ["::1", "127.0.0.1"]
    (both,) = listen("::", port := parts.free_port())
    with both, socket.create_connection(("127.0.0.1", port), timeout=120):
        assert both.accept()[1][0] == "::ffff:127.0.0.1"


def test_a_port_that_is_taken_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")
    from fedx_pl.sites import link

    monkeypatch.setattr(link, "FREE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "127.0.0.2"):
            with pytest.raises(UserError, match=rf"--port {port} cannot be used .*type another --port"):
                link._listen(host, port)
    with pytest.raises(UserError, match=r"--host 203\.0\.113\.9 --port \d+ cannot be used .*--host 0\.0\.0\.0"):
        link._listen("203.0.113.9", port)  # Not an address of this machine: no use in waiting.


def test_a_port_that_was_taken_for_a_moment_is_waited_for() -> None:
    pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")
    from threading import Timer

    from fedx_pl.sites import link

    taken = socket.create_server(("127.0.0.1", 0))
    Timer(0.3, taken.close).start()
    (found,) = link._listen("127.0.0.1", taken.getsockname()[1])
    found.close()
