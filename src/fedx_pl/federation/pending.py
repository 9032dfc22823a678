"""Updates of the round that is under way: a run that is killed goes on after the last client that had finished.

    RUN/pending/00003.safetensors      client 3's weights and losses
    RUN/pending/journal.jsonl          a line for each: its round, checksum, counters and what it told

The files are not synced to the disk one by one. They outlive the process, whatever ends it; after a power loss one may
be torn, which its checksum shows, and that client trains again.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load

from fedx_pl.federation.checkpoint import DAMAGED, ClientRecord
from fedx_pl.federation.client import ClientMemory, Update
from fedx_pl.files import checksum, size_of, tensor_bytes, write_atomically

_STATE, _LOSSES = "state/", "losses"
BYTES_PER_SECOND = 400e6  # of writing and hashing, on an ordinary disk
WORTH = 10.0  # An update is saved if training it took this many times as long as saving it.


class Pending:
    """Saves and finds the finished clients of one round."""

    def __init__(self, folder: Path) -> None:
        """Opens a run folder.

        Args:
            folder: of the run.
        """
        self._folder = folder / "pending"
        self._journal = self._folder / "journal.jsonl"

    def save(self, round: int, update: Update, record: ClientRecord) -> None:
        """Keeps an update, if it is cheaper to save than to train again.

        Args:
            round: that it belongs to.
            update: with its weights.
            record: of the client's private state, which is saved already.
        """
        if update.seconds < WORTH * size_of(update.state) / BYTES_PER_SECOND:
            return
        tensors = {_STATE + name: tensor for name, tensor in update.state.items()} | {_LOSSES: update.losses}
        content = tensor_bytes(tensors)
        write_atomically(self._file(update.client), content, sync=False)
        told = {
            "num_images": update.num_images,
            "images_seen": update.images_seen,
            "seconds": update.seconds,
            "data_seconds": update.data_seconds,
            "loss_names": update.loss_names,
            "metrics": update.metrics,
        }
        line = {
            "round": round,
            "client": update.client,
            "sha256": checksum(content),
            "record": asdict(record),
            "told": told,
        }
        with open(self._journal, "a") as journal:
            journal.write(json.dumps(line) + "\n")

    def load(self, round: int) -> Iterator[tuple[Update, ClientRecord]]:
        """The updates of a round that are whole, in the order they were saved, each client's once."""
        lines = {line.get("client"): line for line in self._lines() if line.get("round") == round}
        for line in lines.values():
            try:
                yield self._read(line)
            except DAMAGED:
                continue  # Torn by a power loss: this client trains again.

    def clear(self) -> None:
        """Forgets everything: the round is committed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, line: dict[str, Any]) -> tuple[Update, ClientRecord]:
        content = self._file(line["client"]).read_bytes()
        if checksum(content) != line["sha256"]:
            raise ValueError("torn")
        tensors, record, told = load(content), ClientRecord(**line["record"]), line["told"]
        losses = tensors.pop(_LOSSES)
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items()}
        memory = ClientMemory({}, record.last_round, record.steps, record.epochs)
        names = tuple(told["loss_names"])
        seen, metrics = told["images_seen"], told["metrics"]
        seconds = told.get("seconds", 0.0), told.get("data_seconds", 0.0)
        return Update(line["client"], told["num_images"], state, memory, losses, names, seen, metrics, *seconds), record

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = self._journal.read_text()
        except (OSError, UnicodeDecodeError):
            return
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and isinstance(found.get("client"), int):
                yield found

    def _file(self, client: int) -> Path:
        return self._folder / f"{client:05d}.safetensors"
