"""What a round is made of: the global state, a client's memory and its update. All are typed and keyword-only.

In files and messages the tensors of a state lie side by side, told apart by the start of their names; `tensors` and
`from_tensors` are the only places that know these.
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
    """What the server sends, and what it makes of the clients' answers.

    An update has the same two parts: the client's weights, and what its regularizer sends to the server.
    """

    weights: State
    server: State = field(
        default_factory=dict
    )  # the regularizer's tensors, such as SCAFFOLD's control variate

    def tensors(self) -> State:
        """Both parts by unique names."""
        return self.weights | _marked(_SERVER, self.server)

    def to(self, device: torch.device) -> "GlobalState":
        """The same on a device."""
        return GlobalState(weights=_moved(self.weights, device), server=_moved(self.server, device))

    def server_names(self) -> set[str]:
        """The names that the server's part has in `tensors`."""
        return {_SERVER + name for name in self.server}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "GlobalState":
        """Reverses `tensors`."""
        weights, (server,) = _parted(tensors, _SERVER)
        return cls(weights=weights, server=server)


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """All that is the same for every client of a round."""

    round: int  # 1-based
    rounds: int
    epochs: int
    seed: int  # of the run
    global_state: GlobalState
    batchnorm: str = "average"  # or local: each client keeps its statistics


@dataclass(frozen=True, kw_only=True)
class ClientMemory:
    """What a client keeps between rounds, when it last trained and how far it got."""

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
            | _marked(_BATCHNORM, self.batchnorm)
            | _marked(_REGULARIZER, self.regularizer)
            | _marked(_LOSS_SCALE, self.loss_scale)
        )

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], *, last_round: int = 0, steps: int = 0, epochs: int = 0
    ) -> "ClientMemory":
        """Reverses `tensors`."""
        private, others = _parted(tensors, _BATCHNORM, _REGULARIZER, _LOSS_SCALE)
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
    """What a client returns: ``state``, ``num_images`` and scalars go to the server; ``memory`` stays with it."""

    client: int
    num_images: int
    state: GlobalState
    memory: ClientMemory
    losses: Tensor  # (steps, 1 + terms): total, then the named terms
    loss_names: tuple[str, ...]
    images_seen: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of training
    data_seconds: float = 0.0  # of them, spent on making batches

    def loss(self, name: str = "total") -> Tensor:
        """The total, or a term, by step."""
        return self.losses[:, self.loss_names.index(name)]


@dataclass(frozen=True)
class Lost:
    """A client that has nothing to give in this round."""

    client: int
    reason: str
    fault: bool = False  # It answered, but not as it should.


@dataclass(kw_only=True)
class RoundRecord:
    """A round while it happens. Callbacks read it, and add to `row`, `notes` and `alarms`."""

    context: RoundContext
    clients: list[int]  # chosen to train
    updates: list[Update] = field(default_factory=list)  # the aggregated ones, without tensors
    resumed: list[int] = field(
        default_factory=list
    )  # of them, clients that an earlier process had trained
    refused: dict[int, str] = field(default_factory=dict)  # why, by client
    at_fault: set[int] = field(
        default_factory=set
    )  # of the refused, those who answered, but not as they should
    row: dict[str, Any] = field(default_factory=dict)  # of metrics.csv
    notes: list[str] = field(default_factory=list)  # what happened, in words
    alarms: list[str] = field(default_factory=list)  # what went wrong, in words
    bytes_up: int = 0
    bytes_down: int = 0
    train_seconds: float = 0.0
    aggregate_seconds: float = 0.0

    @property
    def number(self) -> int:
        """The round's number, from 1."""
        return self.context.round

    def summary(self) -> dict[str, Any]:
        """The numbers of a round that need no evaluation: losses, what clients measured, times and traffic."""
        row: dict[str, Any] = {"round": self.number}
        # By name: a site's word is its own, and one that tells other losses must not stop the run.
        for name in dict.fromkeys(name for update in self.updates for name in update.loss_names):
            telling = [update for update in self.updates if name in update.loss_names]
            means = [update.loss(name).mean().item() for update in telling]
            images = [update.num_images for update in telling]
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
        """The rate of this process: images of clients that an earlier one had trained took none of its time."""
        here = [update for update in self.updates if update.client not in self.resumed]
        if here:
            return sum(update.images_seen for update in here) / self.train_seconds
        # All were there when the run was resumed: their own rate, one after the other.
        seconds = sum(update.seconds for update in self.updates)
        return sum(update.images_seen for update in self.updates) / seconds if seconds else 0.0


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The mean of those values that are finite, since one client must not decide for the others; it never raises.

    Of equal values it is the value itself, to the last bit; of none, or where numbers are too large for it, nan.
    """
    finite = [number for number, value in enumerate(values) if math.isfinite(value)]
    kept = [values[number] for number in finite]
    if weights is None and len(set(kept)) == 1:
        return kept[0]
    try:
        return statistics.fmean(kept, weights and [weights[number] for number in finite])
    except (ArithmeticError, ValueError):
        return math.nan


def _moved(state: State, device: torch.device) -> State:
    return {name: tensor.to(device) for name, tensor in state.items()}


def _marked(mark: str, state: State) -> State:
    return {mark + name: tensor for name, tensor in state.items()}


def _parted(tensors: Mapping[str, Tensor], *marks: str) -> tuple[State, list[State]]:
    """The unmarked tensors, and those of each mark without it."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith(marks)}
    parts = [
        {
            name.removeprefix(mark): tensor
            for name, tensor in tensors.items()
            if name.startswith(mark)
        }
        for mark in marks
    ]
    return plain, parts
