"""The coordinator's side of Flower: it starts a SuperLink, and exchanges messages with sites.

Flower would run a ServerApp in its own process, from a bundle that anyone may submit at its
Control API. Here the coordinator's process takes the ServerApp's place: it asks the SuperLink for
the task with a secret that only it knows. Flower does not document these modules, so the `flower`
extra pins the version that they were tested with.
"""

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedx_pl.errors import UserError, install_hint
from fedx_pl.files import make_private, private_file
from fedx_pl.sites import wire
from fedx_pl.sites.guard import listen_patiently
from fedx_pl.sites.keys import ServerKeys
from fedx_pl.sites.records import Coming, Reply, Size, reply_of, sealed_record, size_of
from fedx_pl.sites.seal import Seal

START_SECONDS = 60.0
PATIENCE_SECONDS = 30.0  # with a SuperLink that does not answer
HTTP_SECONDS = 30.0  # as Flower's clients
_NOBODY = "coordinator"  # an address that is never looked up: the entrance is a file
_APP = """[project]
name = "fedx-pl"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "fedx-pl"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
"""  # A run must have a bundle. Nobody ever loads it.


class Connected(NamedTuple):
    """A connected site."""

    node: int
    name: str  # by its registered key; empty without authentication
    since: str  # when it connected; another time means that it was away


