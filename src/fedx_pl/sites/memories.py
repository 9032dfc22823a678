"""A site's private state after its last rounds in one run.

RUN/round_00012.safetensors      private tensors after this site's training in round 12
RUN/memory.json                  checksums by round, the least recently used first
"""

import json
from pathlib import Path

from fedx_pl.federation.round import ClientMemory
from fedx_pl.files import UNFINISHED, write_atomically
from fedx_pl.files.reading import read_json
from fedx_pl.files.store import load_tensors, save_tensors
from fedx_pl.methods.base import State

KEPT_ROUNDS = 3  # before the one that a coordinator asks for
MAX_ROUNDS = 8  # on disk, whatever a coordinator asks for


class Memories:
    """Saves and loads private state, by round.

    Which state a round starts from is the coordinator's decision: that of the last round in which
    it accepted this site's update. So a round that is repeated, or an update that was lost or
    dropped, leaves no trace.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "memory.json"
        for half in folder.glob(f".*{UNFINISHED}"):  # of a site that was killed while it wrote
            half.unlink()

    def load(self, round_number: int) -> State | None:
        """The private tensors after a round, or None if they are not here.

        Rounds that are much older are deleted. Some are kept, since a coordinator whose newest
        checkpoint is damaged goes back by a round or two.
        """
        records = self._records()
        for old in [number for number in records if number < round_number - KEPT_ROUNDS]:
            self._path(old).unlink(missing_ok=True)
            del records[old]
        if round_number not in records or not self._path(round_number).exists():
            return None
        try:
            tensors = load_tensors(self._path(round_number), records[round_number])
        except ValueError:
            return None
        records[round_number] = records.pop(round_number)  # the most recently used
        self._write(records)
        return tensors

    def save(self, memory: ClientMemory) -> None:
        """Saves a client's private tensors, and deletes the least recently used ones."""
        sha256 = save_tensors(self._path(memory.last_round), memory.tensors(), private=True)
        records = self._records()
        records.pop(memory.last_round, None)
        records[memory.last_round] = sha256
        present = [number for number in records if self._path(number).exists()]
        for number in present[:-MAX_ROUNDS]:
            self._path(number).unlink()
        self._write({number: records[number] for number in present[-MAX_ROUNDS:]})

    def _path(self, round_number: int) -> Path:
        return self.folder / f"round_{round_number:05d}.safetensors"

    def _records(self) -> dict[int, str]:
        try:
            return {int(number): str(sha) for number, sha in read_json(self._file).items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _write(self, records: dict[int, str]) -> None:
        content = {str(number): sha for number, sha in records.items()}
        write_atomically(self._file, json.dumps(content, indent=1).encode(), private=True)
