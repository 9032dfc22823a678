"""The parts of a round: the global state, a client's memory and its update.

Files and messages hold the tensors of a state in one dictionary, with prefixes that only `tensors`
and `from_tensors` know.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedx_pl.methods.base import State

_SERVER = "server/"
_BATCHNORM = "batchnorm/"
_REGULARIZER = "regularizer/"
_LOSS_SCALE = "scale/"


@dataclass(frozen=True, kw_only=True)
class GlobalState:
    """The state that the server sends, and aggregates from the clients' updates.

    An update has the same two parts: the client's weights, and what its regularizer sends.
    """

    weights: State
    server: State = field(default_factory=dict)  # of the regularizer, e.g. SCAFFOLD's variates

    def tensors(self) -> State:
        """The tensors of both parts, by unique names."""
        return self.weights | _prefixed(_SERVER, self.server)

    def to(self, device: torch.device) -> "GlobalState":
        """Copies the state to a device."""
        return GlobalState(weights=_moved(self.weights, device), server=_moved(self.server, device))

    def server_names(self) -> set[str]:
        """The names that the server's part has in `tensors`."""
        return {_SERVER + name for name in self.server}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "GlobalState":
        """Restores an object from the dictionary that `tensors` made."""
        weights, (server,) = _split(tensors, _SERVER)
        return cls(weights=weights, server=server)


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """The values that all clients of a round share."""

    round: int  # 1-based
    rounds: int
    epochs: int
    seed: int  # the run's
    global_state: GlobalState
    batchnorm: str = "average"  # or local: each client keeps its own statistics


@dataclass(frozen=True, kw_only=True)
class ClientMemory:
    """The memory of a client between rounds, with when it last trained and for how long."""

    private: State = field(default_factory=dict)  # the method's private tensors
    batchnorm: State = field(default_factory=dict)  # statistics, under `batchnorm=local`
    regularizer: State = field(default_factory=dict)  # what the regularizer left with the client
    loss_scale: State = field(default_factory=dict)  # of mixed half precision
    last_round: int = 0
    steps: int = 0
    epochs: int = 0

    def tensors(self) -> State:
        """All tensors by unique names."""
        return (
            self.private
            | _prefixed(_BATCHNORM, self.batchnorm)
            | _prefixed(_REGULARIZER, self.regularizer)
            | _prefixed(_LOSS_SCALE, self.loss_scale)
        )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], *, last_round: int = 0, steps: int = 0, epochs: int = 0
    ) -> "ClientMemory":
        """Restores an object from the dictionary that `tensors` made."""
        private, others = _split(tensors, _BATCHNORM, _REGULARIZER, _LOSS_SCALE)
        batchnorm, regularizer, loss_scale = others
        return cls(
            private=private,
            batchnorm=batchnorm,
            regularizer=regularizer,
            loss_scale=loss_scale,
            last_round=last_round,
            steps=steps,
            epochs=epochs,
        )

    def without_tensors(self) -> "ClientMemory":
        """The counters alone."""
        return ClientMemory(last_round=self.last_round, steps=self.steps, epochs=self.epochs)


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of a client's round; all of it goes to the server, except ``memory``."""

    client: int
    num_images: int
    state: GlobalState
    memory: ClientMemory
    losses: Tensor  # (steps, 1 + terms): total, then the named terms
    loss_names: tuple[str, ...]
    images_seen: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of training
    data_seconds: float = 0.0  # the part of them spent on making batches

    def loss(self, name: str = "total") -> Tensor:
        """The total loss, or one of its terms, by step."""
        return self.losses[:, self.loss_names.index(name)]


@dataclass(frozen=True)
class Lost:
    """A client without an update in this round."""

    client: int
    reason: str
    fault: bool = False  # whether it answered with something wrong


@dataclass(kw_only=True)
class RoundRecord:
    """A round while it happens. Callbacks read it, and add to `row`, `notes` and `alarms`."""

    context: RoundContext
    clients: list[int]  # chosen to train
    updates: list[Update] = field(default_factory=list)  # the aggregated ones, without tensors
    resumed: list[int] = field(default_factory=list)  # clients that an earlier process trained
    refused: dict[int, str] = field(default_factory=dict)  # reasons, by client
    at_fault: set[int] = field(default_factory=set)  # refused clients that are to blame
    row: dict[str, Any] = field(default_factory=dict)  # of metrics.csv
    notes: list[str] = field(default_factory=list)  # what happened
    alarms: list[str] = field(default_factory=list)  # what went wrong
    bytes_up: int = 0
    bytes_down: int = 0
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0

    @property
    def number(self) -> int:
        """The round's number, from 1."""
        return self.context.round

    def summary(self) -> dict[str, Any]:
        """The numbers of a round without evaluation: losses, client metrics, times and traffic."""
        row: dict[str, Any] = {"round": self.number}
        # By name: a site that reports other losses must not stop the run.
        for name in dict.fromkeys(name for update in self.updates for name in update.loss_names):
            reporting = [update for update in self.updates if name in update.loss_names]
            means = [update.loss(name).mean().item() for update in reporting]
            images = [update.num_images for update in reporting]
            row["loss" if name == "total" else f"loss_{name}"] = mean(means, images)
        for name in dict.fromkeys(name for update in self.updates for name in update.metrics):
            row[name] = mean(
                [update.metrics[name] for update in self.updates if name in update.metrics]
            )
        data_seconds = sum(update.data_seconds for update in self.updates)
        return row | {
            "clients": len(self.updates),
            "dropped": len(self.refused),
            "images_per_second": self.images_per_second(),
            "train_seconds": self.train_seconds,
            "round_seconds": self.train_seconds,
            "data_seconds": data_seconds,
            "step_seconds": sum(update.seconds for update in self.updates) - data_seconds,
            "aggregate_seconds": self.aggregate_seconds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
        }

    def images_per_second(self) -> float:
        """The rate of this process, without clients that an earlier one trained."""
        here = [update for update in self.updates if update.client not in self.resumed]
        if here:
            return sum(update.images_seen for update in here) / self.train_seconds
        # All were trained by an earlier process: their own rate, one after the other.
        seconds = sum(update.seconds for update in self.updates)
        return sum(update.images_seen for update in self.updates) / seconds if seconds else 0.0


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The mean of the finite values, since one client must not decide for the others.

    The mean of equal values is the value itself, to the last bit; without values, or if they are
    too large, it is nan.
    """
    finite = [number for number, value in enumerate(values) if math.isfinite(value)]
    kept = [values[number] for number in finite]
    if weights is None and len(set(kept)) == 1:
        return kept[0]
    try:
        return statistics.fmean(kept, weights and [weights[number] for number in finite])
    except (ArithmeticError, ValueError):
        return math.nan


def number_of(value: Any) -> Any:
    """A plain number, also from a tensor or an array of one; a `TypeError` for anything else."""
    if isinstance(value, int | float):
        return value
    if getattr(value, "shape", None) != ():
        raise TypeError(f"{type(value).__name__} is not one number")
    return value.item()


def _moved(state: State, device: torch.device) -> State:
    return {name: tensor.to(device) for name, tensor in state.items()}


def _prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def _split(tensors: Mapping[str, Tensor], *prefixes: str) -> tuple[State, list[State]]:
    """The tensors without a prefix, and those of each prefix with it removed."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
    parts = [
        {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        for prefix in prefixes
    ]
    return plain, parts
