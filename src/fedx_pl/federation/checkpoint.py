"""Checkpoints, from which a run can be resumed.

    RUN/checkpoints/round_00012/                   a record of `files.store`, after round 12:
        global.safetensors                         the global state state.json
        metrics so far, each client's counters and checksum SHA256SUMS
        of the two
    RUN/checkpoints/best/                          the same of the round with the best accuracy so
    far RUN/clients/00003_round_00012.safetensors      client 3's private tensors after round 12
    RUN/pending/                                   updates of the current round, see `pending.py`

A round is committed by one rename of its folder. Client files carry their round in their name, so a
run that is killed in round 13 still finds what each client had when round 12 was committed.
"""

import os
import shutil
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.federation.run_state import DAMAGED, ClientRecord, RunState, state_of
from fedx_pl.files import (
    UNFINISHED,
    require_plain,
    require_there,
    round_folders,
    sync_folder,
)
from fedx_pl.files.reading import read_json
from fedx_pl.files.store import (
    VALUES,
    load_record,
    load_tensors,
    save_record,
    save_tensors,
    verify_record,
)

# The folders of a run that this package writes to; the user's loggers may have others beside them.
FOLDERS = ("checkpoints", "clients", "fork", "pending", "evaluation", "tensorboard")
# Another process may replace rounds while they are read: then they are read again.
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.05

Checkpoint = tuple[RunState, GlobalState]


