"""Opening a run folder: a new one, one to go on with, or one that is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fedx_pl.data import split_file
from fedx_pl.data.images import VALUE_RANGE_FILE
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import DAMAGED, Checkpoints, RunState, UnfinishedRound
from fedx_pl.federation.content import decisive, flat
from fedx_pl.federation.identity import code_record
from fedx_pl.federation.round import GlobalState
from fedx_pl.files import checksum, clear_unfinished, lock, size_of, tensor_bytes, write_atomically
from fedx_pl.files.reading import parse_tensors, read_json, read_yaml
from fedx_pl.options import OptionError
from fedx_pl.provenance import foreign_code
from fedx_pl.provenance.foreign_code import Record

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

FORK = "fork.safetensors"  # what a run began with whose first weights cannot be made again


def open_run(trainer: FederatedTrainer) -> tuple[IO[str], tuple[RunState, GlobalState]]:
    """Makes a run's folder ready to write to.

    Args:
        trainer: with model and images; its folder may hold an earlier part of the run.

    Returns:
        The lock, which keeps others out until it is closed; how far the run is, and its weights.

    Raises:
        UserError: the folder holds another run, another process is in it, or there is no room.
    """
    folder, told = trainer.folder, trainer.description
    code = code_record(trainer, trainer.model, trainer.datamodule)
    file = folder / "config.yaml"
    if file.exists():
        if not trainer.resume:
            go_on = "resume=auto" if told.typed else "resume=True"
            raise UserError(
                f"{folder} holds a run already; {told.write} {told.another()}, or {go_on} to go on with it"
            )
        _refuse_other_settings(trainer, told.read(file))
        _refuse_other_images(trainer)
        if trainer.checkpoints.rounds():
            _refuse_other_code(trainer, code)
    elif folder.is_dir() and any(not _is_ours(item.name) for item in folder.iterdir()):
        key = told.key("default_root_dir")
        raise UserError(
            f"{key}={folder} is not empty and holds no run; {told.write} {told.another()}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        clear_unfinished(folder)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error}); {told.write} {told.another()}"
        ) from error
    try:
        found = trainer.checkpoints.latest()
        if found is None or found[0].round < trainer.max_rounds:
            _require_space(trainer)
        if found is not None and found[0].config not in ("", told.hash):
            raise UserError(
                f"the newest checkpoint in {folder} is of another run; {told.write} {told.another()}"
            )
        if found is not None:
            _require_fitting(
                trainer, found[1], str(folder), instead=f"{told.write} {told.another()}"
            )
        started = found or (RunState(), _first_state(trainer))
        if found is None and (foreign_code.read_record(folder) or Record()) != code:
            UnfinishedRound(folder).clear()  # Updates of a first round that other code began.
        _describe(trainer, code)
        trainer.described = describe(folder)
        if found is None and (trainer.fork or not told.typed):
            # The other run may move on before this one has a checkpoint of its own, and weights that were made in
            # Python are others in the next process.
            content = tensor_bytes(started[1].tensors())
            write_atomically(folder / f"{FORK}.sha256", checksum(content).encode())
            write_atomically(folder / FORK, content)
    except BaseException:
        held.close()
        raise
    if found is not None and found[0].round < trainer.max_rounds:
        trainer.note(
            f"going on after round {found[0].round} of {trainer.max_rounds}, from {folder}"
        )
    elif found is not None:
        more = told.together(f"{told.key('max_rounds')}={2 * found[0].round}", told.forking(folder))
        trainer.note(
            f"this run is finished, with {found[0].round} of {trainer.max_rounds} rounds in {folder}; to train on, "
            f"{told.write} {_elsewhere(trainer, more)}"
        )
    if found is not None and not told.typed and _began_otherwise(trainer):
        warnings.warn(
            f"{folder} began with other first weights than this model has, which do not count any more; "
            f"{told.another()} starts anew from them",
            stacklevel=4,
        )
    return held, started


def read_run(folder: Path, round_number: int | None = None) -> tuple[RunState, GlobalState]:
    """The state of a run that is only read; what `open_run` would refuse is refused.

    Args:
        folder: of the run; another process may train there.
        round_number: whose checkpoint was kept; the newest one's if not given.

    Raises:
        UserError: there is no such round, or the files beside it are not those that it was trained with.
    """
    checkpoints = Checkpoints(folder)
    found = (
        checkpoints.latest(mend=False) if round_number is None else checkpoints.read(round_number)
    )
    if found is None:
        kept = "none of its rounds is whole" if checkpoints.rounds() else "it has no finished round"
        raise UserError(
            f"{folder}: {kept}; type fedx-pl train run.dir={folder} and the run's own keys"
        )
    if (before := found[0].described) is not None:
        _require_described(folder, found[0].round, before)
    return found


def describe(folder: Path) -> dict[str, Any]:
    """What the files beside the checkpoints say, for each checkpoint to keep; nothing is imported."""
    return {
        "config.yaml": _settings(folder / "config.yaml"),
        "split.json": _sum_of(folder / "split.json", "fingerprint", "clients"),
        VALUE_RANGE_FILE: _sum_of(folder / VALUE_RANGE_FILE),
        foreign_code.FILE: _sum_of(folder / foreign_code.FILE),
    }


def _settings(file: Path) -> dict[str, Any]:
    """What decides the result, by key; of the rest, such as where the images are, another start may say other words."""
    try:
        found: dict[str, Any] = json.loads(json.dumps(flat(decisive(read_yaml(file)))))
        return found
    except DAMAGED as error:
        raise UserError(f"{file} is not a readable run configuration ({error})") from error


def _sum_of(file: Path, *keys: str) -> str:
    """The checksum of what a JSON file says, or of some keys of it; empty if there is no such file."""
    if not file.exists():
        return ""
    try:
        content = read_json(file)
        content = {key: content[key] for key in keys} if keys else content
    except DAMAGED as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}); put the old one back"
        ) from error
    return checksum(json.dumps(content, sort_keys=True).encode())


def _require_described(folder: Path, round_number: int, before: dict[str, Any]) -> None:
    now = describe(folder)
    then, settings = before.get("config.yaml"), now.pop("config.yaml")
    then = then if isinstance(then, dict) else {}
    elsewhere = ("fedca.base", "fork")  # other runs, which may have been moved
    differing = [
        key
        for key in then | settings
        if key not in elsewhere and then.get(key) != settings.get(key)
    ]
    # Without a record of its code a run is read all the same, with a note where that matters.
    changed = [
        name
        for name, sums in now.items()
        if sums != before.get(name) and (sums or name != foreign_code.FILE)
    ]
    if differing:
        values = ", ".join(
            f"{key}: {then.get(key)} -> {settings.get(key)}" for key in differing[:5]
        )
        changed.insert(0, f"config.yaml ({values})")
    if changed:
        raise UserError(
            f"{folder}: {', '.join(changed)} changed since round {round_number} was trained, or is damaged; put the "
            f"old one back"
        )


def _shapes(state: GlobalState) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors().items()}


def _began_otherwise(trainer: FederatedTrainer) -> bool:
    """Whether a run that was made in Python began with other weights than the model has now."""
    file = trainer.folder / FORK
    return file.exists() and file.read_bytes() != tensor_bytes(trainer.first_state().tensors())


def _elsewhere(trainer: FederatedTrainer, words: str) -> str:
    """Words for a new run, and another folder if this one was named by hand."""
    told = trainer.description
    return told.together(told.another(), words) if _named_by_hand(trainer) else words


def _named_by_hand(trainer: FederatedTrainer) -> bool:
    return trainer.default_root_dir is not None and not trainer.description.names_folder


def _describe(trainer: FederatedTrainer, code: Record) -> None:
    """Writes what a run is beside its checkpoints."""
    folder, data, told = trainer.folder, trainer.datamodule, trainer.description
    foreign_code.write_record(folder, code)  # Before the configuration, which makes it a run.
    write_atomically(folder / "config.yaml", told.text.encode())
    if data.images.value_range:  # Who uses the encoder later must read images in the same way.
        write_atomically(folder / VALUE_RANGE_FILE, json.dumps(data.images.value_range).encode())
    else:
        (folder / VALUE_RANGE_FILE).unlink(missing_ok=True)  # It is none of this run's.
    if data.clients:  # Real sites keep to themselves which images they own.
        dealt = {key: value for key, value in told.content.items() if key.startswith("partition.")}
        options = {key.removeprefix("partition."): value for key, value in dealt.items()}
        split_file.save(
            folder / "split.json",
            data.clients,
            fingerprint=data.images.fingerprint,
            options=options,
        )


def _is_ours(name: str) -> bool:
    """Whether a file may be in a folder that holds no run yet."""
    return name.startswith(".") or name == foreign_code.FILE


def _first_state(trainer: FederatedTrainer) -> GlobalState:
    """Freshly made weights, or those of the run that this one forks."""
    first, fork, folder = trainer.first_state(), str(trainer.fork), trainer.folder
    if (folder / FORK).exists() and (fork or not trainer.description.typed):
        state = _read_first(folder / FORK)
        _require_fitting(
            trainer,
            state,
            str(folder),
            instead=f"{trainer.description.write} {trainer.description.another()}",
        )
        return state
    if not fork:
        return first
    if not Checkpoints(Path(fork)).rounds():
        raise UserError(f"fork={fork} holds no checkpoint; it must be the folder of a run")
    found = read_run(Path(fork))
    _require_fitting(trainer, found[1], f"fork={fork}", instead="take the same backbone and method")
    trainer.note(f"starting from the weights of round {found[0].round} of {fork}")
    return found[1]


def _require_fitting(
    trainer: FederatedTrainer, state: GlobalState, where: str, instead: str
) -> None:
    """Raises a `UserError` if a state is not one of this model."""
    shapes, own = _shapes(state), _shapes(trainer.first_state())
    if differing := [name for name in own | shapes if shapes.get(name) != own.get(name)]:
        raise UserError(
            f"{where} has another network or method: its weights do not fit, e.g. {differing[0]}; {instead}"
        )


def _read_first(file: Path) -> GlobalState:
    """The weights that a run began with and that no checkpoint has yet; earlier versions wrote no checksum."""
    try:
        content, sums = file.read_bytes(), file.with_name(f"{file.name}.sha256")
        if sums.exists() and sums.read_text() != checksum(content):
            raise ValueError("it does not match its checksum")
        return GlobalState.from_tensors(parse_tensors(content))
    except DAMAGED as error:
        raise UserError(
            f"{file}, the weights that this run began with, is damaged ({error}); delete {file.parent}, which has no "
            f"finished round, to start anew"
        ) from error


def _require_space(trainer: FederatedTrainer) -> None:
    """Better no run than one that ends in its last hour."""
    folder, clients = trainer.folder, trainer.datamodule.clients
    weights, private = (
        size_of(trainer.first_state().tensors()),
        size_of(trainer.model.kept_tensors()),
    )
    # Kept rounds, the best and the one being written; pending updates; three private states of each client; the rest.
    rounds = trainer.keep + 2 + (trainer.num_sampled if clients else trainer.datamodule.num_clients)
    needed = weights * rounds + 3 * private * len(clients) + 50e6
    there = (file for file in folder.rglob("*.safetensors") if file.is_file())
    needed -= sum(file.stat().st_size for file in there)  # Some of it is there already.
    if (free := shutil.disk_usage(folder).free) < needed:
        problem = (
            f"has {free / 1e9:.2f} GB free, and this run needs about {needed / 1e9:.2f} GB; "
            f"free some space"
        )
        raise OptionError("default_root_dir", str(folder), problem, "{default_root_dir}=ANOTHER")


def _refuse_other_images(trainer: FederatedTrainer) -> None:
    """The keys may be the same and the images others: a folder that has grown, an edited split file."""
    data, clients = trainer.datamodule.images, trainer.datamodule.clients
    file = trainer.folder / "split.json"
    if not file.exists():
        return
    try:
        before = split_file.load(
            file, fingerprint=data.fingerprint, num_images=len(data.train.images)
        )
    except UserError:  # It speaks of `partition.file`, which the user did not give here.
        before = []
    if len(before) != len(clients) or not all(map(np.array_equal, before, clients)):
        raise UserError(
            f"{trainer.folder} holds a run on other images or with another split of the images; "
            f"{trainer.description.write} {trainer.description.another()}"
        )


def _refuse_other_code(trainer: FederatedTrainer, code: Record) -> None:
    """The same command may run a method that was edited since."""
    folder, told = trainer.folder, trainer.description
    before = foreign_code.read_record(folder)
    if before is None and not told.typed:
        before = Record()  # There is none if all of it is ours.
    if before is None and not code.modules:
        return
    if before is None:
        what = f"does not say which code trained it, and {foreign_code.describe([*code.modules])} may have changed"
    elif changed := foreign_code.differing(before.objects, code.objects):
        what = f"was trained with other objects: {', '.join(changed)} changed since"
    elif changed := foreign_code.differing(before.modules, code.modules):
        what = f"was trained with other code: {foreign_code.describe(changed)} changed since"
    else:
        return
    fork = _elsewhere(trainer, told.forking(folder))
    another = told.another(_named_by_hand(trainer))
    raise UserError(
        f"{folder} {what}; {told.write} {another} for a new run, {fork} for a new run from its "
        f"weights, or delete {folder}"
    )


def _refuse_other_settings(trainer: FederatedTrainer, before: dict[str, Any]) -> None:
    folder, told, after = trainer.folder, trainer.description, trainer.description.content
    differing = [key for key in before | after if before.get(key) != after.get(key)]
    if differing:
        changes = {told.setting(key): (before.get(key), after.get(key)) for key in differing[:5]}
        first = ", ".join(f"{name}: {old} -> {new}" for name, (old, new) in changes.items())
        fork = told.together(told.another(), told.forking(folder))
        raise UserError(
            f"{folder} holds a run of another config ({first}); {told.write} {told.another()}, "
            f"use the same values, or start a new run from its weights: {fork}"
        )
