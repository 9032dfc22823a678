"""Opening a run folder: a new one, one to go on with, or one that is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.torch import load_file

from fedx_pl.data import split_file
from fedx_pl.data.images import VALUE_RANGE_FILE, ImageData
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints, RunState, UnfinishedRound
from fedx_pl.federation.round import GlobalState
from fedx_pl.files import clear_unfinished, lock, size_of, tensor_bytes, write_atomically
from fedx_pl.provenance import foreign_code
from fedx_pl.provenance.foreign_code import Record

FORK = "fork.safetensors"  # what a forked run began with


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is, as far as its folder is concerned."""

    folder: Path
    named_by_hand: bool  # the folder; else its name comes from the settings
    content: dict[str, Any]  # what decides the result, by dotted key
    hash: str  # of the content
    text: str  # all settings, for config.yaml
    read: Callable[[Path], dict[str, Any]]  # the content that a config.yaml tells of
    code: Record  # what is not ours and was brought
    rounds: int
    clients_per_round: int
    first_state: GlobalState
    private_bytes: int  # that a client keeps
    clients: list[np.ndarray]  # each client's rows; none where the images are elsewhere
    partition: dict[str, Any]  # how they were dealt, for people
    data: ImageData
    keep: int = 2  # checkpoints
    resume: bool = True
    fork: str = ""  # a run folder to take the first weights from

    def elsewhere(self, words: str) -> str:
        """Words for a new run, and another folder if this one was named by hand."""
        return f"run.dir=ANOTHER {words}".strip() if self.named_by_hand else words


def open_run(
    run: RunSettings, checkpoints: Checkpoints, note: Callable[[str], None]
) -> tuple[IO[str], tuple[RunState, GlobalState]]:
    """Makes a run's folder ready to write to.

    Args:
        run: what is to be trained.
        checkpoints: of its folder.
        note: takes what the user should know.

    Returns:
        The lock, which keeps others out until it is closed; how far the run is, and its weights.

    Raises:
        UserError: it holds another run, another process is in it, or there is no room.
    """
    folder = run.folder
    file = folder / "config.yaml"
    if file.exists():
        if not run.resume:
            raise UserError(f"{folder} holds a run already; type run.dir=ANOTHER, or resume=auto to go on with it")
        _refuse_other_settings(run, run.read(file))
        _refuse_other_images(run)
        if checkpoints.rounds():
            _refuse_other_code(run)
    elif folder.is_dir() and any(not _is_ours(item.name) for item in folder.iterdir()):
        raise UserError(f"run.dir={folder} is not empty and holds no run; type run.dir=ANOTHER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        clear_unfinished(folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); type run.dir=ANOTHER") from error
    try:
        found = checkpoints.latest()
        if found is None or found[0].round < run.rounds:
            _require_space(run)
        if found is not None and found[0].config not in ("", run.hash):
            raise UserError(f"the newest checkpoint in {folder} is of another run; type run.dir=ANOTHER")
        started = found or (RunState(), _first_state(run, note))
        if found is None and (foreign_code.read_record(folder) or Record()) != run.code:
            UnfinishedRound(folder).clear()  # Updates of a first round that other code began.
        _describe(run)
        if found is None and run.fork:  # The other run may move on before this one has a checkpoint of its own.
            write_atomically(folder / FORK, tensor_bytes(started[1].tensors()))
    except BaseException:
        held.close()
        raise
    if found is not None and found[0].round < run.rounds:
        note(f"going on after round {found[0].round} of {run.rounds}, from {folder}")
    elif found is not None:
        more = f"federation.rounds={2 * found[0].round}"
        note(
            f"this run is finished, with {found[0].round} of {run.rounds} rounds in {folder}; to train "
            f"on, type {run.elsewhere(more)} --fork {folder}"
        )
    return held, started


