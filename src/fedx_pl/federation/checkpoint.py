"""What a run leaves on disk so that it can go on.

    RUN/checkpoints/round_00012/global.safetensors     the global state after round 12
    RUN/checkpoints/round_00012/state.json             metrics so far, every client's counters and checksums
    RUN/checkpoints/round_00012/SHA256SUMS             of the two, as `sha256sum --check` reads it
    RUN/checkpoints/best/                              the same two files of the round with the best accuracy so far
    RUN/clients/00003_round_00012.safetensors          client 3's private tensors after its last training, in round 12
    RUN/pending/00003.safetensors                      client 3's update of the round that is under way
    RUN/pending/journal.jsonl                          a line for each: its round, checksum, counters and metrics

A round is committed by one rename of its folder. Client files carry their round in their name, so a run that is killed
in the middle of round 13 still finds what each client had when round 12 was committed. Weights are safetensors and the
rest is JSON: nothing here is ever unpickled.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.files import checksum, json_text, size_of, sync_folder, tensor_bytes, write_atomically

# What reading a file may raise that is damaged, or made by a stranger.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)


_STATE, _LOSSES = "state/", "losses"
BYTES_PER_SECOND = 400e6  # of writing and hashing, on an ordinary disk
WORTH = 10.0  # An update is saved if training it took this many times as long as saving it.


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """The part of a client's memory that fits in JSON."""

    last_round: int
    steps: int
    epochs: int
    sha256: str  # of its file; empty if the client keeps nothing
    images: int = 0  # that it owns
    bytes: int = 0  # of its file


@dataclass(kw_only=True)
class RunState:
    """Everything of a run but tensors, as of its last finished round."""

    round: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics.csv
    untrained: dict[str, float] = field(default_factory=dict)
    clients: dict[int, ClientRecord] = field(default_factory=dict)
    seconds: float = 0.0
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # their states, by key
    config: str = ""  # hash of the run's configuration

    @property
    def best(self) -> int:
        """The round with the best linear accuracy, or kNN if no other was measured; 0: none was."""
        for key in ("linear_top1", "knn_top1"):
            if measured := [row for row in self.rows if key in row]:
                return int(max(measured, key=lambda row: row[key])["round"])
        return 0


