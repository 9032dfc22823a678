"""The rounds. Read `Orchestrator.run` first: four numbered steps."""

import csv
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fedx_pl import engines
from fedx_pl.callbacks.dashboard import Cockpit
from fedx_pl.callbacks.health import COLLAPSED, look
from fedx_pl.config.build import Plan
from fedx_pl.engines import Engine, Lost, Watcher
from fedx_pl.errors import UserError
from fedx_pl.federation import aggregate
from fedx_pl.federation.aggregate import STATISTICS, Aggregator, BadUpdate
from fedx_pl.federation.checkpoint import Checkpoints, ClientRecord, RunState, UnfinishedRound
from fedx_pl.federation.client import mean
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.federation.run_folder import open_run
from fedx_pl.files import size_of, tensor_bytes, write_atomically
from fedx_pl.methods.base import State

FIRST_COLUMNS = ("round", "knn_top1", "linear_top1", "linear_top5", "loss")


class Display(Watcher, Protocol):
    """What the orchestrator and its engine tell while a run goes on."""

    def start(self, round_number: int, done: int, of: int, steps: int) -> None:
        """The clients of a round begin to train; an earlier process had finished ``done`` of them, in so many steps."""

    def client(self, round: int, done: int, of: int, update: Update | None) -> None:
        """A client of the round is done; None if its update was refused."""

    def row(self, row: dict[str, Any]) -> None:
        """A round is done and saved."""


class Silent(Display):
    """Shows nothing."""

    def start(self, round_number: int, done: int, of: int, steps: int) -> None:
        """Nothing to show."""

    def step(self, count: int = 1) -> None:
        """Nothing to show."""

    def working(self, worker: str, client: int | None) -> None:
        """Nothing to show."""

    def client(self, round: int, done: int, of: int, update: Update | None) -> None:
        """Nothing to show."""

    def row(self, row: dict[str, Any]) -> None:
        """Nothing to show."""

    def note(self, text: str) -> None:
        """Nothing to show."""


@dataclass(frozen=True)
class Result:
    """What a finished run has to say."""

    folder: Path
    rows: list[dict[str, Any]]
    untrained: dict[str, float]
    seconds: float
    alarms: list[str] = field(default_factory=list)


@dataclass
class Collected:
    """What a round's clients gave."""

    average: Aggregator
    updates: list[Update] = field(default_factory=list)  # without weights
    records: dict[int, ClientRecord] = field(default_factory=dict)
    loaded: list[int] = field(default_factory=list)  # of them, the clients that an earlier process had trained
    dropped: int = 0
    bad: list[int] = field(default_factory=list)  # whose updates were refused
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0  # of taking updates in and combining them

    def add(self, update: Update) -> None:
        """Folds an update into the average, or raises `BadUpdate`."""
        started = time.perf_counter()
        tensors = update.state.tensors()
        self.bytes_up += size_of(tensors)  # Also if it is refused: it came.
        self.average.add(tensors, update.num_images, update.client)
        self.seconds += time.perf_counter() - started

    def keep(self, update: Update, record: ClientRecord) -> None:
        """Of an update that is folded in: what is kept must not grow with the size of the weights."""
        self.updates.append(replace(update, state=GlobalState(weights={}), memory=update.memory.without_tensors()))
        self.records[update.client] = record


