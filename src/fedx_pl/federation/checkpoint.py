"""What a run leaves on disk so that it can go on.

    RUN/checkpoints/round_00012/global.safetensors     the global state after round 12
    RUN/checkpoints/round_00012/state.json             metrics so far, every client's counters and checksums
    RUN/checkpoints/round_00012/SHA256SUMS             of the two, as `sha256sum --check` reads it
    RUN/checkpoints/best/                              the same two files of the round with the best accuracy so far
    RUN/clients/00003_round_00012.safetensors          client 3's private tensors after its last training, in round 12
    RUN/pending/00003.safetensors                      client 3's update of the round that is under way
    RUN/pending/journal.jsonl                          a line for each: its round, checksums, counters and metrics

A round is committed by one rename of its folder. Client files carry their round in their name, so a run that is killed
in the middle of round 13 still finds what each client had when round 12 was committed. Weights are safetensors and the
rest is JSON: nothing here is ever unpickled.
"""

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.federation.run_state import (
    DAMAGED,
    ClientRecord,
    RunState,
    real,
    record_of,
    state_of,
    whole,
)
from fedx_pl.files import (
    UNFINISHED,
    checksum,
    json_text,
    private_file,
    read_verified,
    require_plain,
    require_there,
    round_folders,
    sealed,
    size_of,
    sums_of,
    sync_folder,
    tensor_bytes,
    unsealed,
    write_atomically,
)
from fedx_pl.files.reading import parse_json, parse_tensors, read_json

# The folders of a run that this package writes to; a logger of the user's choice may have others beside them.
FOLDERS = ("checkpoints", "clients", "pending", "evaluation", "tensorboard")
FILES = ("global.safetensors", "state.json")  # of a round
_LOOKS, _PAUSE = (
    20,
    0.05,
)  # at a folder whose rounds are replaced while it is read; seconds between them

_STATE, _LOSSES = "state/", "losses"
BYTES_PER_SECOND = 400e6  # of writing and hashing, on an ordinary disk
WORTH = 10.0  # An update is saved if training it took this many times as long as saving it.


