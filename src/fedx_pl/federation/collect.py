"""Steps 2 and 3 of a round: every client's update is folded into the average as it comes back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import Aggregator, BadUpdate, counted
from fedx_pl.federation.round import GlobalState, Lost, RoundRecord, Update
from fedx_pl.files import size_of

if TYPE_CHECKING:
    from fedx_pl.federation.checkpoint import ClientRecord
    from fedx_pl.trainer import FederatedTrainer


def collect(
    trainer: FederatedTrainer, record: RoundRecord, rule: Aggregator
) -> dict[int, ClientRecord]:
    """Aggregates updates: those that an earlier process had saved, then the others as they come.

    Args:
        trainer: its engine trains the clients.
        record: the record of the round, which every update is added to.
        rule: aggregates the updates.

    Returns:
        The saved memory of each client.
    """
    saved: dict[int, ClientRecord] = {}
    record.bytes_down = size_of(trainer.global_state.tensors()) * len(record.clients)
    for update, where in trainer.unfinished.load(record.number):
        if trainer.datamodule.clients and update.client not in record.clients:
            continue  # No client of this run. Only the engine knows which real sites there are.
        update = replace(update, state=update.state.to(trainer.device))
        came = record.bytes_up
        try:
            _aggregate(record, rule, update)
        except BadUpdate as reason:  # It was good when it was saved.
            record.bytes_up = came
            trainer.note(
                f"the saved update of {trainer.name_of(update.client)} is left out: {reason}"
            )
            continue
        record.resumed.append(update.client)
        _keep(trainer, record, update)
        saved[update.client] = where
    waiting = [client for client in record.clients if client not in record.resumed]
    for outcome in (
        trainer.workplace.run(record.context, waiting, trainer.memory_of) if waiting else ()
    ):
        try:
            if isinstance(outcome, Lost):
                raise BadUpdate(outcome.reason)
            _aggregate(record, rule, outcome)
        except BadUpdate as reason:
            _refuse(trainer, record, outcome, reason=str(reason))
        else:
            where = trainer.checkpoints.save_client(outcome)
            trainer.unfinished.save(record.number, outcome, where)
            _keep(trainer, record, outcome)
            saved[outcome.client] = where
    record.updates.sort(key=lambda update: update.client)  # In whatever order they came.
    return saved


def require_enough(trainer: FederatedTrainer, record: RoundRecord) -> None:
    """Raises a `UserError` if a round has too few good updates."""
    number, good, told = record.number, len(record.updates), trainer.description
    if good < trainer.min_clients:
        again = "type the same command" if told.typed else "call fit again"
        asking = (
            "aggregate.quarantine=0" if told.typed else "aggregate=AggregateOptions(quarantine=0)"
        )
        raise UserError(
            f"round {number} has {good} good updates, {told.key('min_clients')}={trainer.min_clients}; "
            f"round {number - 1} is saved in {trainer.folder}. When the clients named above are mended, {again} to go "
            f"on with round {number}; add {asking} to ask those in quarantine, too"
        )


def next_state(
    trainer: FederatedTrainer, record: RoundRecord, rule: Aggregator, saved: dict[int, ClientRecord]
) -> GlobalState:
    """The averaged weights, and what the regularizer's server makes of the averaged rest."""
    met = (trainer.state.clients | saved).items()  # Of real sites, only those are known.
    started = time.perf_counter()
    owned = dict(enumerate(map(len, trainer.datamodule.clients)))
    owned = owned or {client: known.images for client, known in met if known.images}
    images = counted(owned, trainer.aggregate.max_share)
    took_part = sum(images[update.client] for update in record.updates) / sum(images.values())
    combined = GlobalState.from_tensors(rule.result())
    server = trainer.regularizer.fold(trainer.global_state.server, combined.server, took_part)
    record.aggregate_seconds += time.perf_counter() - started
    for client, remark in rule.remarks.items():
        trainer.note(f"{trainer.name_of(client)}: {remark}")
    return GlobalState(weights=combined.weights, server=server)


def _aggregate(record: RoundRecord, rule: Aggregator, update: Update) -> None:
    """Folds an update into the average, or raises `BadUpdate`."""
    started = time.perf_counter()
    tensors = update.state.tensors()
    record.bytes_up += size_of(tensors)  # Also if it is refused: it came.
    rule.add(tensors, update.num_images, update.client)
    record.aggregate_seconds += time.perf_counter() - started


def _keep(trainer: FederatedTrainer, record: RoundRecord, update: Update) -> None:
    """Keeps an aggregated update without its tensors, whose size would add up."""
    for callback in trainer.callbacks:
        callback.on_client_update(trainer, record, update)
    light = replace(update, state=GlobalState(weights={}), memory=update.memory.without_tensors())
    record.updates.append(light)


def _refuse(
    trainer: FederatedTrainer, record: RoundRecord, outcome: Update | Lost, reason: str
) -> None:
    client = outcome.client
    record.refused[client] = reason
    if not isinstance(outcome, Lost) or outcome.fault:
        record.at_fault.add(client)
    trainer.note(f"dropped {trainer.name_of(client)}: {reason}")
    for callback in trainer.callbacks:
        callback.on_client_refused(trainer, record, client, reason=reason)
