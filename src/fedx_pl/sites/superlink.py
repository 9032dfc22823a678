"""Flower's SuperLink in its own process: a port for sites, a unix socket for the coordinator.

    python -P -m fedx_pl.sites.superlink PARENT_PID SOCKET,SOCKET UNIX_SOCKET [OPTION ...]

The options are those of flower-superlink. By itself, it would serve all APIs on one port: the Fleet
API for sites, but also the Control and Runtime APIs, by which anyone may register nodes, submit
runs and greet sites. Here the port leads to the `Door`. Everything else needs the unix socket, in a
folder that only the coordinator's user can enter. The sites' keys come on standard input. The
SuperLink never runs an app: the coordinator itself acts as the ServerApp.
"""

import json
import os
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from math import inf
from typing import Any

from fedx_pl.sites.door import CLOCK_SECONDS, Door, Ledger, Noting
from fedx_pl.sites.guard import BACKLOG, MOST_CONNECTIONS, Guard, Listener

OWN_DESCRIPTORS = 64  # open files that are no connections


def main() -> None:
    """Serves until the coordinator ends."""
    os.umask(0o077)
    parent = int(sys.argv.pop(1))
    ledger = Ledger()
    guard = Guard(most=_raise_descriptors())
    sockets: list[socket.socket] = []
    for number in sys.argv.pop(1).split(","):
        listener = Listener(fileno=int(number))
        listener.guard = guard
        sockets.append(listener)
    inner = socket.socket(fileno=int(sys.argv.pop(1)))
    threading.Thread(target=_follow, args=(parent, guard, inner.getsockname()), daemon=True).start()
    registered = json.load(sys.stdin)["sites"]
    import uvicorn
    from flwr.supercore.object_store import NoObjectInStoreError
    from flwr.superlink.cli.flower_superlink import (
        SuperLinkLifespan,
        _parse_superlink_lifespan_config,
    )
    from flwr.superlink.main import create_app
    from flwr.superlink.routers.fleet import node_auth

    # Flower signs only the time, and would refuse a clock that is 6 s ahead. The door checks it.
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

    sites = None if registered is None else frozenset(public.encode() for public in registered)
    door = Door(app, sites=sites, ledger=ledger, guard=guard, tree_of=tree_of)
    # asyncio, whose sockets are the guard's, and h11, which bounds the head of a request.
    common: dict[str, Any] = {
        "access_log": False,
        "log_level": "warning",
        "loop": "asyncio",
        "http": "h11",
        "ws": "none",
        "proxy_headers": False,  # The caller is who holds the connection, not who a header says.
    }
    # The coordinator has its own entrance, thread and event loop, so that no site can block it.
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
    """Raises the limit of open files, and returns how many connections it allows."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = int(min(hard if hard != resource.RLIM_INFINITY else inf, 2 * MOST_CONNECTIONS))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(BACKLOG, min(limit - OWN_DESCRIPTORS, MOST_CONNECTIONS))


def _follow(parent: int, guard: Guard, place: str) -> None:
    """Ends this process when the coordinator ends, so that its port is free for the next one."""
    while os.getppid() == parent:
        guard.sweep()
        time.sleep(0.2)
    with suppress(OSError):
        os.unlink(place)
        os.rmdir(os.path.dirname(place))
    os._exit(0)


if __name__ == "__main__":
    main()
