"""The process of a worker, and how states travel to it and back."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedx_pl.data.module import FederatedDataModule
from fedx_pl.errors import UserError
from fedx_pl.federation.allocator import keep_freed_memory
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.device import resolve_device
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.methods.base import SSLMethod, State
from fedx_pl.provenance import foreign_code

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

CPU = torch.device("cpu")

# Bytes, dtype, shape and whether channels come last. Ray passes arrays on without a copy, but
# copies tensors.
Packed = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...], bool]]


EMPTY = GlobalState(weights={})


class Workload(NamedTuple):
    """The objects that a worker trains with."""

    model: SSLMethod
    data: FederatedDataModule
    settings: dict[str, Any]  # arguments of its `LocalTrainer`
    threads: int
    gpu: bool

    @classmethod
    def of(cls, trainer: FederatedTrainer, *, threads: int, gpu: bool) -> Workload:
        """The workload of a trainer's clients."""
        return cls(
            trainer.model, trainer.datamodule, trainer.local_settings(), threads=threads, gpu=gpu
        )

    def code(self) -> str:
        """A hash of the code of method, regularizer and callbacks that is not this package's."""
        parts = (self.model, self.settings["regularizer"], *self.settings["callbacks"])
        return foreign_code.hash_of(*map(type, parts))

    def packed(self) -> bytes:
        """Bytes for another process, with classes of a notebook; it imports those of modules."""
        from ray import cloudpickle

        where = self.model.device
        try:
            content: bytes = cloudpickle.dumps(self._replace(model=self.model.cpu()))
            return content
        finally:
            self.model.to(where)

    @classmethod
    def unpacked(cls, content: bytes) -> Workload:
        """Unpacks the bytes that `packed` made."""
        from ray import cloudpickle

        workload: Workload = cloudpickle.loads(content)
        return workload


class Answer(NamedTuple):
    """A worker's update; its tensors are packed."""

    update: Update
    state: Packed
    memory: Packed

    def unpacked(self, device: torch.device) -> Update:
        """The update with its tensors; the state on a device, the memory on the CPU."""
        state = GlobalState.from_tensors(unpack(self.state, device))
        return replace(
            self.update, state=state, memory=with_tensors(self.update.memory, unpack(self.memory))
        )


class Worker:
    """The actor that trains clients in a worker's process."""

    def start(self, work: bytes, folder: str, paths: Sequence[str]) -> tuple[str, str, str]:
        """Loads images and model.

        Args:
            work: the result of `Workload.packed`.
            folder: the folder of relative paths in it, if this machine has it.
            paths: where the driver finds modules, such as the user's method.

        Returns:
            The `split_name` of its images, the hash of its code, and which process it is.
        """
        sys.path += [path for path in paths if path not in sys.path]
        if os.path.isdir(folder):
            os.chdir(folder)
        machine = socket.gethostname()
        reported: list[str] = []
        try:
            self.work = Workload.unpacked(work)  # Not before: it may need modules of those paths.
            self.work.data.report = reported.append
            self.work.data.setup()
        except ImportError as error:
            raise UserError(f"on {machine}: {error}; install there what the run needs") from error
        except UserError as error:
            raise UserError("\n".join([f"on {machine}:", *reported, str(error)])) from error
        if self.work.threads:
            torch.set_num_threads(self.work.threads)
        self.device = resolve_device("cuda" if self.work.gpu else "cpu")
        if not self.work.gpu:
            keep_freed_memory()
        self.trainer = LocalTrainer(self.work.model, device=self.device, **self.work.settings)
        return split_name(self.work.data), self.work.code(), f"process {os.getpid()} on {machine}"

    def train(
        self,
        context: RoundContext,
        state: Packed,
        client: int,
        counters: ClientMemory | None,
        kept: Packed,
    ) -> Answer:
        """Trains one client for a round.

        Args:
            context: the round's context, without the global state.
            state: the global state.
            client: the client's number.
            counters: its memory without tensors; None for a client that has none.
            kept: the tensors of its memory.
        """
        context = replace(
            context, global_state=GlobalState.from_tensors(unpack(state, self.device))
        )
        memory = counters and with_tensors(counters, unpack(kept))
        data = self.work.data.client(
            client,
            seed=context.seed,
            round_number=context.round,
            model=self.work.model,
            device=self.device,
        )
        update = self.trainer.run(context, client=client, data=data, memory=memory)
        return Answer(
            update=replace(update, state=EMPTY, memory=update.memory.without_tensors()),
            state=pack(update.state.tensors()),
            memory=pack(update.memory.tensors()),
        )


def split_name(data: FederatedDataModule) -> str:
    """A name that data modules share only if they hold the same images, split in the same way."""
    digest = hashlib.sha256(data.images.fingerprint.encode())
    for rows in data.clients:
        digest.update(np.array([len(rows), *rows], np.int64).tobytes())
    return digest.hexdigest()


def pack(state: State) -> Packed:
    """Tensors as arrays of bytes, which numpy has for every dtype, in their memory order."""
    packed = {}
    for name, tensor in state.items():
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        plain = (tensor.movedim(1, -1) if last else tensor).detach().cpu().contiguous()
        packed[name] = (
            plain.reshape(-1).view(torch.uint8).numpy(),
            plain.dtype,
            tuple(plain.shape),
            last,
        )
    return packed


def unpack(state: Packed, device: torch.device = CPU) -> State:
    """Restores the tensors that `pack` packed.

    What came through the object store is shared and must not be changed.
    """
    unpacked = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NumPy array is not writable.*")
        for name, (content, dtype, shape, last) in state.items():
            # torch cannot see an empty array as one of another dtype.
            flat = (
                torch.from_numpy(content).view(dtype)
                if content.size
                else torch.empty(0, dtype=dtype)
            )
            plain = flat.reshape(shape)
            unpacked[name] = (plain.movedim(-1, 1) if last else plain).to(device)
    return unpacked


def with_tensors(counters: ClientMemory, tensors: State) -> ClientMemory:
    """A memory from its two parts, which are sent separately."""
    return ClientMemory.from_tensors(
        tensors, last_round=counters.last_round, steps=counters.steps, epochs=counters.epochs
    )
