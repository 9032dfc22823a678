"""Trains clients on the workers of a Ray cluster: the cores or GPUs of one or several machines.

A worker (`worker.py`) is a process that loads images and model once and then trains the clients it
is sent. The global state goes into Ray's object store once per round. A client's memory is sent
with it, so that any worker can train it next, and comes back with its update for the trainer to
save.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import override

from fedx_pl.engines.base import Engine, MemoryOf
from fedx_pl.engines.options import EngineOptions
from fedx_pl.engines.worker import EMPTY, Worker, Workload, pack, split_name
from fedx_pl.errors import UserError, install_hint
from fedx_pl.federation.round import Lost, RoundContext, Update
from fedx_pl.options import OptionError

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

PATIENCE_SECONDS = 60.0  # until a note says that no worker has started


@dataclass(kw_only=True)
class _Seat:
    """A worker as the driver sees it. When it dies, another one takes its seat."""

    name: str
    actor: Any
    ready: Any  # a reference to what `Worker.start` returns
    process: str = "before it was ready"
    deaths: int = 0  # in a row, before it was ready


class RayEngine(Engine):
    """Trains as many clients at a time as there are workers."""

    def __init__(self, trainer: FederatedTrainer, options: EngineOptions | None = None) -> None:
        """Starts or finds Ray and asks for workers, which load images and model meanwhile.

        Args:
            trainer: the run's trainer.
            options: how many workers, and where.
        """
        super().__init__(trainer, options)
        options = self.options
        self.ray = ray = import_ray(local=not options.address)
        self._seats: list[_Seat] = []
        self._ours = not ray.is_initialized()  # A script may have connected to a cluster already.
        try:
            with _undisturbed():
                self.sizes = self._start()
            self._split = split_name(trainer.datamodule)
            work = Workload.of(trainer, threads=self.sizes.threads, gpu=bool(self.sizes.gpus))
            self._code = work.code()
            self._work = ray.put(work.packed())
            self._seats += [
                self._seat(f"worker {number}") for number in range(1, self.sizes.workers + 1)
            ]
        except BaseException:
            self.close()
            raise

    def _start(self) -> Sizes:
        ray = self.ray
        trainer = self.trainer
        address = self.options.address
        common = {"log_to_driver": False, "logging_level": "error"}
        if self._ours and not address:
            gpus = torch.cuda.device_count()
            sizes = self._sizes(usable_cores(), gpus)
            self.trainer.note(f"starting Ray ({sizes}), about 15 s")
            tensors = sum(tensor.nbytes for tensor in trainer.model.state_dict().values())
            ray.init(
                address="local",
                num_cpus=sizes.workers,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=max(256 << 20, 4 * (sizes.workers + 2) * tensors),
                _node_ip_address="127.0.0.1",
                **common,
            )
            return sizes
        try:
            host, _, port = address.rpartition(":")
            if host and port.isdigit() and "/" not in host:
                # Ray itself would try again for minutes.
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address or None, ignore_reinit_error=True, **common)
        except (OSError, RuntimeError, ValueError) as error:
            problem = (
                f"cannot be used: {error}\n"
                "`ray start --head` starts a cluster; without {address} this machine is used"
            )
            raise OptionError("address", address, problem, owner=EngineOptions) from error
        resources = ray.cluster_resources()
        cores = int(resources.get("CPU", 0))
        gpus = int(resources.get("GPU", 0))
        sizes = self._sizes(cores, gpus)
        if sizes.workers > cores:
            advice = f"{{workers}}={cores} or fewer, one per CPU of the cluster"
            raise OptionError("workers", sizes.workers, advice=advice, owner=EngineOptions)
        self.trainer.note(f"Ray's cluster has {cores} CPUs and {gpus} GPUs; this run takes {sizes}")
        return sizes

    def _sizes(self, cores: int, gpus: int) -> Sizes:
        trainer = self.trainer
        return Sizes.of(
            self.options,
            clients=trainer.num_sampled,
            cores=cores,
            gpus=0 if trainer.accelerator == "cpu" else gpus,
            threads=trainer.threads,
        )

    def _seat(self, name: str, deaths: int = 0) -> _Seat:
        installed = (sys.prefix, sys.base_prefix)
        paths = [path for path in map(os.path.abspath, sys.path) if not path.startswith(installed)]
        actor = self.new_actor()
        return _Seat(
            name=name,
            actor=actor,
            ready=actor.start.remote(self._work, os.getcwd(), paths),
            deaths=deaths,
        )

    def new_actor(self) -> Any:
        """Asks Ray for a process, which starts when there is room."""
        kind = self.ray.remote(Worker).options(
            num_cpus=1, num_gpus=self.sizes.gpus, scheduling_strategy="SPREAD"
        )
        return kind.remote()

    @override
    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update | Lost]:
        ray = self.ray
        errors = ray.exceptions
        state = ray.put(pack(context.global_state.tensors()))
        context = replace(context, global_state=EMPTY)
        sizes = {client: len(self.trainer.datamodule.clients[client]) for client in clients}
        # The largest client first: started last, it would keep the others waiting.
        waiting = deque(sorted(clients, key=lambda client: (-sizes[client], client)))
        tries = Counter[int]()
        idle = deque[_Seat]()
        jobs: dict[Any, tuple[_Seat, int | None]] = {
            seat.ready: (seat, None) for seat in self._seats
        }

        def send() -> None:
            while waiting and idle:
                seat = idle.popleft()
                client = waiting.popleft()
                self.trainer.working(seat.name, client)
                memory = memory_of(client)
                counters = memory.without_tensors() if memory else None
                kept = pack(memory.tensors()) if memory else {}
                job = seat.actor.train.remote(context, state, client, counters, kept)
                jobs[job] = seat, client

        while waiting or any(client is not None for _, client in jobs.values()):
            send()
            done, _ = ray.wait(list(jobs), timeout=PATIENCE_SECONDS)
            if not done:
                if all(client is None for _, client in jobs.values()):
                    self.trainer.note(
                        "still no worker is ready; `ray status` shows whether others use the "
                        "cluster"
                    )
                continue
            seat, client = jobs.pop(done[0])
            self.trainer.working(seat.name, None)
            try:
                reply = ray.get(done[0])
            except errors.RayTaskError as error:  # Our code or the user's raised it.
                if isinstance(error.cause, UserError):
                    raise UserError(
                        f"{seat.name} {error.cause}" if client is None else str(error.cause)
                    ) from None
                raise
            except errors.RayError as error:
                new = self._replace(seat, starting=client is None, error=error)
                jobs[new.ready] = new, None
                if client is not None:
                    tries[client] += 1
                    if tries[client] <= self.options.retries:
                        self.trainer.note(
                            f"{seat.name} died with client {client} ({seat.process}); trying again"
                        )
                        waiting.appendleft(client)
                    else:
                        yield Lost(client, f"{seat.name} died with it ({seat.process})")
                continue
            idle.append(seat)
            if client is None:
                self._check(seat, *reply)
                continue
            send()  # Before the update is aggregated, so that the worker need not wait.
            self.trainer.step(len(reply.update.losses))
            yield reply.unpacked(self.trainer.device)

    def _check(self, seat: _Seat, split: str, code: str, process: str) -> None:
        seat.process = process
        seat.deaths = 0
        if split != self._split:
            raise UserError(
                f"{seat.name} ({process}) has other images than this machine, or splits them in "
                f"another way; give all machines the same files, or type data.root= and "
                f"data.cache= of a folder that they share"
            )
        if code != self._code:  # Another machine's copy, or a worker that started after an edit.
            raise UserError(
                f"{seat.name} ({process}) has other code of {type(self.trainer.model).__name__} or "
                f"its callbacks than this process; give all machines the same files, and do not "
                f"edit them while a run trains"
            )

    def _replace(self, seat: _Seat, starting: bool, error: Exception) -> _Seat:
        with suppress(Exception):
            self.ray.kill(seat.actor)  # It may be alive, but not reachable.
        deaths = seat.deaths + starting
        if deaths > self.options.retries:
            raise UserError(
                f"{seat.name} died {deaths} times before it was ready. Ray says: {error}"
            )
        new = self._seats[self._seats.index(seat)] = self._seat(seat.name, deaths)
        return new

    def close(self) -> None:
        """Ends the workers, and Ray if it was started here."""
        for seat in self._seats:
            with suppress(Exception):
                self.ray.kill(seat.actor)
        if self._ours:
            self.ray.shutdown()


class Sizes(NamedTuple):
    """The number of workers, and the resources of each."""

    workers: int
    gpus: float
    threads: int

    @classmethod
    def of(
        cls, options: EngineOptions, *, clients: int, cores: int, gpus: int, threads: int = 0
    ) -> Sizes:
        """Fills the gaps in the options.

        Args:
            options: the user's options.
            clients: clients of a round; more workers would be idle.
            cores: cores that Ray may use, on all machines.
            gpus: GPUs that Ray may use, on all machines.
            threads: threads of a worker; 0: its share of the cores.
        """
        share = options.gpus_per_worker
        if share < 0:
            share = 1.0 if gpus else 0.0
        # Several workers may share a GPU, but no worker gets parts of two.
        room = int(gpus / share) if share > 1 else gpus * int(1 / share + 1e-9) if share else cores
        workers = min(options.workers or max(room, 1), clients)
        if share and workers > room:
            advice = (
                f"a smaller share, or fewer {{workers}}: there are {gpus} GPUs and "
                f"{workers} workers"
            )
            raise OptionError("gpus_per_worker", share, advice=advice, owner=EngineOptions)
        return cls(workers, share, threads or max(1, cores // workers))

    def __str__(self) -> str:
        threads = f"{self.threads} CPU thread{'s' if self.threads > 1 else ''}"
        return f"{self.workers} x {f'{self.gpus:g} GPU' if self.gpus else threads}"


def import_ray(local: bool) -> Any:
    """Imports Ray with settings that it reads at that moment, without usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's own choice is 15, so that any other program would come first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if local:
        # Listens on the loopback device only, as on Windows and macOS.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"engine=ray needs Ray; type {install_hint('ray')}") from error
    return ray


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delays Ctrl-C while Ray starts, which would crash it, and restores SIGTERM's handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = signal.getsignal(signal.SIGINT)
    terminate = signal.getsignal(signal.SIGTERM)
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        if callable(terminate):  # Otherwise Ray's is better, since it ends Ray's processes.
            signal.signal(signal.SIGTERM, terminate)
        if received:
            signal.raise_signal(signal.SIGINT)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
