"""The rounds: four numbered steps (`Orchestrator._run_round`) and a list of callbacks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedx_pl import engines
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.dashboard import Dashboard
from fedx_pl.callbacks.drift import Drift
from fedx_pl.callbacks.evaluation import Evaluation
from fedx_pl.callbacks.export import SaveEncoder
from fedx_pl.callbacks.health import Health
from fedx_pl.callbacks.metrics import MetricsFiles
from fedx_pl.callbacks.privacy import PrivacyBudget
from fedx_pl.callbacks.quarantine import Quarantine
from fedx_pl.engines import Engine, Lost, Watcher
from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import Aggregator, BadUpdate
from fedx_pl.federation.checkpoint import Checkpoints, ClientRecord, RunState, UnfinishedRound
from fedx_pl.federation.client import mean
from fedx_pl.federation.robust import make_rule
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, RoundRecord, Update
from fedx_pl.federation.run_folder import open_run
from fedx_pl.files import size_of
from fedx_pl.methods.base import SSLMethod

if TYPE_CHECKING:
    from fedx_pl.config.build import Plan


@dataclass(frozen=True)
class Result:
    """What a finished run has to say."""

    folder: Path
    rows: list[dict[str, Any]]
    untrained: dict[str, float]
    seconds: float
    alarms: list[str] = field(default_factory=list)


class Orchestrator(Watcher):
    """Runs the rounds of a plan in its run folder, resuming after the last finished round."""

    def __init__(
        self,
        plan: Plan,
        callbacks: RoundCallback | Sequence[RoundCallback] = (),
        make_engine: Callable[[Plan, Watcher], Engine] = engines.make,
    ) -> None:
        """Opens or creates the run folder.

        Args:
            plan: what to run.
            callbacks: the user's own, beside the built-in ones.
            make_engine: where clients train; what the configuration names if not given.
        """
        self.plan, self.make_engine = plan, make_engine
        given = [callbacks] if isinstance(callbacks, RoundCallback) else callbacks
        self.callbacks = built_in(plan, [*plan.own_callbacks(), *given])
        self.model: SSLMethod = plan.model
        self.device: torch.device = plan.device
        self.max_rounds = plan.config.federation.rounds
        self.folder = plan.config.run_folder
        self.should_stop = False
        self.excluded: list[int] = []  # clients that are not asked
        self.untrained_seconds = 0.0  # of measuring the untrained network
        self._checkpoints = Checkpoints(self.folder, plan.config.run.keep)
        self._unfinished = UnfinishedRound(self.folder)
        self._record: RoundRecord | None = None
        self.state = RunState()
        self._lock, (self.state, global_state) = open_run(plan.run_settings(), self._checkpoints, self.note)
        self.global_state = global_state.to(self.device)
        for callback in self.callbacks:
            callback.load_state_dict(self.state.callbacks.get(callback.state_key, {}))
            callback.setup(self)

    def run(self) -> Result:
        """Trains to the last round; everything of a finished round is on disk before the next begins."""
        try:
            with self._lock, closing(self.make_engine(self.plan, self)) as self.engine:
                self.model.load_shared(self.global_state.weights)
                self._call("on_fit_start")
                while self.current_round < self.max_rounds and not self.should_stop:
                    self._run_round()
                self._checkpoints.clear()  # Again, in case the last round was committed and then cut off.
                self._unfinished.clear()
                self._call("on_fit_end")
        except BaseException as exception:
            self._call("on_exception", exception)
            raise
        alarms = self.state.callbacks.get("Health", {}).get("alarms", [])
        return Result(self.folder, self.history, self.untrained, self.seconds, alarms)

    def _run_round(self) -> None:
        plan, number = self.plan, self.current_round + 1
        # (1) Choose the clients and freeze what they all start from.
        clients = self.engine.choose(number, away=self.excluded)
        started = time.perf_counter()  # Now: real sites may have been waited for.
        context = RoundContext(
            round=number,
            rounds=self.max_rounds,
            epochs=plan.config.federation.epochs,
            seed=plan.config.seed,
            global_state=self.global_state,
            batchnorm=plan.config.federation.batchnorm,
        )
        record = self._record = RoundRecord(context=context, clients=clients)
        self._call("on_round_start", record)
        # (2) Each trains by itself, and (3) is folded into the average as it comes back.
        average = make_rule(plan.config.aggregate, self.global_state)
        saved = dict(self._collect(record, average))
        self._require_enough(number, len(record.updates))
        self.global_state = self._next_state(record, average, saved)
        self.model.load_shared(self.global_state.weights)
        record.train_seconds = time.perf_counter() - started
        # (4) Measure, log, save. What is logged and then not saved is cut off when the run is resumed.
        record.row = summary(record)
        self._call("on_round_end", record)
        self._commit(record, saved)
        self._call("on_round_saved", record)

    def _collect(self, record: RoundRecord, average: Aggregator) -> Iterator[tuple[int, ClientRecord]]:
        """Aggregates updates: those that an earlier process had saved, then the others as they come."""
        record.bytes_down = size_of(self.global_state.tensors()) * len(record.clients)
        for update, saved in self._unfinished.load(record.number):
            record.resumed.append(update.client)
            update = replace(update, state=update.state.to(self.device))
            self._aggregate(record, average, update)
            self._keep(record, update)
            yield update.client, saved
        waiting = [client for client in record.clients if client not in record.resumed]
        for outcome in self.engine.run(record.context, waiting, self._memory_of) if waiting else ():
            try:
                if isinstance(outcome, Lost):
                    raise BadUpdate(outcome.reason)
                self._aggregate(record, average, outcome)
            except BadUpdate as reason:
                self._refuse(record, outcome, str(reason))
            else:
                saved = self._checkpoints.save_client(outcome)
                self._unfinished.save(record.number, outcome, saved)
                self._keep(record, outcome)
                yield outcome.client, saved
        record.updates.sort(key=lambda update: update.client)  # In whatever order they came.

    def _aggregate(self, record: RoundRecord, average: Aggregator, update: Update) -> None:
        """Folds an update into the average, or raises `BadUpdate`."""
        started = time.perf_counter()
        tensors = update.state.tensors()
        record.bytes_up += size_of(tensors)  # Also if it is refused: it came.
        average.add(tensors, update.num_images, update.client)
        record.aggregate_seconds += time.perf_counter() - started

    def _keep(self, record: RoundRecord, update: Update) -> None:
        """Keeps an aggregated update without its tensors, whose size would add up."""
        self._call("on_client_update", record, update)
        light = replace(update, state=GlobalState(weights={}), memory=update.memory.without_tensors())
        record.updates.append(light)

    def _refuse(self, record: RoundRecord, outcome: Update | Lost, reason: str) -> None:
        client = outcome.client
        record.refused[client] = reason
        if not isinstance(outcome, Lost) or outcome.fault:
            record.at_fault.add(client)
        self.note(f"dropped {self.name_of(client)}: {reason}")
        self._call("on_client_refused", record, client, reason)

    def _next_state(self, record: RoundRecord, average: Aggregator, saved: dict[int, ClientRecord]) -> GlobalState:
        """The averaged weights, and what the regularizer's server makes of the averaged rest."""
        met = (self.state.clients | saved).values()  # Of real sites, only those are known.
        started = time.perf_counter()
        share = average.num_images / (sum(map(len, self.plan.clients)) or sum(client.images for client in met))
        combined = GlobalState.from_tensors(average.result())
        server = self.plan.regularizer.fold(self.global_state.server, combined.server, share)
        record.aggregate_seconds += time.perf_counter() - started
        for client, remark in average.remarks.items():
            self.note(f"{self.name_of(client)}: {remark}")
        return GlobalState(weights=combined.weights, server=server)

    def _commit(self, record: RoundRecord, saved: dict[int, ClientRecord]) -> None:
        self.state = RunState(
            round=record.number,
            rows=[*self.state.rows, record.row],
            untrained=self.state.untrained,
            clients={**self.state.clients, **saved},
            seconds=self.state.seconds + record.row["round_seconds"],
            callbacks={callback.state_key: callback.state_dict() for callback in self.callbacks},
            config=self.plan.config.hash,
        )
        self._checkpoints.commit(self.state, self.global_state)
        self._unfinished.clear()

    def _memory_of(self, client: int) -> ClientMemory | None:
        return self._checkpoints.load_client(client, self.state.clients.get(client))

    def _require_enough(self, number: int, good: int) -> None:
        needed = self.plan.config.federation.min_clients
        if good < needed:
            raise UserError(
                f"round {number} has {good} good updates, federation.min_clients={needed}; "
                f"round {number - 1} is saved in {self.folder}. When the clients named above are mended, type the same "
                f"command to go on with round {number}; add aggregate.quarantine=0 to ask those in quarantine, too"
            )

    # --- what callbacks may ask and do --------------------------------------------------------------------------------

    @property
    def current_round(self) -> int:
        """The last round that is saved; 0 before the first."""
        return self.state.round

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of all saved rounds."""
        return self.state.rows

    @property
    def untrained(self) -> dict[str, float]:
        """What the untrained network can do."""
        return self.state.untrained

    @untrained.setter
    def untrained(self, measures: dict[str, float]) -> None:
        self.state.untrained = measures

    @property
    def seconds(self) -> float:
        """How long all saved rounds took."""
        return self.state.seconds

    def name_of(self, client: int) -> str:
        """A client's name for people."""
        return self.engine.name_of(client)

    def note(self, text: str) -> None:
        """Tells the user something; within a round, it is kept with the round."""
        if self._record is not None and self._record.number > self.current_round:
            self._record.notes.append(text)
            text = f"round {self._record.number}: {text}"
        self._call("on_note", text)

    # --- what engines tell --------------------------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Some client has taken optimizer steps."""
        self._call("on_client_steps", count)

    def working(self, worker: str, client: int | None) -> None:
        """A worker takes up a client; None: it is idle."""
        self._call("on_client_start", worker, client)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)


