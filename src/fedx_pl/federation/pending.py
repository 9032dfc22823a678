"""Saves the updates of the current round, so that a resumed run need not train them again.

    RUN/pending/00003/     client 3's update, a record of `files.store`

They are not synced to disk. They survive a killed process; after a power loss one may be torn,
which its checksums show, and that client trains again.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.federation.run_state import DAMAGED, ClientRecord, real, record_of, whole
from fedx_pl.files import require_there, size_of
from fedx_pl.files.store import load_record, save_record

BYTES_PER_SECOND = 400e6  # of writing and hashing, on an ordinary disk
WORTH = 10.0  # An update is saved if training it took this many times as long as saving it.
_STATE = "state/"  # prefix of the weights' names
_LOSSES = "losses"


class UnfinishedRound:
    """Saves and loads the updates of the round that is under way."""

    def __init__(self, folder: Path) -> None:
        """Opens a run folder.

        Args:
            folder: the run folder.
        """
        self._run = folder
        self._folder = folder / "pending"

    def save(self, round_number: int, update: Update, record: ClientRecord) -> None:
        """Saves an update, if that is cheaper than training it again.

        Args:
            round_number: the round it belongs to.
            update: with its weights.
            record: of the client's private state, which is saved already.
        """
        state = update.state.tensors()
        if update.seconds < WORTH * size_of(state) / BYTES_PER_SECOND:
            return
        require_there(self._run)
        tensors = {_STATE + name: tensor for name, tensor in state.items()}
        values = {
            "round": round_number,
            "client": update.client,
            "record": asdict(record),
            "num_images": update.num_images,
            "images_seen": update.images_seen,
            "seconds": update.seconds,
            "data_seconds": update.data_seconds,
            "loss_names": update.loss_names,
            "metrics": update.metrics,
        }
        save_record(
            self._record(update.client),
            tensors | {_LOSSES: update.losses},
            values,
            sync=False,
            private=True,
        )

    def load(self, round_number: int) -> Iterator[tuple[Update, ClientRecord]]:
        """Yields the undamaged updates of a round, by client."""
        checkpoints = Checkpoints(self._run)
        for folder in sorted(self._folder.glob("[0-9]*")):
            try:
                update, record = self._read(folder, round_number)
                checkpoints.require_client(update.client, record)
            except DAMAGED:
                continue  # This client trains again.
            yield update, record

    def forget(self, client: int, *, before: float) -> bool:
        """Drops a client's update if it was saved before a time; returns whether there was one."""
        folder = self._record(client)
        if not folder.exists() or folder.stat().st_mtime > before:
            return False
        shutil.rmtree(folder)
        return True

    def clear(self) -> None:
        """Drops all updates, since the round is committed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, folder: Path, round_number: int) -> tuple[Update, ClientRecord]:
        tensors, values = load_record(folder)
        record = record_of(values["record"])
        if values["round"] != round_number or record.last_round != round_number:
            raise ValueError("it belongs to another round")
        if folder != self._record(whole(values["client"])):
            raise ValueError("it belongs to another client")
        losses = tensors.pop(_LOSSES)
        loss_names = tuple(values["loss_names"])
        named = losses.shape[1:] == (len(loss_names),) and "total" in loss_names
        named = named and all(isinstance(name, str) for name in loss_names)
        if losses.dtype not in (torch.float32, torch.float64) or not named:
            raise ValueError("its losses have no names")
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items()}
        # A metric that was not finite is null in JSON.
        metrics = {
            name: math.nan if value is None else real(value)
            for name, value in values["metrics"].items()
        }
        update = Update(
            client=values["client"],
            num_images=whole(values["num_images"]),
            state=GlobalState.from_tensors(state),
            memory=ClientMemory(
                last_round=record.last_round, steps=record.steps, epochs=record.epochs
            ),
            losses=losses,
            loss_names=loss_names,
            images_seen=whole(values["images_seen"]),
            metrics=metrics,
            seconds=real(values["seconds"]),
            data_seconds=real(values["data_seconds"]),
        )
        return update, record

    def _record(self, client: int) -> Path:
        return self._folder / f"{client:05d}"