class Orchestrator:
    """Runs the rounds of a plan in its run folder, going on from the last finished round."""

    def __init__(
        self, plan: Plan, display: Display, make_engine: Callable[[Plan, Watcher], Engine] = engines.make
    ) -> None:
        """Opens or creates the run folder.

        Args:
            plan: what to run.
            display: told about progress.
            make_engine: where clients train; what the configuration names if not given.
        """
        self.plan, self.display, self.make_engine = plan, display, make_engine
        self.folder = plan.config.run_folder
        self.checkpoints = Checkpoints(self.folder, plan.config.run.keep)
        self.unfinished = UnfinishedRound(self.folder)
        self._lock, (self.state, global_state) = open_run(plan, self.checkpoints, display.note)
        self.global_state = global_state.to(plan.device)
        self._away: list[int] = []
        self._events: list[str] = []  # of the round, in words

    def run(self) -> Result:
        """Trains to the last round; everything of a finished round is on disk before the next begins."""
        config, plan = self.plan.config, self.plan
        with (
            self._lock,
            closing(self.make_engine(plan, self.display)) as engine,
            Cockpit(plan, self.folder / "tensorboard", self.state.events) as cockpit,
        ):
            self._introduce(cockpit)
            self._stop_if_collapsed()
            for round in range(self.state.round + 1, config.federation.rounds + 1):
                self._events = []
                # (1) Choose the clients and freeze what they all start from.
                chosen = engine.choose(round, away=self._quarantined(engine, round))
                started = time.perf_counter()  # Now: real sites may have been waited for.
                context = RoundContext(
                    round=round,
                    rounds=config.federation.rounds,
                    epochs=config.federation.epochs,
                    seed=config.seed,
                    global_state=self.global_state,
                    batchnorm=config.federation.batchnorm,
                )
                # (2) Each trains by itself, and (3) is folded into the average as it comes back.
                found = self._collect(engine, context, chosen)
                self._require_enough(round, len(found.updates))
                self.global_state = self._next_state(found)
                for client, remark in found.average.remarks.items():
                    self._note(round, f"{engine.name_of(client)}: {remark}")
                # (4) Measure, log, save. What is logged and then not saved is cut off when the run goes on.
                trained = time.perf_counter() - started
                row = self._row(round, found, trained)
                row["round_seconds"] = time.perf_counter() - started
                alarms = look(config.health, row, found.updates, engine.name_of)
                cockpit.round([*self.state.rows, row], found.updates, [*self._events, *alarms])
                self._commit(row, found, cockpit.writer.lengths(), alarms)
                self.display.row(row)
                for alarm in alarms:
                    self._note(round, alarm)
                self._stop_if_collapsed()
            self._finish(cockpit)
        return Result(self.folder, self.state.rows, self.state.untrained, self.state.seconds, self.state.alarms)

    def _collect(self, engine: Engine, context: RoundContext, chosen: Sequence[int]) -> Collected:
        """The round's updates: those of clients that had finished when the run was cut off, then the others'."""
        round, found = context.round, Collected(aggregate.make(self.plan.config.aggregate, self.global_state))
        found.bytes_down = size_of(self.global_state.tensors()) * len(chosen)
        for update, record in self.unfinished.load(round):
            update = self._with_drift(replace(update, state=update.state.to(self.plan.device)))
            found.add(update)
            found.keep(update, record)
            found.loaded.append(update.client)
        steps_before = sum(len(update.losses) for update in found.updates)
        self.display.start(round, len(found.loaded), len(chosen), steps_before)
        waiting = [client for client in chosen if client not in found.records]
        for outcome in engine.run(context, waiting, self._memory_of) if waiting else ():
            try:
                if isinstance(outcome, Lost):
                    raise BadUpdate(outcome.reason)
                found.add(outcome)
            except BadUpdate as reason:
                self._note(round, f"dropped {engine.name_of(outcome.client)}: {reason}")
                found.dropped += 1
                found.bad += [outcome.client] if not isinstance(outcome, Lost) or outcome.fault else []
            else:
                update = self._with_drift(outcome)
                record = self.checkpoints.save_client(update)
                self.unfinished.save(round, update, record)
                found.keep(update, record)
            last = found.updates[-1] if outcome.client in found.records else None
            self.display.client(round, len(found.updates) + found.dropped, len(chosen), last)
        found.updates.sort(key=lambda update: update.client)  # In whatever order they came.
        return found

    def _with_drift(self, update: Update) -> Update:
        """Tells how far the first clients went; for all, it would cost as much again as averaging them."""
        if update.client >= self.plan.config.run.client_curves:
            return update
        drift = drift_of(update.state.weights, self.global_state.weights)
        return replace(update, metrics={**update.metrics, "drift": drift})

    def _memory_of(self, client: int) -> ClientMemory | None:
        return self.checkpoints.load_client(client, self.state.clients.get(client))

    def _quarantined(self, engine: Engine, round: int) -> list[int]:
        """Who has sent so many bad updates in a row that it is not asked any more; says so when it becomes more."""
        limit = self.plan.config.aggregate.quarantine
        away = sorted(client for client, count in self.state.strikes.items() if 0 < limit <= count)
        if away != self._away:
            names = ", ".join(map(engine.name_of, away))
            self._note(round, f"not asked any more after aggregate.quarantine={limit} bad updates in a row: {names}")
        self._away = away
        return away

    def _note(self, round: int, text: str) -> None:
        self._events.append(text)
        self.display.note(f"round {round}: {text}")

    # --- the run folder -----------------------------------------------------------------------------------------------

    def _commit(self, row: dict[str, Any], found: Collected, events: dict[str, int], alarms: list[str]) -> None:
        # In a row: a good update clears them; who was lost or not asked keeps them.
        strikes = {client: count for client, count in self.state.strikes.items() if client not in found.records}
        strikes |= {client: strikes.get(client, 0) + 1 for client in found.bad}
        self.state = RunState(
            round=row["round"],
            rows=[*self.state.rows, row],
            untrained=self.state.untrained,
            clients={**self.state.clients, **found.records},
            seconds=self.state.seconds + row["round_seconds"],
            strikes=strikes,
            events=events,
            alarms=[*self.state.alarms, *(f"round {row['round']}: {alarm}" for alarm in alarms)],
            config=self.plan.config.hash,
        )
        self.checkpoints.commit(self.state, self.global_state)
        self.unfinished.clear()
        self._write_metrics()

    def _write_metrics(self) -> None:
        rows = self.state.rows
        columns = list(dict.fromkeys([*FIRST_COLUMNS, *(key for row in rows for key in row)]))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, restval="")
        table.writeheader()
        table.writerows(rows)
        write_atomically(self.folder / "metrics.csv", text.getvalue().encode())
        whole = {"untrained": self.state.untrained, "rounds": rows, "seconds": self.state.seconds}
        write_atomically(self.folder / "metrics.json", json.dumps(whole, indent=1).encode())

    def _finish(self, cockpit: Cockpit) -> None:
        """Leaves the encoder as a plain state dict of the backbone, and the curves as a picture."""
        backbone = self.plan.load(self.global_state).backbone
        write_atomically(self.folder / "encoder.safetensors", tensor_bytes(backbone.state_dict()))
        # Again, in case the last round was committed and then cut off.
        self.checkpoints.clear()
        self.unfinished.clear()
        self._write_metrics()
        if self.plan.evaluator.possible:
            from fedx_pl.callbacks import plots  # Here: matplotlib would slow every start down.

            plots.curves(self.state.rows, self.state.untrained).savefig(self.folder / "accuracy.png")
        cockpit.finish()

    def _stop_if_collapsed(self) -> None:
        """After a round that is saved, and before a run goes on from it; the last round ends the run in any case."""
        round, config = self.state.round, self.plan.config
        collapsed = any(alarm.startswith(f"round {round}: {COLLAPSED}") for alarm in self.state.alarms)
        if config.health.on_collapse == "stop" and collapsed and round < config.federation.rounds:
            raise UserError(
                f"stopped after round {round}: the encoder has collapsed (on_collapse=stop); the run is saved in "
                f"{self.folder}, and on_collapse=warn goes on"
            )

    # --- measuring and logging ----------------------------------------------------------------------------------------

    def _introduce(self, cockpit: Cockpit) -> None:
        """Before the first round: what the untrained network can do, and what is to come."""
        if self.state.round:
            return
        plan = self.plan
        plan.load(self.global_state)  # A fork's are not those of the plan.
        started = time.perf_counter()
        self.state.untrained = plan.evaluator.measure(plan.model, plan.device, 0, plan.config.federation.rounds)
        evaluated = time.perf_counter() - started
        cockpit.introduce(self.state.untrained)
        self.display.row({"round": 0, **self.state.untrained, "evaluate_seconds": evaluated})

    def _row(self, round: int, found: Collected, trained: float) -> dict[str, Any]:
        plan, updates = self.plan, found.updates
        plan.load(self.global_state)
        row: dict[str, Any] = {"round": round}
        started = time.perf_counter()
        row |= plan.evaluator.measure(plan.model, plan.device, round, plan.config.federation.rounds)
        evaluated = time.perf_counter() - started
        # By name: a site's word is its own, and one that tells other losses must not stop the run.
        for name in dict.fromkeys(name for update in updates for name in update.loss_names):
            telling = [update for update in updates if name in update.loss_names]
            weights = [update.num_images for update in telling]
            means = [update.loss(name).mean().item() for update in telling]
            row["loss" if name == "total" else f"loss_{name}"] = statistics.fmean(means, weights)
        for name in dict.fromkeys(name for update in updates for name in update.metrics):
            row[name] = mean([update.metrics[name] for update in updates if name in update.metrics])
        row |= {"clients": len(updates), "dropped": found.dropped}
        row |= {"images_per_second": images_per_second(found, trained), "train_seconds": trained}
        made = sum(update.data_seconds for update in updates)
        row |= {"data_seconds": made, "step_seconds": sum(update.seconds for update in updates) - made}
        row |= {"aggregate_seconds": found.seconds, "evaluate_seconds": evaluated}
        row |= {"bytes_up": found.bytes_up, "bytes_down": found.bytes_down}
        row |= {"epsilon": plan.epsilon_after(round)} if plan.config.privacy.noise else {}
        return row

    def _next_state(self, found: Collected) -> GlobalState:
        """The averaged weights, and what the regulariser's server makes of the averaged rest."""
        met = (self.state.clients | found.records).values()  # Of real sites, only those are known.
        started = time.perf_counter()
        share = found.average.num_images / (sum(map(len, self.plan.clients)) or sum(record.images for record in met))
        mean = GlobalState.from_tensors(found.average.result())
        server = self.plan.regularizer.fold(self.global_state.server, mean.server, share)
        found.seconds += time.perf_counter() - started
        return GlobalState(weights=mean.weights, server=server)

    def _require_enough(self, round: int, good: int) -> None:
        needed = self.plan.config.federation.min_clients
        if good < needed:
            raise UserError(
                f"round {round} has {good} good updates, federation.min_clients={needed}; "
                f"round {round - 1} is saved in {self.folder}. When the clients named above are mended, type the same "
                f"command to go on with round {round}; add aggregate.quarantine=0 to ask those in quarantine, too"
            )


def images_per_second(found: Collected, trained: float) -> float:
    """The rate of this process: images of clients that an earlier one had trained took none of its time.

    Args:
        found: the round's updates.
        trained: seconds that this process has trained.
    """
    here = [update for update in found.updates if update.client not in found.loaded]
    if here:
        return sum(update.images_seen for update in here) / trained
    # All were there when the run was resumed: their own rate, one after the other.
    seconds = sum(update.seconds for update in found.updates)
    return sum(update.images_seen for update in found.updates) / seconds if seconds else 0.0


def drift_of(state: State, reference: State) -> float:
    """How far weights are from the reference, in lengths of the reference; BatchNorm's statistics do not count."""
    names = [name for name in reference if reference[name].is_floating_point() and not name.endswith(STATISTICS)]
    before = [reference[name] for name in names]
    steps = torch._foreach_sub([state[name] for name in names], before)
    went, length = (torch.stack(torch._foreach_norm(list(t), 2, torch.float64)).norm() for t in (steps, before))
    # Sums depend on the order in memory, which a run that goes on does not share: not in the first six digits.
    return float(f"{(went / length).item():.6g}")
