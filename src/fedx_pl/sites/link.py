"""The coordinator's side of Flower: its SuperLink, and messages to and from sites.

Flower would run a ServerApp in a process of its own, from a bundle that anyone at its Control API may submit. Here the
coordinator's process takes the ServerApp's place: it asks the SuperLink for the task with a secret that only it knows.
These are modules that Flower does not document; the `flower` extra pins the version they were tried with.
"""

import errno
import hashlib
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedx_pl.errors import UserError, install_hint
from fedx_pl.files import make_private, private_file
from fedx_pl.sites import superlink, wire
from fedx_pl.sites.keys import ServerKeys

START_SECONDS = 60.0
PATIENCE_SECONDS = 30.0  # with a SuperLink that does not answer
FREE_SECONDS = 10.0  # until a port that is taken is free again
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
    """A site that is connected."""

    node: int
    name: str  # by its registered key; empty without authentication
    since: str  # when it connected; another time means that it was away


class Reply(NamedTuple):
    """What came back for a message."""

    message: str
    content: wire.Content | None
    error: str = ""
    offline: bool = False  # The site is gone: no fault of its answer.


class Coming(NamedTuple):
    """An answer on its way: a site announces it first, then uploads it in parts."""

    message: str
    parts: list[str]
    there: dict[str, bytes]


class Link:
    """Starts a SuperLink and talks to the sites that connect to it."""

    def __init__(self, folder: Path, host: str, port: int, keys: ServerKeys | None) -> None:
        """Starts.

        Args:
            folder: for Flower's own files and log.
            host: address to listen on.
            port: to listen on.
            keys: None for a federation within this machine, without TLS and authentication.
        """
        quiet_flower(folder)
        if keys is None and host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(f"--insecure --host {host}: without TLS only on this machine; type --host 127.0.0.1")
        self._folder, self._keys = folder, keys
        self._address = f"127.0.0.1:{port}"
        self._coming: dict[str, Coming] = {}  # by the message it answers
        sockets = _listen(host, port)
        self._log = open(folder / "superlink.log", "ab", opener=private_file)  # noqa: SIM115 (as long as the process)
        self._secret = secrets.token_hex(32)
        self._process = self._start(sockets)
        try:
            self._wait()
            with self._answering():
                self._names = self._register()
                self._connect()
        except BaseException:
            self.close()
            raise

    def sites(self) -> list[Connected]:
        """Who is connected now."""
        with self._answering():
            nodes = [node for node in self._grid.get_nodes() if node.status == "online"]
        known = [node for node in nodes if self._keys is None or node.node_id in self._names]
        return [Connected(node.node_id, self._names.get(node.node_id, ""), node.last_activated_at) for node in known]

    def send(self, node: int, kind: str, content: wire.Content, seconds: float) -> str:
        """Posts a message and returns its name; it is forgotten after ``seconds``."""
        from flwr.app import Message

        with self._answering():
            (message,) = self._grid.push_messages([Message(record(content), node, kind, ttl=seconds)])
        return str(message) or f"unsent {secrets.token_hex(8)}"  # Of which the SuperLink says that there is no answer.

    def receive(self, messages: Iterable[str]) -> Iterator[Reply]:
        """Answers that have come whole, one after the other: each may be as large as the weights.

        Flower's own way would wait for one whose upload is slow or breaks off, and end at one that it cannot read.
        """
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        asked = set(messages)
        self._coming = {message: coming for message, coming in self._coming.items() if message in asked}
        with self._answering():
            if new := asked - self._coming.keys():
                found = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(new)))
                for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                    parts = [part.object_id for part in iterate_object_tree(tree)]
                    # What it answers is what the SuperLink says, not what is written in the answer itself.
                    replied = about.metadata.reply_to_message_id
                    self._coming[replied] = Coming(about.metadata.message_id, parts, {})
        for message in asked & self._coming.keys():
            with self._answering():
                reply = self._take(message)
            if reply is not None:
                yield reply

    def _take(self, asked: str) -> Reply | None:
        """The answer to a message if all of it is there."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        coming, client = self._coming[asked], self._grid._runtime_client
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
        client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=coming.message, **where))
        return _reply(asked, coming)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        import httpx
        from flwr.supercore.run import RunNotRunningException

        try:
            yield
        except (httpx.HTTPError, RunNotRunningException) as error:
            raise UserError(
                f"Flower's SuperLink does not answer any more ({error}); {self._log.name} tells why. The same command "
                f"goes on after the last finished round"
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

    def _start(self, sockets: list[socket.socket]) -> subprocess.Popen[bytes]:
        secret = self._folder / "superexec.secret"
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._secret)
        numbers = [one.fileno() for one in sockets]
        # By its file, not as a module of this package: it needs no torch. -P: nor what lies beside it.
        command = [sys.executable, "-P", superlink.__file__, str(os.getpid())]
        command += [",".join(map(str, numbers)), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(secret), "--disable-runtime-dependency-installation"]
        if keys := self._keys:
            command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
            command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        # Internal switches would open further ports, with nobody at the door.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_INTERNAL_")}
        # A session of its own: Ctrl-C is for the coordinator, which then ends this.
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=numbers,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            umask=0o077,  # What it writes is for this user alone.
        )
        for one in sockets:
            one.close()  # It is the SuperLink's now, and ends with it.
        return process

    def _wait(self) -> None:
        import httpx

        give_up, reason = time.monotonic() + START_SECONDS, "it ended"
        trusted = ssl.create_default_context(cafile=str(self._keys.ca)) if self._keys else False
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                httpx.get(f"http{'s' if self._keys else ''}://{self._address}/health", verify=trusted, trust_env=False)
                return
            except httpx.HTTPError as error:
                reason = str(error)
                time.sleep(0.1)
        raise UserError(f"Flower's SuperLink did not start ({reason}); {self._log.name} tells more")

    def _register(self) -> dict[int, str]:
        """Makes the sites' keys known and returns their nodes; without keys, sites register themselves."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        control = self._control()
        try:
            sites = self._keys.sites if self._keys else {}
            requests = {name: RegisterNodeRequest(public_key=public, name=name) for name, public in sites.items()}
            return {control.RegisterNode(request).node_id: name for name, request in requests.items()}
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
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supercore.superexec.run_superexec import _SUPEREXEC_AUTH_METHODS
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid.http_grid import HttpGrid

        bundle = _bundle()
        control = self._control()
        control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))))
        control.close()
        signed = SuperExecAuthHttpInterceptor(
            master_secret=self._secret.encode(), protected_methods=_SUPEREXEC_AUTH_METHODS
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        executor = RuntimeHttpClient.from_server_address(interceptors=[version, signed], **self._server())
        task = executor.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP.value]))
        executor.close()
        server = self._server()
        grid = HttpGrid(server["server_address"], server["insecure"], server["root_certificates"], token=task.token)
        grid._retry_invoker.max_time = PATIENCE_SECONDS  # Flower would try for ever.
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        self._grid = grid
        self._heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
        self._heartbeat.start()

    def _control(self) -> Any:
        from flwr.supercore.control.control_http_client import ControlHttpClient

        return ControlHttpClient.from_server_address(interceptors=[], **self._server())

    def _server(self) -> dict[str, Any]:
        ca = self._keys.ca.read_bytes() if self._keys else None
        return {"server_address": self._address, "insecure": self._keys is None, "root_certificates": ca}