def built_in(plan: Plan, own: Sequence[RoundCallback]) -> list[RoundCallback]:
    """All callbacks of a run. Their order counts: first who measures, then the user's own, then who shows it all."""
    config, evaluator = plan.config, plan.evaluator
    return [
        MetricsFiles(),
        Drift(config.run.client_curves),
        Evaluation(evaluator),
        *([PrivacyBudget(plan.epsilon_after)] if config.privacy.noise else []),
        Health(config.health),
        Quarantine(config.aggregate.quarantine),
        *own,
        Dashboard(
            evaluator=evaluator,
            hparams=config.hparams(),
            text=f"```yaml\n{config.to_yaml()}```",
            client_curves=config.run.client_curves,
        ),
        SaveEncoder(),
    ]


def summary(record: RoundRecord) -> dict[str, Any]:
    """The numbers of a round that need no evaluation: losses, what clients measured, times and traffic."""
    updates = record.updates
    row: dict[str, Any] = {"round": record.number}
    # By name: a site's word is its own, and one that tells other losses must not stop the run.
    for name in dict.fromkeys(name for update in updates for name in update.loss_names):
        telling = [update for update in updates if name in update.loss_names]
        means = [update.loss(name).mean().item() for update in telling]
        row["loss" if name == "total" else f"loss_{name}"] = statistics.fmean(
            means, [update.num_images for update in telling]
        )
    for name in dict.fromkeys(name for update in updates for name in update.metrics):
        row[name] = mean([update.metrics[name] for update in updates if name in update.metrics])
    data_seconds = sum(update.data_seconds for update in updates)
    return row | {
        "clients": len(updates),
        "dropped": len(record.refused),
        "images_per_second": images_per_second(record),
        "train_seconds": record.train_seconds,
        "round_seconds": record.train_seconds,
        "data_seconds": data_seconds,
        "step_seconds": sum(update.seconds for update in updates) - data_seconds,
        "aggregate_seconds": record.aggregate_seconds,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
    }


def images_per_second(record: RoundRecord) -> float:
    """The rate of this process: images of clients that an earlier one had trained took none of its time."""
    here = [update for update in record.updates if update.client not in record.resumed]
    if here:
        return sum(update.images_seen for update in here) / record.train_seconds
    # All were there when the run was resumed: their own rate, one after the other.
    seconds = sum(update.seconds for update in record.updates)
    return sum(update.images_seen for update in record.updates) / seconds if seconds else 0.0
