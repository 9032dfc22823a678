"""What runs in a worker's process, and how states travel to it and back."""

import hashlib
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fedx_pl.engines.base import Work
from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.methods.base import State
from fedx_pl.provenance import foreign_code

CPU = torch.device("cpu")

# Bytes, dtype, shape and whether channels come last: Ray hands arrays on without copying them, tensors it copies.
Packed = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...], bool]]


EMPTY = GlobalState(weights={})


class Answer(NamedTuple):
    """A worker's update; its tensors are packed."""

    update: Update
    state: Packed
    memory: Packed

    def unpacked(self, device: torch.device) -> Update:
        """The update with its tensors; the state on a device, the memory on the CPU."""
        state = GlobalState.from_tensors(unpack(self.state, device))
        return replace(self.update, state=state, memory=with_tensors(self.update.memory, unpack(self.memory)))


class Worker:
    """What runs in a worker's process."""

    def start(
        self, make: Callable[[Callable[[str], None]], Work], folder: str, paths: Sequence[str]
    ) -> tuple[str, str, str]:
        """Loads images and model.

        Args:
            make: of `Work.elsewhere`.
            folder: that relative paths in it start from, if this machine has it.
            paths: where the driver finds modules, such as the user's own method.

        Returns:
            The `split_name` of what it found, the hash of the method's code, and which process it is.
        """
        sys.path += [path for path in paths if path not in sys.path]
        if os.path.isdir(folder):
            os.chdir(folder)
        machine, said = socket.gethostname(), list[str]()
        try:
            plan = make(said.append)
        except UserError as error:
            raise UserError("\n".join([f"on {machine}:", *said, str(error)])) from error
        self.plan = plan
        self.trainer = self.plan.trainer(lambda: None)
        code = foreign_code.hash_of(type(plan.model))
        return split_name(plan), code, f"process {os.getpid()} on {machine}"

    def train(
        self, context: RoundContext, state: Packed, client: int, counters: ClientMemory | None, kept: Packed
    ) -> Answer:
        """Trains one client for a round.

        Args:
            context: of the round, without the global state.
            state: the global state.
            client: who trains.
            counters: its memory without tensors; None for a client that has none.
            kept: the tensors of its memory.
        """
        context = replace(context, global_state=GlobalState.from_tensors(unpack(state, self.plan.device)))
        memory = counters and with_tensors(counters, unpack(kept))
        update = self.trainer.run(
            context, client=client, data=self.plan.client_data(client, context.round), memory=memory
        )
        return Answer(
            update=replace(update, state=EMPTY, memory=update.memory.without_tensors()),
            state=pack(update.state.tensors()),
            memory=pack(update.memory.tensors()),
        )


def split_name(plan: Work) -> str:
    """Two plans with the same name train on the same images, split in the same way."""
    digest = hashlib.sha256(plan.data.fingerprint.encode())
    for rows in plan.clients:
        digest.update(np.array([len(rows), *rows], np.int64).tobytes())
    return digest.hexdigest()


def pack(state: State) -> Packed:
    """Tensors as arrays of bytes, which numpy has for every dtype, in the memory order they have."""
    packed = {}
    for name, tensor in state.items():
        last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        plain = (tensor.movedim(1, -1) if last else tensor).detach().cpu().contiguous()
        packed[name] = plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape), last
    return packed


def unpack(state: Packed, device: torch.device = CPU) -> State:
    """The inverse of `pack`. What came through the object store must not be written to: others may look at it."""
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*NumPy array is not writable.*")
        for name, (content, dtype, shape, last) in state.items():
            # torch cannot see an empty array as one of another dtype.
            flat = torch.from_numpy(content).view(dtype) if content.size else torch.empty(0, dtype=dtype)
            plain = flat.reshape(shape)
            found[name] = (plain.movedim(-1, 1) if last else plain).to(device)
    return found


def with_tensors(counters: ClientMemory, tensors: State) -> ClientMemory:
    """A memory from the parts that travel apart."""
    return ClientMemory.from_tensors(
        tensors, last_round=counters.last_round, steps=counters.steps, epochs=counters.epochs
    )
