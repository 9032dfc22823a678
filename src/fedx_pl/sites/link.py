"""The coordinator's side of Flower: its SuperLink, and messages to and from sites.

Flower would run a ServerApp in a process of its own, from a bundle that anyone at its Control API may submit. Here the
coordinator's process takes the ServerApp's place: it asks the SuperLink for the task with a secret that only it knows.
These are modules that Flower does not document; the `flower` extra pins the version they were tried with.
"""

import errno
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedx_pl.errors import UserError, install_hint
from fedx_pl.files import make_private, private_file
from fedx_pl.sites import superlink, wire
from fedx_pl.sites.keys import ServerKeys
from fedx_pl.sites.seal import Seal

START_SECONDS = 60.0
PATIENCE_SECONDS = 30.0  # with a SuperLink that does not answer
FREE_SECONDS = 10.0  # until a port that is taken is free again
HTTP_SECONDS = 30.0  # as Flower's clients
_NOBODY = "coordinator"  # an address that is never looked up: the entrance is a file
MOST_RECORD = 2 * 2**20  # bytes of an object that is no part of the weights; the JSON is one
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
    made_here: bool  # by the SuperLink, as nobody answers


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
            raise UserError(
                f"--insecure --host {host}: without TLS only on this machine; type --host 127.0.0.1"
            )
        self._folder, self._keys = folder, keys
        self._seal = Seal(keys) if keys else None
        self._coming: dict[str, Coming] = {}  # by the message it answers
        self._sent = Size(0, 0)
        sockets = _listen(host, port)
        self._log = open(folder / "superlink.log", "ab", opener=private_file)  # noqa: SIM115 (as long as the process)
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
        """Who is connected now."""
        with self._answering():
            nodes = [node for node in self._grid.get_nodes() if node.status == "online"]
        known = [node for node in nodes if self._keys is None or node.node_id in self._names]
        return [
            Connected(node.node_id, self._names.get(node.node_id, ""), node.last_activated_at)
            for node in known
        ]

    def send(self, node: int, kind: str, content: wire.Content, seconds: float) -> str:
        """Posts a message and returns its name; it is forgotten after ``seconds``."""
        from flwr.app import Message

        with self._answering():
            found, size = self._record(node, kind, content)
            self._sent = Size(*map(max, self._sent, size))
            (message,) = self._grid.push_messages([Message(found, node, kind, ttl=seconds)])
        return (
            str(message) or f"unsent {secrets.token_hex(8)}"
        )  # Of which the SuperLink says that there is no answer.

    def _record(self, node: int, kind: str, content: wire.Content) -> tuple[Any, "Size"]:
        text, blob = wire.pack(content)
        seal: dict[str, Any] = {}
        if self._seal is not None and self._keys is not None:
            # Who has left is no site any more; the SuperLink will say so.
            public = self._keys.sites.get(self._names.get(node, ""), b"")
            seal = self._seal.fields(public, kind, text, blob)
        return _made(text, blob, seal), size_of(blob)

    def receive(self, messages: Iterable[str]) -> Iterator[Reply]:
        """Answers that have come whole, one after the other: each may be as large as the weights.

        Flower's own way would wait for one whose upload is slow or breaks off, and end at one that it cannot read.
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
                    # What it answers is what the SuperLink says, not what is written in the answer itself.
                    replied = about.metadata.reply_to_message_id
                    here = (
                        about.metadata.src_node_id == SUPERLINK_NODE_ID
                    )  # The door lets no site say so.
                    self._coming[replied] = Coming(
                        about.metadata.message_id, parts, {}, made_here=here
                    )
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
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(message_object_id=coming.message, **where)
        )
        return _reply(asked, coming, self._sent)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        import httpx
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
        from flwr.supercore.run import RunNotRunningException

        try:
            yield
        except (httpx.HTTPError, RunNotRunningException, ObjectPushError) as error:
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
        shutil.rmtree(self._entrance.parent, ignore_errors=True)

    def _start(
        self, sockets: list[socket.socket], entrance: socket.socket
    ) -> subprocess.Popen[bytes]:
        secret = self._folder / "superexec.secret"
        with open(secret, "w", opener=private_file) as file:
            file.write(self._secret)
        numbers = [one.fileno() for one in sockets]
        # By its file, not as a module of this package: it needs no torch. -P: nor what lies beside it.
        command = [sys.executable, "-P", superlink.__file__, str(os.getpid())]
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

        give_up, reason = time.monotonic() + START_SECONDS, "it ended"
        with self._http() as client:
            while time.monotonic() < give_up and self._process.poll() is None:
                try:
                    client.get("http://coordinator/health")
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
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
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
        """Makes one of Flower's clients call through the coordinator's own entrance."""
        client._client.close()
        client._client = self._http()
        return client

    def _http(self) -> Any:
        import httpx

        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._entrance)), timeout=HTTP_SECONDS
        )


def quiet_flower(folder: Path) -> None:
    """No statistics to anyone, no look for updates, and its files in a folder of ours."""
    make_private(folder)
    os.environ.update(
        FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", FLWR_HOME=str(folder / "flower")
    )
    for name in (
        "NO_PROXY",
        "no_proxy",
    ):  # A proxy of the house cannot reach this machine's own address.
        os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost".lstrip(",")
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"a federation of sites needs Flower; type {install_hint('flower')}"
        ) from error
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


def _entrance() -> tuple[Path, socket.socket]:
    """A unix socket in a folder that no other user can enter; not in the run's, as such a path must be short."""
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