class Checkpoints:
    """Saves and finds the state of one run folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Opens a run folder.

        Args:
            folder: of the run.
            keep: how many of the newest rounds stay on disk, at least 1.

        Raises:
            UserError: there are links or devices in it.
        """
        require_plain(folder, FOLDERS)
        self._folder = folder
        self._rounds = folder / "checkpoints"
        self._clients = folder / "clients"
        self._keep = keep

    def save_client(self, update: Update) -> ClientRecord:
        """Keeps a client's private tensors; they count once the round is committed."""
        require_there(self._folder)
        memory, content = update.memory, b""
        if tensors := memory.tensors():
            content = tensor_bytes(tensors)
            write_atomically(self._client_file(update.client, memory.last_round), content)
        return ClientRecord(
            last_round=memory.last_round,
            steps=memory.steps,
            epochs=memory.epochs,
            sha256=checksum(content) if content else "",
            images=update.num_images,
            bytes=len(content),
        )

    def load_client(self, client: int, record: ClientRecord | None) -> ClientMemory | None:
        """Finds a client's memory again; None if it never trained."""
        if record is None:
            return None
        tensors: dict[str, Tensor] = {}
        if record.sha256:
            try:
                tensors = parse_tensors(self._client_bytes(client, record))
            except DAMAGED as error:
                require_there(self._folder)
                file = self._client_file(client, record.last_round)
                rounds = [
                    folder for folder in self._committed() if _number(folder) >= record.last_round
                ]
                raise UserError(
                    f"{file} is missing or damaged, and client {client} cannot go on without it; to go back to a round "
                    f"before it, remove {', '.join(map(str, rounds))} and type the same command"
                ) from error
        return ClientMemory.from_tensors(
            tensors, last_round=record.last_round, steps=record.steps, epochs=record.epochs
        )

    def require_client(self, client: int, record: ClientRecord) -> None:
        """Raises one of `DAMAGED` unless a client's memory is as it was saved."""
        if record.sha256:
            self._client_bytes(client, record)

    def _client_bytes(self, client: int, record: ClientRecord) -> bytes:
        content = self._client_file(client, record.last_round).read_bytes()
        if checksum(content) != record.sha256:
            raise ValueError("it does not match its checksum")
        return content

    def commit(self, state: RunState, global_state: GlobalState) -> None:
        """Makes a round permanent, then clears what it replaces."""
        require_there(self._folder)
        weights = tensor_bytes(global_state.tensors())
        files = dict(
            zip(FILES, (weights, json_text(asdict(state), indent=1).encode()), strict=True)
        )
        folder = self._rounds / f"round_{state.round:05d}"
        temporary = folder.with_name(f".{folder.name}{UNFINISHED}")
        shutil.rmtree(temporary, ignore_errors=True)
        for name, content in (files | {"SHA256SUMS": sums_of(files)}).items():
            write_atomically(temporary / name, content)
        sync_folder(temporary)
        if self._clients.is_dir():
            sync_folder(self._clients)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(self._rounds)
        self._keep_best(state.best)
        self.clear()

    def clear(self) -> None:
        """Removes rounds beyond `keep` and client files that neither a remaining round nor the best refers to.

        Not within a round.
        """
        require_there(self._folder)
        for folder in self._committed()[: -self._keep]:
            shutil.rmtree(folder)
        needed = set()
        for folder in self._kept():
            try:
                records = read_json(folder / "state.json")["clients"]
                needed |= {
                    self._client_file(int(client), record["last_round"])
                    for client, record in records.items()
                }
            except DAMAGED:
                return  # Who knows what it needs.
        for file in self._clients.glob("*.safetensors"):
            if file not in needed:
                file.unlink()

    def latest(self, *, mend: bool = True) -> tuple[RunState, GlobalState] | None:
        """The newest committed round that is whole, or None for a new run.

        Args:
            mend: put damaged ones aside; not in somebody else's run.
        """
        before = None
        for _ in range(_LOOKS):
            folders = self._committed()
            found, damaged = self._newest(folders, private=mend)
            look = (folders[-1:], [*damaged])
            # Another process may train there and replace rounds while they are read; damage stays as it is.
            if mend or not damaged or look == before:
                break
            before = look
            time.sleep(_PAUSE)
        if found is None:
            if damaged and mend:
                bad, reason = next(iter(damaged.items()))
                raise UserError(
                    f"no checkpoint in {self._rounds} is whole ({bad.name}: {reason}); nothing was changed. Put the "
                    f"missing files back, or start anew with run.dir=ANOTHER"
                )
            for bad, reason in damaged.items():
                warnings.warn(f"{bad} is damaged ({reason})", stacklevel=2)
            return None
        for bad, reason in damaged.items():
            newer = bad.name != "best" and _number(bad) > found[0].round
            outcome = (
                f"going on from round {found[0].round}"
                if newer
                else f"round {found[0].round} is whole"
            )
            warnings.warn(f"{bad} is damaged ({reason}); {outcome}", stacklevel=2)
            if mend:  # Out of the way, for people to look at: the round will be written again.
                shutil.rmtree(aside := bad.with_name(f"damaged_{bad.name}"), ignore_errors=True)
                bad.rename(aside)
        if mend:
            self._keep_best(found[0].best)
        return found

    def _newest(
        self, folders: list[Path], *, private: bool
    ) -> tuple[tuple[RunState, GlobalState] | None, dict[Path, Exception]]:
        """The newest round that is whole, and all that are not, with the reasons.

        Args:
            folders: of the rounds, the oldest first.
            private: whether the clients' private states must be there, too; for who only looks, the weights are enough.
        """
        found: tuple[RunState, GlobalState] | None = None
        damaged: dict[Path, Exception] = {}
        for folder in reversed(folders):
            try:
                if found is not None:
                    read_verified(folder, FILES)
                    continue
                state, weights = self._read(folder)
                if private:
                    self._require_clients(state)
                found = state, weights
            except DAMAGED as error:
                damaged[folder] = error
        if (best := self._rounds / "best").is_dir():
            try:
                self._read(best)
            except DAMAGED as error:
                damaged[best] = error
        return found, damaged

    def read(self, round_number: int) -> tuple[RunState, GlobalState]:
        """A committed round by its number, if it is among the newest or the best."""
        folder = self._rounds / f"round_{round_number:05d}"
        try:
            try:
                return self._read(folder)
            except DAMAGED:  # Or removed while it was read.
                if (found := self._read(self._rounds / "best"))[0].round == round_number:
                    return found
                raise
        except DAMAGED as error:
            kept = ", ".join(map(str, self.rounds()))
            raise UserError(
                f"there is no checkpoint of round {round_number} ({error}); there are: {kept or 'none'}. "
                f"run.keep=N keeps the last N, and the best"
            ) from error

    def rounds(self) -> list[int]:
        """The numbers that `read` knows, the best's among them."""
        found = set(map(_number, self._committed()))
        with suppress(*DAMAGED):  # None was measured yet, or it cannot be read.
            found.add(int(read_json(self._rounds / "best" / "state.json")["round"]))
        return sorted(found)

    def _read(self, folder: Path) -> tuple[RunState, GlobalState]:
        weights, manifest = read_verified(folder, FILES).values()
        state = state_of(parse_json(manifest))
        if folder.name != "best" and state.round != _number(folder):
            raise ValueError(f"it says that it is round {state.round}")
        return state, GlobalState.from_tensors(parse_tensors(weights))

    def _require_clients(self, state: RunState) -> None:
        """Private states are there and as long as they were; their checksums are looked at when they are read."""
        for client, record in state.clients.items():
            file = self._client_file(client, record.last_round)
            if record.sha256 and (not file.exists() or file.stat().st_size != record.bytes):
                raise ValueError(f"{file.name} is missing or cut off")

    def _keep_best(self, round_number: int) -> None:
        """Keeps a round under another name, by links: the weights are on the disk once."""
        folder, best, temporary = (
            self._rounds / f"round_{round_number:05d}",
            self._rounds / "best",
            self._rounds / f".best{UNFINISHED}",
        )
        try:
            kept = read_json(best / "state.json")["round"]
        except DAMAGED:
            kept = None
        if kept == round_number or not folder.is_dir():
            return
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(folder, temporary, copy_function=os.link)
        except OSError:  # Some file systems have no links.
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(folder, temporary)
        shutil.rmtree(
            best, ignore_errors=True
        )  # If this is the end, the next start makes it again from the round.
        os.replace(temporary, best)

    def _committed(self) -> list[Path]:
        return round_folders(self._rounds)

    def _kept(self) -> list[Path]:
        best = self._rounds / "best"
        return [*self._committed(), *([best] if best.is_dir() else [])]

    def _client_file(self, client: int, round_number: int) -> Path:
        return self._clients / f"{client:05d}_round_{round_number:05d}.safetensors"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("round_"))