class Checkpoints:
    """Saves and finds the state of one run folder."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Opens a run folder.

        Args:
            folder: of the run.
            keep: how many of the newest rounds stay on disk, at least 1.
        """
        self._rounds = folder / "checkpoints"
        self._clients = folder / "clients"
        self._keep = keep

    def save_client(self, update: Update) -> ClientRecord:
        """Keeps a client's private tensors; they count once the round is committed."""
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
            file = self._client_file(client, record.last_round)
            content = file.read_bytes() if file.exists() else b""
            if checksum(content) != record.sha256:
                rounds = [folder for folder in self._committed() if int(folder.name[-5:]) >= record.last_round]
                raise UserError(
                    f"{file} is missing or damaged, and client {client} cannot go on without it; to go back to a round "
                    f"before it, remove {', '.join(map(str, rounds))} and type the same command"
                )
            tensors = load(content)
        return ClientMemory.from_tensors(
            tensors, last_round=record.last_round, steps=record.steps, epochs=record.epochs
        )

    def commit(self, state: RunState, global_state: GlobalState) -> None:
        """Makes a round permanent, then clears what it replaces."""
        weights = tensor_bytes(global_state.tensors())
        files = {"global.safetensors": weights, "state.json": json_text(asdict(state), indent=1).encode()}
        sums = "".join(f"{checksum(content)}  {name}\n" for name, content in files.items())
        folder = self._rounds / f"round_{state.round:05d}"
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        for name, content in (files | {"SHA256SUMS": sums.encode()}).items():
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
        for folder in self._committed()[: -self._keep]:
            shutil.rmtree(folder)
        needed = set()
        for folder in self._kept():
            try:
                records = json.loads((folder / "state.json").read_text())["clients"]
                needed |= {self._client_file(int(client), record["last_round"]) for client, record in records.items()}
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
        damaged: list[tuple[Path, Exception]] = []
        for folder in reversed(self._committed()):
            try:
                found = self._read(folder)
                if mend:  # For somebody who only looks, the weights are enough.
                    self._require_clients(found[0])
            except DAMAGED as error:
                damaged.append((folder, error))
                continue
            for bad, reason in damaged:
                warnings.warn(f"{bad} is damaged ({reason}); going on from round {found[0].round}", stacklevel=2)
                if mend:  # Out of the way, for people to look at: the round will be written again.
                    shutil.rmtree(aside := bad.with_name(f"damaged_{bad.name}"), ignore_errors=True)
                    bad.rename(aside)
            if mend:
                self._keep_best(found[0].best)
            return found
        if damaged and mend:
            raise UserError(
                f"no checkpoint in {self._rounds} is whole ({damaged[0][0].name}: {damaged[0][1]}); nothing was "
                f"changed. Put the missing files back, or start anew with run.dir=ANOTHER"
            )
        for bad, reason in damaged:
            warnings.warn(f"{bad} is damaged ({reason})", stacklevel=2)
        return None

    def read(self, round_number: int) -> tuple[RunState, GlobalState]:
        """A committed round by its number, if it is among the newest or the best."""
        folder = self._rounds / f"round_{round_number:05d}"
        try:
            if not folder.exists() and (found := self._read(self._rounds / "best"))[0].round == round_number:
                return found
            return self._read(folder)
        except DAMAGED as error:
            kept = ", ".join(map(str, self.rounds()))
            raise UserError(
                f"there is no checkpoint of round {round_number} ({error}); there are: {kept or 'none'}. "
                f"run.keep=N keeps the last N, and the best"
            ) from error

    def rounds(self) -> list[int]:
        """The numbers that `read` knows, the best's among them."""
        found = {int(folder.name.removeprefix("round_")) for folder in self._committed()}
        with suppress(*DAMAGED):  # None was measured yet, or it cannot be read.
            found.add(int(json.loads((self._rounds / "best" / "state.json").read_bytes())["round"]))
        return sorted(found)

    def _read(self, folder: Path) -> tuple[RunState, GlobalState]:
        files = {name: (folder / name).read_bytes() for name in ("global.safetensors", "state.json")}
        sums = "".join(f"{checksum(content)}  {name}\n" for name, content in files.items())
        if sums.encode() != (folder / "SHA256SUMS").read_bytes():
            raise ValueError("its files do not match SHA256SUMS")
        manifest = json.loads(files["state.json"])
        clients = {int(client): ClientRecord(**record) for client, record in manifest["clients"].items()}
        state = RunState(
            round=manifest["round"],
            # A number that was not finite is null in JSON.
            rows=[
                {key: math.nan if value is None else value for key, value in row.items()} for row in manifest["rows"]
            ],
            untrained=manifest["untrained"],
            clients=clients,
            seconds=manifest["seconds"],
            callbacks=manifest["callbacks"] if "callbacks" in manifest else _former_callbacks(manifest),
            config=manifest.get("config", ""),
        )
        return state, GlobalState.from_tensors(load(files["global.safetensors"]))

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
            self._rounds / ".best.tmp",
        )
        try:
            kept = json.loads((best / "state.json").read_bytes())["round"]
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
        shutil.rmtree(best, ignore_errors=True)  # If this is the end, the next start makes it again from the round.
        os.replace(temporary, best)

    def _committed(self) -> list[Path]:
        return sorted(self._rounds.glob("round_*")) if self._rounds.is_dir() else []

    def _kept(self) -> list[Path]:
        best = self._rounds / "best"
        return [*self._committed(), *([best] if best.is_dir() else [])]

    def _client_file(self, client: int, round_number: int) -> Path:
        return self._clients / f"{client:05d}_round_{round_number:05d}.safetensors"


def _former_callbacks(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The callbacks' states in a checkpoint of version 0.1, which had no callbacks."""
    return {
        "Quarantine": {"strikes": manifest.get("strikes", {})},
        "Dashboard": {"files": manifest.get("events")},
        "Health": {"alarms": manifest.get("alarms", [])},
    }


class UnfinishedRound:
    """Saves and finds the updates of the round that is under way.

    Its files are not synced to the disk one by one. They outlive the process, whatever ends it; after a power loss one
    may be torn, which its checksum shows, and that client trains again.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a run folder.

        Args:
            folder: of the run.
        """
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
        tensors = {_STATE + name: tensor for name, tensor in update.state.tensors().items()} | {_LOSSES: update.losses}
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
            "round": round_number,
            "client": update.client,
            "sha256": checksum(content),
            "record": asdict(record),
            "told": told,
        }
        with open(self._journal, "a") as journal:
            journal.write(json.dumps(line) + "\n")

    def load(self, round_number: int) -> Iterator[tuple[Update, ClientRecord]]:
        """The updates of a round that are whole, in the order they were saved, each client's once."""
        lines = {line.get("client"): line for line in self._lines() if line.get("round") == round_number}
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
        update = Update(
            client=line["client"],
            num_images=told["num_images"],
            state=GlobalState.from_tensors(state),
            memory=ClientMemory(last_round=record.last_round, steps=record.steps, epochs=record.epochs),
            losses=losses,
            loss_names=tuple(told["loss_names"]),
            images_seen=told["images_seen"],
            metrics=told["metrics"],
            seconds=told.get("seconds", 0.0),
            data_seconds=told.get("data_seconds", 0.0),
        )
        return update, record

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