class Link:
    """Starts a SuperLink and talks to the sites that connect to it."""

    def __init__(self, folder: Path, host: str, port: int, keys: ServerKeys | None) -> None:
        """Starts the SuperLink.

        Args:
            folder: where Flower's own files and its log go.
            host: the address to listen on.
            port: the port to listen on.
            keys: the keys of the federation; None for a federation on this machine, without TLS
                and authentication.
        """
        quiet_flower(folder)
        if keys is None and host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(
                f"--insecure --host {host}: without TLS only on this machine; type --host 127.0.0.1"
            )
        self._folder = folder
        self._keys = keys
        self._seal = Seal(keys) if keys else None
        self._coming: dict[str, Coming] = {}  # by the message it answers
        self._sent = Size(0, 0)
        sockets = listen_patiently(host, port)
        # It stays open as long as the process.
        self._log = open(folder / "superlink.log", "ab", opener=private_file)  # noqa: SIM115
        self._secret = secrets.token_hex(32)
        self._entrance, entrance = _entrance()
        self._process = self._start(sockets, entrance)
        try:
            self._wait()
            with self._answering():
                self._names = self._register()
                self._connect()
        except BaseException:
            self.close()
            raise

    def sites(self) -> list[Connected]:
        """The sites that are connected now."""
        with self._answering():
            nodes = [node for node in self._grid.get_nodes() if node.status == "online"]
        known = [node for node in nodes if self._keys is None or node.node_id in self._names]
        return [
            Connected(node.node_id, self._names.get(node.node_id, ""), node.last_activated_at)
            for node in known
        ]

    def send(self, node: int, kind: str, content: wire.Content, seconds: float) -> str:
        """Posts a message and returns its identifier; it expires after ``seconds``."""
        from flwr.app import Message

        with self._answering():
            found, size = self._record(node, kind, content)
            self._sent = Size(*map(max, self._sent, size))
            (message,) = self._grid.push_messages([Message(found, node, kind, ttl=seconds)])
        # The SuperLink says of an unsent message that there is no answer.
        return str(message) or f"unsent {secrets.token_hex(8)}"

    def _record(self, node: int, kind: str, content: wire.Content) -> tuple[Any, Size]:
        text, blob = wire.pack(content)
        seal: dict[str, Any] = {}
        if self._seal is not None and self._keys is not None:
            # A site that has left has no key here; the SuperLink will report it.
            public = self._keys.sites.get(self._names.get(node, ""), b"")
            seal = self._seal.fields(public, kind, text, blob)
        return sealed_record(text, blob, seal), size_of(blob)

    def receive(self, messages: Iterable[str]) -> Iterator[Reply]:
        """Yields complete answers one at a time, since each may be as large as the weights.

        Flower's own function would wait for slow or broken uploads, and stop at an answer that it
        cannot read.
        """
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        asked = set(messages)
        self._coming = {
            message: coming for message, coming in self._coming.items() if message in asked
        }
        with self._answering():
            if new := asked - self._coming.keys():
                found = self._grid._runtime_client.PullMessages(
                    PullAppMessagesRequest(message_ids=sorted(new))
                )
                for about, tree in zip(
                    found.messages_list, found.message_object_trees, strict=True
                ):
                    parts = [part.object_id for part in iterate_object_tree(tree)]
                    # The SuperLink says which message it answers; the answer itself may lie.
                    replied = about.metadata.reply_to_message_id
                    # The door lets no site call itself so.
                    here = about.metadata.src_node_id == SUPERLINK_NODE_ID
                    self._coming[replied] = Coming(
                        about.metadata.message_id, parts, {}, made_here=here
                    )
        for message in asked & self._coming.keys():
            with self._answering():
                reply = self._take(message)
            if reply is not None:
                yield reply

    def _take(self, asked: str) -> Reply | None:
        """The answer to a message, or None while parts of it are missing."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        coming = self._coming[asked]
        client = self._grid._runtime_client
        where = {"node": self._grid.node, "run_id": self._grid.run.run_id}
        for part in coming.parts:
            if part not in coming.there:
                found = client.PullObject(PullObjectRequest(object_id=part, **where))
                if not found.object_found:
                    return Reply(asked, None, "its upload broke off", offline=True)
                if not found.object_available:
                    return None
                coming.there[part] = found.object_content
        del self._coming[asked]
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(message_object_id=coming.message, **where)
        )
        return reply_of(asked, coming, self._sent)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        import httpx
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
        from flwr.supercore.run import RunNotRunningException

        try:
            yield
        except (httpx.HTTPError, RunNotRunningException, ObjectPushError) as error:
            raise UserError(
                f"Flower's SuperLink does not answer any more ({error}); {self._log.name} says "
                f"why. Type the same command to resume after the last finished round"
            ) from error

    def close(self) -> None:
        """Ends the SuperLink."""
        if (heartbeat := getattr(self, "_heartbeat", None)) and heartbeat.is_running:
            heartbeat.stop()
        if grid := getattr(self, "_grid", None):
            grid.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._entrance.parent, ignore_errors=True)

    def _start(
        self, sockets: list[socket.socket], entrance: socket.socket
    ) -> subprocess.Popen[bytes]:
        secret = self._folder / "superexec.secret"
        with open(secret, "w", opener=private_file) as file:
            file.write(self._secret)
        numbers = [one.fileno() for one in sockets]
        # -P: nothing is imported from the working directory.
        command = [sys.executable, "-P", "-m", "fedx_pl.sites.superlink", str(os.getpid())]
        command += [",".join(map(str, numbers)), str(entrance.fileno()), "--isolation", "process"]
        command += [
            "--superexec-auth-secret-file",
            str(secret),
            "--disable-runtime-dependency-installation",
        ]
        if keys := self._keys:
            command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
            command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        # Internal switches would open further ports, with nobody at the door.
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("FLWR_INTERNAL_")
        }
        # A session of its own: Ctrl-C is for the coordinator, which then ends this.
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[*numbers, entrance.fileno()],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            umask=0o077,  # What it writes is for this user alone.
        )
        for one in (*sockets, entrance):
            one.close()  # It is the SuperLink's now, and ends with it.
        sites = [public.decode() for public in self._keys.sites.values()] if self._keys else None
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # If it has ended, `_wait` says so.
            process.stdin.write(json.dumps({"sites": sites}).encode())
        return process

    def _wait(self) -> None:
        import httpx

        give_up = time.monotonic() + START_SECONDS
        reason = "it ended"
        with self._http() as client:
            while time.monotonic() < give_up and self._process.poll() is None:
                try:
                    client.get("http://coordinator/health")
                    return
                except httpx.HTTPError as error:
                    reason = str(error)
                    time.sleep(0.1)
        raise UserError(f"Flower's SuperLink did not start ({reason}); {self._log.name} says more")

    def _register(self) -> dict[int, str]:
        """Registers the sites' keys and returns their names by node.

        Without keys, sites register themselves.
        """
        from flwr.proto.control_pb2 import RegisterNodeRequest

        control = self._control()
        try:
            sites = self._keys.sites if self._keys else {}
            requests = {
                name: RegisterNodeRequest(public_key=public, name=name)
                for name, public in sites.items()
            }
            return {
                control.RegisterNode(request).node_id: name for name, request in requests.items()
            }
        finally:
            control.close()

    def _connect(self) -> None:
        """Opens a run and takes the ServerApp's place in it."""
        from flwr.common.serde import fab_to_proto, run_from_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.fab import Fab
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supercore.interceptors import (
            RuntimeVersionHttpInterceptor,
            SuperExecAuthHttpInterceptor,
        )
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supercore.superexec.run_superexec import _SUPEREXEC_AUTH_METHODS
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid.http_grid import HttpGrid

        bundle = _bundle()
        control = self._control()
        control.StartRun(
            StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})))
        )
        control.close()
        signed = SuperExecAuthHttpInterceptor(
            master_secret=self._secret.encode(), protected_methods=_SUPEREXEC_AUTH_METHODS
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        executor = self._inside(
            RuntimeHttpClient.from_server_address(
                _NOBODY, True, None, interceptors=[version, signed]
            )
        )
        task = executor.AcquireTask(
            AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP.value])
        )
        executor.close()
        grid = HttpGrid(_NOBODY, True, None, token=task.token)
        retries = grid._retry_invoker
        retries.max_time = PATIENCE_SECONDS  # Flower would try for ever.
        given_up = retries.should_giveup
        # A process that has ended never answers.
        retries.should_giveup = lambda error: self._process.poll() is not None or given_up(error)
        self._inside(grid._runtime_client)
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id = given.task_id
        TaskIdentity.run_id = given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        self._grid = grid
        self._heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
        self._heartbeat.start()

    def _control(self) -> Any:
        from flwr.supercore.control.control_http_client import ControlHttpClient

        return self._inside(
            ControlHttpClient.from_server_address(_NOBODY, True, None, interceptors=[])
        )

    def _inside(self, client: Any) -> Any:
        """Makes one of Flower's clients call through the coordinator's own socket."""
        client._client.close()
        client._client = self._http()
        return client

    def _http(self) -> Any:
        import httpx

        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._entrance)), timeout=HTTP_SECONDS
        )


def quiet_flower(folder: Path) -> None:
    """Turns off Flower's telemetry and update check, and keeps its files in ``folder``."""
    make_private(folder)
    os.environ.update(
        FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", FLWR_HOME=str(folder / "flower")
    )
    # A proxy of the house cannot reach this machine's own address.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost".lstrip(",")
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"a federation of sites needs Flower; type {install_hint('flower')}"
        ) from error
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)


def _entrance() -> tuple[Path, socket.socket]:
    """Makes a unix socket in a folder that no other user can enter.

    Not in the run's folder: such a path must be short.
    """
    place = Path(tempfile.mkdtemp(prefix="fedx-pl-")) / "coordinator"
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(str(place))
        found.listen()
    except OSError as error:
        found.close()
        place.parent.rmdir()
        raise UserError(
            f"no socket can be made at {place} ({error}); set TMPDIR to a short path"
        ) from error
    return place, found


def _bundle() -> bytes:
    from flwr.cli.build import build_fab_from_disk

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(_APP)
        (Path(folder) / "nothing.py").write_text("app = None\n")
        return bytes(build_fab_from_disk(Path(folder)))