def quiet_flower(folder: Path) -> None:
    """No statistics to anyone, no look for updates, and its files in a folder of ours."""
    make_private(folder)
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", FLWR_HOME=str(folder / "flower"))
    for name in ("NO_PROXY", "no_proxy"):  # A proxy of the house cannot reach this machine's own address.
        os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost".lstrip(",")
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise UserError(f"a federation of sites needs Flower; type {install_hint('flower')}") from error
    import logging

    logging.getLogger("flwr").setLevel(logging.ERROR)


def _listen(host: str, port: int) -> list[socket.socket]:
    """The port may be taken for a moment by the SuperLink of a coordinator that was killed."""
    give_up = time.monotonic() + FREE_SECONDS
    while True:
        try:
            return superlink.listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                raise UserError(
                    f"--host {host} --port {port} cannot be used ({error}); type another --port, or --host 0.0.0.0"
                ) from error
        time.sleep(0.5)


def _bundle() -> bytes:
    from flwr.cli.build import build_fab_from_disk

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pyproject.toml").write_text(_APP)
        (Path(folder) / "nothing.py").write_text("app = None\n")
        return bytes(build_fab_from_disk(Path(folder)))


def _reply(asked: str, coming: Coming) -> Reply:
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        message: Any = inflate_object_from_contents(coming.message, coming.there)
        if message.has_error():
            gone = message.error.code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)
            return Reply(
                asked, None, wire.GONE if gone else wire.plain(message.error.reason) or "no answer", offline=gone
            )
        return Reply(asked, read(message.content))
    except wire.BadMessage as error:
        return Reply(asked, None, wire.plain(error))
    except Exception as error:  # Whatever Flower's readers do with bytes that a site made up.
        return Reply(asked, None, f"it cannot be read ({type(error).__name__})")


def record(content: wire.Content) -> Any:
    """The Flower record of a message, either way."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    json, blob = wire.pack(content)
    array = Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)
    return RecordDict({"tensors": ArrayRecord({"blob": array}), "meta": ConfigRecord({"json": json})})


def read(record: Any) -> wire.Content:
    """A Flower record that `record` made, or anyone."""
    try:
        json, blob = record["meta"]["json"], record["tensors"]["blob"].data
    except (KeyError, TypeError, AttributeError) as error:
        raise wire.BadMessage(f"it lacks {error}") from error
    if not isinstance(json, str) or not isinstance(blob, bytes):
        raise wire.BadMessage("it has another form")
    return wire.unpack(json, blob)
