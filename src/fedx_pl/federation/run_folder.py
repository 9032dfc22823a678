"""Opening a run folder: a new one, one to go on with, or one that is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from safetensors.torch import load_file

from fedx_pl.config.build import Plan
from fedx_pl.config.compose import Config, flat, load
from fedx_pl.data import split_file
from fedx_pl.data.images import VALUE_RANGE_FILE
from fedx_pl.errors import UserError
from fedx_pl.federation import foreign_code
from fedx_pl.federation.checkpoint import Checkpoints, RunState, UnfinishedRound
from fedx_pl.federation.foreign_code import Record
from fedx_pl.federation.round import GlobalState
from fedx_pl.files import clear_unfinished, lock, size_of, tensor_bytes, write_atomically

FORK = "fork.safetensors"  # what a forked run began with


def open_run(
    plan: Plan, checkpoints: Checkpoints, note: Callable[[str], None]
) -> tuple[IO[str], tuple[RunState, GlobalState]]:
    """Makes a plan's folder ready to write to.

    Args:
        plan: of the run.
        checkpoints: of its folder.
        note: takes what the user should know.

    Returns:
        The lock, which keeps others out until it is closed; how far the run is, and its weights.

    Raises:
        UserError: it holds another run, another process is in it, or there is no room.
    """
    config, folder = plan.config, plan.config.run_folder
    file = folder / "config.yaml"
    code = Record(foreign_code.require_current(type(plan.model)), plan.own_backbone)
    if file.exists():
        if config.run.resume == "never":
            raise UserError(f"{folder} holds a run already; type run.dir=ANOTHER, or resume=auto to go on with it")
        _refuse_other(load(file, trusted=config.method.name), config, folder)
        _refuse_other_images(plan, folder)
        if checkpoints.rounds():
            _refuse_other_code(code, config, folder)
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
        if found is None or found[0].round < config.federation.rounds:
            _require_space(plan, folder)
        if found is not None and found[0].config not in ("", config.hash):
            raise UserError(f"the newest checkpoint in {folder} is of another run; type run.dir=ANOTHER")
        first = None if found else _first_state(plan, folder, note)
        if found is None and (foreign_code.read_record(folder) or Record()) != code:
            UnfinishedRound(folder).clear()  # Updates of a first round that other code began.
        foreign_code.write_record(folder, code)  # Before the configuration, which makes it a run.
        write_atomically(file, config.to_yaml().encode())
        if plan.data.value_range:  # Who uses the encoder later must read images in the same way.
            write_atomically(folder / VALUE_RANGE_FILE, json.dumps(plan.data.value_range).encode())
        if plan.clients:  # Real sites keep to themselves which images they own.
            split, options = folder / "split.json", config.content()["partition"]
            split_file.save(split, plan.clients, fingerprint=plan.data.fingerprint, options=options)
        if first is not None and config.fork:  # The other run may move on before this one has a checkpoint of its own.
            write_atomically(folder / FORK, tensor_bytes(first.tensors()))
    except BaseException:
        held.close()
        raise
    if found is None:
        assert first is not None
        return held, (RunState(), first)
    if found[0].round < config.federation.rounds:
        note(f"going on after round {found[0].round} of {config.federation.rounds}, from {folder}")
    else:
        more = f"federation.rounds={2 * found[0].round}"
        note(
            f"this run is finished, with {found[0].round} of {config.federation.rounds} rounds in {folder}; to train "
            f"on, type {_elsewhere(config, more)} --fork {folder}"
        )
    return held, found


def _is_ours(name: str) -> bool:
    """Whether a file may be in a folder that holds no run yet."""
    return name.startswith(".") or name == foreign_code.FILE


def _elsewhere(config: Config, words: str) -> str:
    """Words for a new run, and another folder if this one was named by hand."""
    return f"run.dir=ANOTHER {words}".strip() if config.run.dir else words


def _first_state(plan: Plan, folder: Path, note: Callable[[str], None]) -> GlobalState:
    """Freshly made weights, or those of the run that this one forks."""
    first, fork = plan.first_state(), plan.config.fork
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


def _require_space(plan: Plan, folder: Path) -> None:
    """Better no run than one that ends in its last hour."""
    weights, private = size_of(plan.first_state().tensors()), size_of(plan.model.kept_tensors())
    # Kept rounds, the best and the one being written; pending updates; three private states of each client; the rest.
    pending = plan.clients_per_round if plan.clients else plan.config.federation.clients
    needed = weights * (plan.config.run.keep + 2 + pending) + 3 * private * len(plan.clients) + 50e6
    needed -= sum(file.stat().st_size for file in folder.rglob("*.safetensors"))  # Some of it is there already.
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.2f} GB free, and this run needs about {needed / 1e9:.2f} GB; free some space, "
            f"or type run.root=ANOTHER"
        )


def _refuse_other_images(plan: Plan, folder: Path) -> None:
    """The keys may be the same and the images others: a folder that has grown, an edited split file."""
    file = folder / "split.json"
    if not file.exists():
        return
    try:
        before = split_file.load(file, fingerprint=plan.data.fingerprint, num_images=len(plan.data.train.images))
    except UserError:  # It speaks of `partition.file`, which the user did not give here.
        before = []
    if len(before) != len(plan.clients) or not all(map(np.array_equal, before, plan.clients)):
        raise UserError(
            f"{folder} holds a run on other images or with another split of the images; type run.dir=ANOTHER"
        )


def _refuse_other_code(code: Record, config: Config, folder: Path) -> None:
    """The same command may run a method that was edited since."""
    before = foreign_code.read_record(folder)
    if before is None and not code.modules:
        return
    if before is None:
        what = f"does not say which code trained it, and {foreign_code.describe([*code.modules])} may have changed"
    elif changed := foreign_code.differing(before.modules, code.modules):
        what = f"was trained with other code: {foreign_code.describe(changed)} changed since"
    else:
        return
    fork = _elsewhere(config, f"--fork {folder}")
    another = "run.dir=ANOTHER" if config.run.dir else "name=ANOTHER"
    raise UserError(
        f"{folder} {what}; type {another} for a new run, {fork} for a new run from its weights, or delete {folder}"
    )


def _refuse_other(old: Config, new: Config, folder: Path) -> None:
    before, after = flat(old.content()), flat(new.content())
    differing = [key for key in before | after if before.get(key) != after.get(key)]
    if differing:
        first = ", ".join(f"{key}: {before.get(key)} -> {after.get(key)}" for key in differing[:5])
        raise UserError(
            f"{folder} holds a run of another config ({first}); type run.dir=ANOTHER, use the same values, or start a "
            f"new run from its weights: run.dir=ANOTHER --fork {folder}"
        )