class UnfinishedRound:
    """Saves and finds the updates of the round that is under way.

    Its files are not synced to the disk one by one. They outlive the process, whatever ends it; after a power loss one
    may be torn, which its checksum shows, and that client trains again. Each line of the journal has a checksum, too.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a run folder.

        Args:
            folder: of the run.
        """
        self._run = folder
        self._folder = folder / "pending"
        self._journal = self._folder / "journal.jsonl"

    def save(self, round_number: int, update: Update, record: ClientRecord) -> None:
        """Keeps an update, if it is cheaper to save than to train again.

        Args:
            round_number: that it belongs to.
            update: with its weights.
            record: of the client's private state, which is saved already.
        """
        if update.seconds < WORTH * size_of(update.state.tensors()) / BYTES_PER_SECOND:
            return
        require_there(self._run)
        tensors = {_STATE + name: tensor for name, tensor in update.state.tensors().items()} | {
            _LOSSES: update.losses
        }
        content = tensor_bytes(tensors)
        write_atomically(self._file(update.client), content, sync=False, private=True)
        told = {
            "num_images": update.num_images,
            "images_seen": update.images_seen,
            "seconds": update.seconds,
            "data_seconds": update.data_seconds,
            "loss_names": update.loss_names,
            "metrics": update.metrics,
        }
        line = {
            "round": round_number,
            "client": update.client,
            "sha256": checksum(content),
            "record": asdict(record),
            "told": told,
        }
        with open(self._journal, "a", opener=private_file) as journal:
            journal.write(json.dumps(sealed(line)) + "\n")

    def load(self, round_number: int) -> Iterator[tuple[Update, ClientRecord]]:
        """The updates of a round that are whole, in the order they were saved, each client's once."""
        lines = {
            line.get("client"): line for line in self._lines() if line.get("round") == round_number
        }
        checkpoints = Checkpoints(self._run)
        for line in lines.values():
            try:
                update, record = self._read(line)
                checkpoints.require_client(update.client, record)
            except DAMAGED:
                continue  # Torn by a power loss: this client trains again.
            yield update, record

    def forget(self, client: int, *, before: float) -> bool:
        """Drops a client's update if it was saved before a time; whether there was one."""
        file = self._file(client)
        if not file.exists() or file.stat().st_mtime > before:
            return False
        file.unlink()
        return True

    def clear(self) -> None:
        """Forgets everything: the round is committed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, line: dict[str, Any]) -> tuple[Update, ClientRecord]:
        content = self._file(line["client"]).read_bytes()
        if checksum(content) != line["sha256"]:
            raise ValueError("torn")
        tensors, record, told = parse_tensors(content), record_of(line["record"]), line["told"]
        losses, names, metrics = (
            tensors.pop(_LOSSES),
            tuple(told["loss_names"]),
            dict(told["metrics"]),
        )
        if (
            losses.dtype not in (torch.float32, torch.float64)
            or losses.shape[1:] != (len(names),)
            or "total" not in names
            or not all(isinstance(name, str) for name in names)
        ):
            raise ValueError("its losses have no names")
        if record.last_round != line["round"]:
            raise ValueError("its memory is of another round")
        state = {name.removeprefix(_STATE): tensor for name, tensor in tensors.items()}
        update = Update(
            client=line["client"],
            num_images=whole(told["num_images"]),
            state=GlobalState.from_tensors(state),
            memory=ClientMemory(
                last_round=record.last_round, steps=record.steps, epochs=record.epochs
            ),
            losses=losses,
            loss_names=names,
            images_seen=whole(told["images_seen"]),
            metrics={name: real(value) for name, value in metrics.items()},
            seconds=real(told["seconds"]),
            data_seconds=real(told["data_seconds"]),
        )
        return update, record

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = self._journal.read_text()
        except (OSError, UnicodeDecodeError):
            return
        for line in text.splitlines():
            try:
                found = unsealed(parse_json(line))
                whole(found["client"])
            except DAMAGED:
                continue  # Torn or damaged: this client trains again.
            yield found

    def _file(self, client: int) -> Path:
        return self._folder / f"{client:05d}.safetensors"