def _reply(asked: str, coming: Coming, sent: "Size") -> Reply:
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        most = Size(
            2 * sent.names + 2**16, 2 * sent.tensors + 2**20
        )  # The answer is about as large as the question.
        _require_small(coming.there, most.tensors)
        message: Any = inflate_object_from_contents(coming.message, coming.there)
        if message.has_error():
            known = message.error.code in (
                ErrorCode.NODE_UNAVAILABLE,
                ErrorCode.MESSAGE_UNAVAILABLE,
            )
            gone = known and coming.made_here
            return Reply(
                asked,
                None,
                wire.GONE if gone else wire.plain(message.error.reason) or "no answer",
                offline=gone,
            )
        return Reply(asked, read(message.content, most))
    except wire.BadMessage as error:
        return Reply(asked, None, wire.plain(error))
    except Exception as error:  # Whatever Flower's readers do with bytes that a site made up.
        return Reply(asked, None, f"it cannot be read ({type(error).__name__})")


def _require_small(parts: dict[str, bytes], most: int) -> None:
    """An array names its parts by number, one as often as it likes: a small answer could stand for terabytes."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_head_values_from_object_content,
    )

    total = 0
    for content in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != "ArrayChunk" and len(content) > MOST_RECORD:
            raise wire.BadMessage(f"it has a record of {len(content):,} bytes")
        if kind == "Array":
            total += sum(
                len(parts[children[at]])
                for at in json.loads(get_object_body(content, Array))["arraychunk_ids"]
            )
    if total > most:
        raise wire.BadMessage(f"it has {total:,} bytes of tensors, {most:,} are allowed")


class Size(NamedTuple):
    """Of the tensors in a message, in bytes: their names and shapes, and all of them."""

    names: int
    tensors: int


def size_of(blob: bytes) -> Size:
    """The size of safetensors, without reading them."""
    return Size(int.from_bytes(blob[:8], "little"), len(blob))


def record(content: wire.Content) -> Any:
    """The Flower record of a message that is not sealed: a site's answer."""
    return _made(*wire.pack(content), {})


def _made(text: str, blob: bytes, seal: dict[str, Any]) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)
    return RecordDict(
        {"tensors": ArrayRecord({"blob": array}), "meta": ConfigRecord({"json": text} | seal)}
    )


def read(
    record: Any, most: Size | None = None, check: Callable[[Any, str, bytes], None] | None = None
) -> wire.Content:
    """A Flower record that `record` made, or anyone.

    Args:
        record: of a message.
        most: the size that its tensors may have.
        check: looks at the record of the seal, the JSON and the tensors, and raises `BadMessage` if they are not right.
    """
    try:
        text, blob = record["meta"]["json"], record["tensors"]["blob"].data
    except (KeyError, TypeError, AttributeError) as error:
        raise wire.BadMessage(f"it lacks {error}") from error
    if not isinstance(text, str) or not isinstance(blob, bytes):
        raise wire.BadMessage("it has another form")
    if most is not None and (size_of(blob).names > most.names or len(blob) > most.tensors):
        raise wire.BadMessage("it has more or larger tensors than the network")
    if check is not None:
        check(record["meta"], text, blob)
    return wire.unpack(text, blob)
