"""Steps 2 and 3 of a round: every client's update is aggregated as it arrives."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fedx_pl.errors import UserError
from fedx_pl.federation.aggregate import Aggregator, BadUpdate, counted
from fedx_pl.federation.round import GlobalState, Lost, RoundRecord, Update
from fedx_pl.files import size_of

if TYPE_CHECKING:
    from fedx_pl.federation.run_state import ClientRecord
    from fedx_pl.trainer import FederatedTrainer


def collect(
    trainer: FederatedTrainer, record: RoundRecord, rule: Aggregator
) -> dict[int, ClientRecord]:
    """Aggregates updates: first those that an earlier process saved, then others as they arrive.

    Args:
        trainer: its engine trains the clients.
        record: the round's record; every update is added to it.
        rule: aggregates the updates.

    Returns:
        The records of the clients' saved memories, by client.
    """
    saved: dict[int, ClientRecord] = {}
    record.bytes_down = size_of(trainer.global_state.tensors()) * len(record.clients)
    for update, client_record in trainer.unfinished.load(record.number):
        if trainer.datamodule.clients and update.client not in record.clients:
            continue  # It is of no client here. Only the engine knows real sites.
        update = replace(update, state=update.state.to(trainer.device))
        bytes_before = record.bytes_up
        try:
            _aggregate(record, rule, update)
        except BadUpdate as reason:  # It was good when it was saved.
            record.bytes_up = bytes_before
            trainer.note(
                f"the saved update of {trainer.name_of(update.client)} is left out: {reason}"
            )
            continue
        record.resumed.append(update.client)
        _keep(trainer, record, update)
        saved[update.client] = client_record
    waiting = [client for client in record.clients if client not in record.resumed]
    outcomes = trainer.workplace.run(record.context, waiting, trainer.memory_of) if waiting else ()
    for outcome in outcomes:
        try:
            if isinstance(outcome, Lost):
                raise BadUpdate(outcome.reason)
            _aggregate(record, rule, outcome)
        except BadUpdate as reason:
            _refuse(trainer, record, outcome, reason=str(reason))
        else:
            client_record = trainer.checkpoints.save_client(outcome)
            trainer.unfinished.save(record.number, outcome, client_record)
            _keep(trainer, record, outcome)
            saved[outcome.client] = client_record
    record.updates.sort(key=lambda update: update.client)  # The order of arrival must not matter.
    return saved


def require_enough(trainer: FederatedTrainer, record: RoundRecord) -> None:
    """Raises a `UserError` if a round has too few good updates."""
    number = record.number
    good = len(record.updates)
    identity = trainer.description
    if good < trainer.min_clients:
        again = "type the same command" if identity.typed else "call fit again"
        none = (
            "aggregate.quarantine=0"
            if identity.typed
            else "aggregate=AggregateOptions(quarantine=0)"
        )
        minimum = f"{identity.key('min_clients')}={trainer.min_clients}"
        raise UserError(
            f"round {number} has {good} good updates, {minimum}; round {number - 1} is saved in "
            f"{trainer.folder}. When the clients named above are repaired, {again} to resume with "
            f"round {number}; add {none} to ask clients in quarantine, too"
        )


def next_state(
    trainer: FederatedTrainer, record: RoundRecord, rule: Aggregator, saved: dict[int, ClientRecord]
) -> GlobalState:
    """The next global state: the aggregated weights, and the regularizer's next server tensors."""
    started = time.perf_counter()
    owned = dict(enumerate(map(len, trainer.datamodule.clients)))
    if not owned:  # Only real sites that have trained are known.
        seen = (trainer.state.clients | saved).items()
        owned = {client: memory.images for client, memory in seen if memory.images}
    images = counted(owned, trainer.aggregate.max_share)
    share = sum(images[update.client] for update in record.updates) / sum(images.values())
    combined = GlobalState.from_tensors(rule.result())
    server = trainer.regularizer.fold(trainer.global_state.server, combined.server, share)
    record.aggregate_seconds += time.perf_counter() - started
    for client, remark in rule.remarks.items():
        trainer.note(f"{trainer.name_of(client)}: {remark}")
    return GlobalState(weights=combined.weights, server=server)


def _aggregate(record: RoundRecord, rule: Aggregator, update: Update) -> None:
    """Adds an update to the rule, or raises `BadUpdate`."""
    started = time.perf_counter()
    tensors = update.state.tensors()
    record.bytes_up += size_of(tensors)  # Refused updates count as traffic, too.
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