def _describe(run: RunSettings) -> None:
    """Writes what a run is beside its checkpoints."""
    foreign_code.write_record(run.folder, run.code)  # Before the configuration, which makes it a run.
    write_atomically(run.folder / "config.yaml", run.text.encode())
    if run.data.value_range:  # Who uses the encoder later must read images in the same way.
        write_atomically(run.folder / VALUE_RANGE_FILE, json.dumps(run.data.value_range).encode())
    if run.clients:  # Real sites keep to themselves which images they own.
        file, fingerprint = run.folder / "split.json", run.data.fingerprint
        split_file.save(file, run.clients, fingerprint=fingerprint, options=run.partition)


def _is_ours(name: str) -> bool:
    """Whether a file may be in a folder that holds no run yet."""
    return name.startswith(".") or name == foreign_code.FILE


def _first_state(run: RunSettings, note: Callable[[str], None]) -> GlobalState:
    """Freshly made weights, or those of the run that this one forks."""
    first, fork, folder = run.first_state, run.fork, run.folder
    if not fork:
        return first
    if (folder / FORK).exists():
        return GlobalState.from_tensors(load_file(folder / FORK))
    found = Checkpoints(Path(fork)).latest(mend=False)
    if found is None:
        raise UserError(f"fork={fork} holds no checkpoint; it must be the folder of a run")
    shapes = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors().items()} for state in (first, found[1])
    ]
    if shapes[0] != shapes[1]:
        raise UserError(f"fork={fork} has another network or method; its weights do not fit")
    note(f"starting from the weights of round {found[0].round} of {fork}")
    return found[1]


def _require_space(run: RunSettings) -> None:
    """Better no run than one that ends in its last hour."""
    folder, weights = run.folder, size_of(run.first_state.tensors())
    # Kept rounds, the best and the one being written; pending updates; three private states of each client; the rest.
    rounds = run.keep + 2 + run.clients_per_round
    needed = weights * rounds + 3 * run.private_bytes * len(run.clients) + 50e6
    needed -= sum(file.stat().st_size for file in folder.rglob("*.safetensors"))  # Some of it is there already.
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB free, and this run needs about {needed / 1e9:.2f} GB; free some space, "
            f"or type run.root=ANOTHER"
        )


def _refuse_other_images(run: RunSettings) -> None:
    """The keys may be the same and the images others: a folder that has grown, an edited split file."""
    data, file = run.data, run.folder / "split.json"
    if not file.exists():
        return
    try:
        before = split_file.load(file, fingerprint=data.fingerprint, num_images=len(data.train.images))
    except UserError:  # It speaks of `partition.file`, which the user did not give here.
        before = []
    if len(before) != len(run.clients) or not all(map(np.array_equal, before, run.clients)):
        raise UserError(
            f"{run.folder} holds a run on other images or with another split of the images; type run.dir=ANOTHER"
        )


def _refuse_other_code(run: RunSettings) -> None:
    """The same command may run a method that was edited since."""
    folder, code = run.folder, run.code
    before = foreign_code.read_record(folder)
    if before is None and not code.modules:
        return
    if before is None:
        what = f"does not say which code trained it, and {foreign_code.describe([*code.modules])} may have changed"
    elif changed := foreign_code.differing(before.modules, code.modules):
        what = f"was trained with other code: {foreign_code.describe(changed)} changed since"
    else:
        return
    fork = run.elsewhere(f"--fork {folder}")
    another = "run.dir=ANOTHER" if run.named_by_hand else "name=ANOTHER"
    raise UserError(
        f"{folder} {what}; type {another} for a new run, {fork} for a new run from its weights, or delete {folder}"
    )


def _refuse_other_settings(run: RunSettings, before: dict[str, Any]) -> None:
    folder, after = run.folder, run.content
    differing = [key for key in before | after if before.get(key) != after.get(key)]
    if differing:
        first = ", ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in differing[:5])
        raise UserError(
            f"{folder} holds a run of another config ({first}); type run.dir=ANOTHER, use the same values, or start a "
            f"new run from its weights: run.dir=ANOTHER --fork {folder}"
        )
