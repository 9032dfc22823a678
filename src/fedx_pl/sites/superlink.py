"""Flower's SuperLink as a process of its own, with a door that opens to sites only.

    python -P superlink.py PARENT_PID SOCKET,SOCKET [flower-superlink's options]

The SuperLink serves everything on one port: the Fleet API for sites, but also the Control API, by which anyone who
reaches it may register nodes and submit runs. Here only Fleet requests are let in from other machines; the rest is for
this machine, where the coordinator is. It never runs an app: the coordinator itself acts as the ServerApp.
"""

import os
import socket
import sys
import threading
import time
from typing import Any

FLEET, LOOPBACK = "/v1/fleet/", {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class SitesOnly:
    """ASGI middleware: from elsewhere only the Fleet API can be reached."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers 403 to what is not for the caller."""
        if scope["type"] in ("http", "websocket"):
            caller = (scope.get("client") or ("",))[0]
            # A proxy on this machine would make every caller look local: what it passes on must be Fleet, too.
            forwarded = any(name.lower() in (b"x-forwarded-for", b"forwarded") for name, _ in scope["headers"])
            if not scope["path"].startswith(FLEET) and (caller not in LOOPBACK or forwarded):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
        await self.app(scope, receive, send)


def listen(host: str, port: int) -> list[socket.socket]:
    """Where sites come in, and 127.0.0.1 for the coordinator, which its certificate names in any case."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    both = place[0] == "::" and socket.has_dualstack_ipv6()
    found = [socket.create_server(place[:2], family=family, dualstack_ipv6=both)]
    if not both and place[0] not in ("0.0.0.0", "127.0.0.1"):
        found.append(socket.create_server(("127.0.0.1", port)))
    return found


def main() -> None:
    """Runs until the coordinator ends."""
    parent = int(sys.argv.pop(1))
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv.pop(1).split(",")]
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    import uvicorn
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    app = SitesOnly(create_app(config, SuperLinkLifespan))
    serving = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        proxy_headers=False,  # The caller is who holds the connection, not who a header says.
    )
    uvicorn.Server(serving).run(sockets=sockets)


def _follow(parent: int) -> None:
    """Ends with the coordinator, however that ends: its next one needs the port."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    main()
