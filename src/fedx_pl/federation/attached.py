"""The view of a trainer with model and images for callbacks, engines and evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedx_pl.errors import UserError
from fedx_pl.federation import estimate, privacy
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, RoundRecord, Update
from fedx_pl.federation.run_folder import read_run
from fedx_pl.federation.run_state import RunState
from fedx_pl.seeding import derive

if TYPE_CHECKING:
    from fedx_pl.data.batches import ClientData
    from fedx_pl.data.module import FederatedDataModule
    from fedx_pl.evaluation.evaluate import Evaluator
    from fedx_pl.evaluation.options import EvaluationOptions
    from fedx_pl.federation.identity import Identity
    from fedx_pl.federation.options import PrivacyOptions
    from fedx_pl.federation.regularizers import Regularizer
    from fedx_pl.methods.base import SSLMethod


class Attached:
    """The base of `FederatedTrainer`: everything but its arguments and the rounds."""

    model: SSLMethod
    datamodule: FederatedDataModule
    evaluator: Evaluator
    description: Identity
    folder: Path
    checkpoints: Checkpoints
    device: torch.device
    state: RunState
    described: dict[str, Any] | None = None  # content of the run folder's files, for checkpoints
    global_state: GlobalState
    workplace: Any  # the engine
    _record: RoundRecord | None
    # The trainer's arguments
    callbacks: list[Any]
    max_rounds: int
    local_epochs: int
    clients_per_round: int | float
    min_clients: int
    batchnorm: str
    regularizer: Regularizer
    privacy: PrivacyOptions
    evaluation: EvaluationOptions | None
    precision: str
    seed: int
    keep: int
    fast_dev_run: bool | int

    @property
    def current_round(self) -> int:
        """The last saved round; 0 before the first."""
        return self.state.round

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of all saved rounds."""
        return self.state.rows

    @property
    def untrained(self) -> dict[str, float]:
        """The accuracies of the untrained network."""
        return self.state.untrained

    @untrained.setter
    def untrained(self, accuracies: dict[str, float]) -> None:
        self.state.untrained = accuracies

    @property
    def seconds(self) -> float:
        """The duration of all saved rounds."""
        return self.state.seconds

    def due(self, round_number: int) -> tuple[bool, bool]:
        """Whether (kNN, the linear probe) is due after a round."""
        return (
            self.evaluator.due(round_number, self.max_rounds) if self.evaluation else (False, False)
        )

    @property
    def num_sampled(self) -> int:
        """The number of clients that train in a round."""
        clients = self.datamodule.num_clients
        sampled = self.clients_per_round
        # `round` would turn half of 5 into 2.
        wanted = sampled if isinstance(sampled, int) else int(sampled * clients + 0.5)
        return max(min(wanted, clients), self.min_clients, 1)

    def choose_clients(self, round_number: int, present: Sequence[int] | None = None) -> list[int]:
        """The clients of a round: all or a sample of them, or of those ``present`` if given."""
        able = np.arange(len(self.datamodule.clients)) if present is None else np.array(present)
        draw = np.random.default_rng(derive(self.seed, "clients", round_number))
        chosen = draw.choice(len(able), size=min(self.num_sampled, len(able)), replace=False)
        return sorted(able[chosen].tolist())

    def client_data(self, client: int, round_number: int) -> ClientData:
        """A client's batches in a round."""
        return self.datamodule.client(
            client, seed=self.seed, round_number=round_number, model=self.model, device=self.device
        )

    def steps_of(self, client: int) -> int:
        """The optimizer steps of a client in one round."""
        return estimate.steps_of(self, client)

    def estimate_seconds(self, first_round: int = 1) -> float:
        """The expected duration, by a few training steps; the model is not changed."""
        return estimate.run_seconds(self, first_round)

    def epsilon_after(self, round_number: int) -> float:
        """The epsilon that the client chosen most often has spent by the end of a round.

        Which sites took part in which round is not known, so one that took part in all is assumed.
        """
        most = round_number
        if self.datamodule.clients:
            times = Counter(
                client
                for number in range(1, round_number + 1)
                for client in self.choose_clients(number)
            )
            most = max(times.values())
        return privacy.epsilon(self.privacy.noise, most, self.privacy.delta)

    def first_state(self) -> GlobalState:
        """The global state before the first round."""
        return GlobalState(
            weights=self.model.shared_state(), server=self.regularizer.server_state(self.model)
        )

    def _context(self, number: int) -> RoundContext:
        return RoundContext(
            round=number,
            rounds=max(number, self.max_rounds),
            epochs=self.local_epochs,
            seed=self.seed,
            global_state=self.global_state,
            batchnorm=self.batchnorm,
        )

    def memory_of(self, client: int) -> ClientMemory | None:
        """A client's memory; None if it has not trained yet."""
        return self.checkpoints.load_client(client, self.state.clients.get(client))

    def train_client(self, client: int, tick: Callable[[], None]) -> Update:
        """Trains one client for the next round; the model then holds its weights. Saves nothing.

        Args:
            client: its number.
            tick: called after every step.
        """
        local = LocalTrainer(
            self.model,
            device=self.device,
            precision=self.precision,
            regularizer=self.regularizer,
            tick=tick,
        )
        number = self.current_round + 1
        return local.run(
            self._context(number),
            client=client,
            data=self.client_data(client, number),
            memory=self.memory_of(client),
        )

    def load_checkpoint(self, folder: str | Path, round_number: int | None = None) -> None:
        """Restores the model and the trainer's state after a round of a run.

        Args:
            folder: the run folder; it is only read.
            round_number: a round whose checkpoint was kept; the newest one if not given.
        """
        self.state, global_state = read_run(Path(folder), round_number)
        self.global_state = global_state.to(self.device)
        self.folder = Path(folder)
        self.checkpoints = Checkpoints(self.folder, self.keep)
        self.model.to(self.device)
        try:
            self.model.load_shared(self.global_state.weights)
        except ValueError as error:
            raise UserError(
                f"{folder}: its weights are not those of its configuration ({error})"
            ) from error

    # --- for callbacks ----------------------------------------------------------------------------

    @property
    def alarms(self) -> list[str]:
        """The alarms of all rounds."""
        return [alarm for callback in self.callbacks for alarm in getattr(callback, "alarms", [])]

    def name_of(self, client: int) -> str:
        """A client's name in messages."""
        return str(self.workplace.name_of(client))

    def note(self, text: str) -> None:
        """Shows a note to the user; within a round, the round's record keeps it."""
        if self._record is not None and self._record.number > self.current_round:
            self._record.notes.append(text)
            text = f"round {self._record.number}: {text}"
        self._call("on_note", text)

    # --- for engines ------------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Reports optimizer steps of any client."""
        self._call("on_client_steps", count)

    def working(self, worker: str, client: int | None) -> None:
        """Reports which client a worker trains; None: it is idle."""
        self._call("on_client_start", worker, client)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)