class Checkpoints:
    """Saves and loads the state of one run folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Opens a run folder.

        Args:
            folder: the run folder.
            keep: how many of the newest rounds stay on disk, at least 1.

        Raises:
            UserError: there are links or devices in it.
        """
        require_plain(folder, FOLDERS)
        self._folder = folder
        self._rounds = folder / "checkpoints"
        self._best = self._rounds / "best"
        self._clients = folder / "clients"
        self._keep = keep

    def save_client(self, update: Update) -> ClientRecord:
        """Saves a client's private tensors; they count once the round is committed."""
        require_there(self._folder)
        memory = update.memory
        file = self._client_file(update.client, memory.last_round)
        tensors = memory.tensors()
        sha256 = save_tensors(file, tensors) if tensors else ""
        return ClientRecord(
            last_round=memory.last_round,
            steps=memory.steps,
            epochs=memory.epochs,
            sha256=sha256,
            images=update.num_images,
            bytes=file.stat().st_size if tensors else 0,
        )

    def load_client(self, client: int, record: ClientRecord | None) -> ClientMemory | None:
        """Loads a client's memory; None if it never trained."""
        if record is None:
            return None
        try:
            tensors = self.require_client(client, record)
        except DAMAGED as error:
            require_there(self._folder)
            file = self._client_file(client, record.last_round)
            later = [folder for folder in self._committed() if _number(folder) >= record.last_round]
            raise UserError(
                f"{file} is missing or damaged, and client {client} cannot train without it; to "
                f"return to a round before it, remove {', '.join(map(str, later))} and type the "
                f"same command"
            ) from error
        return ClientMemory.from_tensors(
            tensors, last_round=record.last_round, steps=record.steps, epochs=record.epochs
        )

    def require_client(self, client: int, record: ClientRecord) -> dict[str, Tensor]:
        """A client's private tensors, or one of `DAMAGED` if they are not as they were saved."""
        if not record.sha256:
            return {}
        return load_tensors(self._client_file(client, record.last_round), record.sha256)

    def commit(self, state: RunState, global_state: GlobalState) -> None:
        """Makes a round permanent, then removes what it replaces."""
        require_there(self._folder)
        if self._clients.is_dir():
            sync_folder(self._clients)
        save_record(self._round_folder(state.round), global_state.tensors(), asdict(state))
        self._keep_best(state.best)
        self.clear()

    def clear(self) -> None:
        """Removes rounds beyond `keep`, and client files that no remaining checkpoint refers to.

        Not to be called within a round.
        """
        require_there(self._folder)
        for folder in self._committed()[: -self._keep]:
            shutil.rmtree(folder)
        needed = set()
        for folder in [*self._committed(), *([self._best] if self._best.is_dir() else [])]:
            try:
                records = read_json(folder / VALUES)["clients"]
                needed |= {
                    self._client_file(int(client), record["last_round"])
                    for client, record in records.items()
                }
            except DAMAGED:
                return  # What it refers to is unknown.
        for file in self._clients.glob("*.safetensors"):
            if file not in needed:
                file.unlink()

    def latest(self, *, mend: bool = True) -> Checkpoint | None:
        """The newest undamaged round, or None for a new run.

        Args:
            mend: rename damaged rounds and restore the best one; not in somebody else's run.
        """
        previous = None
        for _ in range(_ATTEMPTS):
            folders = self._committed()
            newest, damaged = self._newest(folders, private=mend)
            # Another process may train there and replace rounds while they are read. Damage stays.
            seen = (folders[-1:], [*damaged])
            if mend or not damaged or seen == previous:
                break
            previous = seen
            time.sleep(_PAUSE_SECONDS)
        if newest is None and damaged and mend:
            folder, reason = next(iter(damaged.items()))
            raise UserError(
                f"all checkpoints in {self._rounds} are damaged ({folder.name}: {reason}); nothing "
                f"was changed. Put the missing files back, or start a new run in another folder"
            )
        for folder, reason in damaged.items():
            self._warn(folder, reason, newest)
            if mend:  # Out of the way, for people to look at: the round will be written again.
                aside = folder.with_name(f"damaged_{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        if mend and newest is not None:
            self._keep_best(newest[0].best)
        return newest

    def _warn(self, folder: Path, reason: Exception, newest: Checkpoint | None) -> None:
        outcome = ""
        if newest is not None:
            number = newest[0].round
            newer = folder != self._best and _number(folder) > number
            outcome = f"; resuming from round {number}" if newer else f"; round {number} is intact"
        warnings.warn(f"{folder} is damaged ({reason}){outcome}", stacklevel=3)

    def _newest(
        self, folders: list[Path], *, private: bool
    ) -> tuple[Checkpoint | None, dict[Path, Exception]]:
        """The newest undamaged round, and all damaged ones with the reasons.

        Args:
            folders: of the rounds, the oldest first.
            private: whether the clients' private states must be there, too; a reader needs only
                the weights.
        """
        newest: Checkpoint | None = None
        damaged: dict[Path, Exception] = {}
        for folder in reversed(folders):
            try:
                if newest is not None:
                    verify_record(folder)
                    continue
                checkpoint = self._read(folder)
                if private:
                    self._require_clients(checkpoint[0])
                newest = checkpoint
            except DAMAGED as error:
                damaged[folder] = error
        if self._best.is_dir():
            try:
                self._read(self._best)
            except DAMAGED as error:
                damaged[self._best] = error
        return newest, damaged

    def read(self, round_number: int) -> Checkpoint:
        """A committed round by its number, if it is among the newest or the best."""
        try:
            try:
                return self._read(self._round_folder(round_number))
            except DAMAGED:  # Or removed while it was read.
                best = self._read(self._best)
                if best[0].round == round_number:
                    return best
                raise
        except DAMAGED as error:
            kept = ", ".join(map(str, self.rounds()))
            raise UserError(
                f"there is no checkpoint of round {round_number} ({error}); there are: "
                f"{kept or 'none'}. run.keep=N keeps the last N, and the best"
            ) from error

    def rounds(self) -> list[int]:
        """The rounds that `read` can return, including the best."""
        numbers = set(map(_number, self._committed()))
        with suppress(*DAMAGED):  # There is none yet, or it cannot be read.
            numbers.add(int(read_json(self._best / VALUES)["round"]))
        return sorted(numbers)

    def _read(self, folder: Path) -> Checkpoint:
        tensors, values = load_record(folder)
        state = state_of(values)
        if folder != self._best and state.round != _number(folder):
            raise ValueError(f"it says that it is round {state.round}")
        return state, GlobalState.from_tensors(tensors)

    def _require_clients(self, state: RunState) -> None:
        """Checks the sizes of private states; their checksums are checked when they are loaded."""
        for client, record in state.clients.items():
            file = self._client_file(client, record.last_round)
            if record.sha256 and (not file.exists() or file.stat().st_size != record.bytes):
                raise ValueError(f"{file.name} is missing or cut off")

    def _keep_best(self, round_number: int) -> None:
        """Keeps a round under another name, by hard links: the weights are on disk once."""
        folder = self._round_folder(round_number)
        try:
            kept = read_json(self._best / VALUES)["round"]
        except DAMAGED:
            kept = None
        if kept == round_number or not folder.is_dir():
            return
        temporary = self._rounds / f".best{UNFINISHED}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(folder, temporary, copy_function=os.link)
        except OSError:  # Some file systems have no links.
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(folder, temporary)
        # If the process is killed here, the next start makes it again from the round.
        shutil.rmtree(self._best, ignore_errors=True)
        os.replace(temporary, self._best)

    def _committed(self) -> list[Path]:
        return round_folders(self._rounds)

    def _round_folder(self, round_number: int) -> Path:
        return self._rounds / f"round_{round_number:05d}"

    def _client_file(self, client: int, round_number: int) -> Path:
        return self._clients / f"{client:05d}_round_{round_number:05d}.safetensors"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("round_"))
