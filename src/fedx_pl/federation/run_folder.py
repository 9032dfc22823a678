"""Opening a run folder: a new run, one to resume, or one that is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from fedx_pl.data import split_file
from fedx_pl.data.images import VALUE_RANGE_FILE
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoint, Checkpoints
from fedx_pl.federation.content import decisive, flat
from fedx_pl.federation.identity import code_record
from fedx_pl.federation.pending import UnfinishedRound
from fedx_pl.federation.round import GlobalState
from fedx_pl.federation.run_state import DAMAGED, RunState
from fedx_pl.files import checksum, clear_unfinished, lock, size_of, tensor_bytes, write_atomically
from fedx_pl.files.reading import read_json, read_yaml
from fedx_pl.files.store import TENSORS, load_record, save_record
from fedx_pl.options import OptionError
from fedx_pl.printing import byte_size
from fedx_pl.provenance import foreign_code
from fedx_pl.provenance.foreign_code import Record

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

FORK = "fork"  # a record of first weights that cannot be made again
_SHOWN_KEYS = 5  # differing settings in a message


def open_run(trainer: FederatedTrainer) -> tuple[IO[str], Checkpoint]:
    """Makes a run's folder ready to write to.

    Args:
        trainer: with model and images; its folder may hold an earlier part of the run.

    Returns:
        The lock, which keeps other processes out until it is closed; the checkpoint to start from.

    Raises:
        UserError: the folder holds another run, another process trains in it, or the disk is full.
    """
    folder = trainer.folder
    identity = trainer.description
    code = code_record(trainer, trainer.model, trainer.datamodule)
    _refuse_other_run(trainer, code)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_lock = lock(folder)
        clear_unfinished(folder)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error}); {identity.write} {identity.another()}"
        ) from error
    try:
        latest = trainer.checkpoints.latest()
        if latest is None or latest[0].round < trainer.max_rounds:
            _require_space(trainer)
        if latest is not None:
            _require_same_run(trainer, latest)
        checkpoint = latest or (RunState(), _first_state(trainer))
        if latest is None and (foreign_code.read_record(folder) or Record()) != code:
            UnfinishedRound(folder).clear()  # Updates of a first round that other code began.
        _describe(trainer, code)
        trainer.described = describe(folder)
        if latest is None and (trainer.fork or not identity.typed) and not (folder / FORK).exists():
            # The forked run may train on before this one has a checkpoint, and weights that were
            # made in Python are different in the next process.
            save_record(folder / FORK, checkpoint[1].tensors(), {})
    except BaseException:
        folder_lock.close()
        raise
    if latest is not None:
        _note_resumed(trainer, latest[0].round)
    return folder_lock, checkpoint


def read_run(folder: Path, round_number: int | None = None) -> Checkpoint:
    """The checkpoint of a run that is only read; what `open_run` would refuse is refused.

    Args:
        folder: the run folder; another process may train there.
        round_number: a round whose checkpoint was kept; the newest one if not given.

    Raises:
        UserError: there is no such round, or the files beside it are not those that it was trained
            with.
    """
    checkpoints = Checkpoints(folder)
    checkpoint = (
        checkpoints.latest(mend=False) if round_number is None else checkpoints.read(round_number)
    )
    if checkpoint is None:
        kept = "all its rounds are damaged" if checkpoints.rounds() else "it has no finished round"
        raise UserError(
            f"{folder}: {kept}; type fedx-pl train run.dir={folder} and the run's own keys"
        )
    state = checkpoint[0]
    if state.described is not None:
        _require_described(folder, state.round, state.described)
    return checkpoint


def describe(folder: Path) -> dict[str, Any]:
    """Summarizes the files beside the checkpoints; each checkpoint keeps the summary."""
    return {
        "config.yaml": _settings(folder / "config.yaml"),
        "split.json": _sum_of(folder / "split.json", "fingerprint", "clients"),
        VALUE_RANGE_FILE: _sum_of(folder / VALUE_RANGE_FILE),
        foreign_code.FILE: _sum_of(folder / foreign_code.FILE),
    }


def _settings(file: Path) -> dict[str, Any]:
    """The settings that decide the result, by key; others may differ when a run is resumed."""
    try:
        settings: dict[str, Any] = json.loads(json.dumps(flat(decisive(read_yaml(file)))))
        return settings
    except DAMAGED as error:
        raise UserError(f"{file} is not a readable run configuration ({error})") from error


def _sum_of(file: Path, *keys: str) -> str:
    """The checksum of a JSON file's content, or of some keys of it; empty if there is no file."""
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


def _require_described(folder: Path, round_number: int, described: dict[str, Any]) -> None:
    now = describe(folder)
    settings = now.pop("config.yaml")
    before = described.get("config.yaml")
    before = before if isinstance(before, dict) else {}
    moved = ("fedca.base", "fork")  # folders of other runs
    differing = [key for key in _differing(before, settings) if key not in moved]
    # A run without a record of its code is still read, with a note where that matters.
    changed = [
        name
        for name, sums in now.items()
        if sums != described.get(name) and (sums or name != foreign_code.FILE)
    ]
    if differing:
        changed.insert(0, f"config.yaml ({_changes(before, settings, differing)})")
    if changed:
        raise UserError(
            f"{folder}: {', '.join(changed)} changed since round {round_number} was trained, or is "
            f"damaged; put the old one back"
        )


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before | after if before.get(key) != after.get(key)]


def _changes(
    before: dict[str, Any],
    after: dict[str, Any],
    keys: list[str],
    spelled: Callable[[str], str] = str,
) -> str:
    shown = keys[:_SHOWN_KEYS]
    return ", ".join(f"{spelled(key)}: {before.get(key)} -> {after.get(key)}" for key in shown)


def _note_resumed(trainer: FederatedTrainer, round_number: int) -> None:
    folder = trainer.folder
    identity = trainer.description
    rounds = f"{round_number} of {trainer.max_rounds}"
    if round_number < trainer.max_rounds:
        trainer.note(f"resuming after round {rounds}, from {folder}")
    else:
        more_rounds = f"{identity.key('max_rounds')}={2 * round_number}"
        more = identity.together(more_rounds, identity.forking(folder))
        trainer.note(
            f"this run is finished, with {rounds} rounds in {folder}; to train on, "
            f"{identity.write} {_elsewhere(trainer, more)}"
        )
    if not identity.typed and _began_otherwise(trainer):
        warnings.warn(
            f"{folder} began with other first weights than this model has, which are not used; "
            f"{identity.another()} starts a new run from them",
            stacklevel=5,
        )


def _shapes(state: GlobalState) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors().items()}


def _began_otherwise(trainer: FederatedTrainer) -> bool:
    """Whether a run that was made in Python began with other weights than the model has now."""
    file = trainer.folder / FORK / TENSORS
    return file.exists() and file.read_bytes() != tensor_bytes(trainer.first_state().tensors())


def _elsewhere(trainer: FederatedTrainer, overrides: str) -> str:
    """Overrides for a new run, and another folder if this one was named by hand."""
    identity = trainer.description
    if _named_by_hand(trainer):
        return identity.together(identity.another(), overrides)
    return overrides


def _named_by_hand(trainer: FederatedTrainer) -> bool:
    return trainer.default_root_dir is not None and not trainer.description.names_folder


def _describe(trainer: FederatedTrainer, code: Record) -> None:
    """Writes what a run is beside its checkpoints."""
    folder = trainer.folder
    data = trainer.datamodule
    identity = trainer.description
    foreign_code.write_record(folder, code)  # Before the configuration, which makes it a run.
    write_atomically(folder / "config.yaml", identity.text.encode())
    if data.images.value_range:  # Whoever uses the encoder must read images in the same way.
        write_atomically(folder / VALUE_RANGE_FILE, json.dumps(data.images.value_range).encode())
    else:
        (folder / VALUE_RANGE_FILE).unlink(missing_ok=True)  # It belongs to another run.
    if data.clients:  # Real sites do not share which images they own.
        prefix = "partition."
        options = {
            key.removeprefix(prefix): value
            for key, value in identity.content.items()
            if key.startswith(prefix)
        }
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
    fork = str(trainer.fork)
    saved = trainer.folder / FORK
    if saved.exists() and (fork or not trainer.description.typed):
        state = _read_first(saved)
        _require_fitting(trainer, state)
        return state
    if not fork:
        return trainer.first_state()
    if not Checkpoints(Path(fork)).rounds():
        raise UserError(f"fork={fork} holds no checkpoint; it must be the folder of a run")
    run_state, state = read_run(Path(fork))
    _require_fitting(trainer, state, f"fork={fork}", instead="use the same backbone and method")
    trainer.note(f"starting from the weights of round {run_state.round} of {fork}")
    return state


def _require_same_run(trainer: FederatedTrainer, checkpoint: Checkpoint) -> None:
    run_state, state = checkpoint
    if run_state.config not in ("", trainer.description.hash):
        raise UserError(
            f"the newest checkpoint in {trainer.folder} is of another run; "
            f"{trainer.description.write} {trainer.description.another()}"
        )
    _require_fitting(trainer, state)


def _require_fitting(
    trainer: FederatedTrainer, state: GlobalState, where: str = "", instead: str = ""
) -> None:
    """Raises a `UserError` if a state is not one of this model.

    Args:
        trainer: with the model.
        state: that was read.
        where: it was read from; the run folder if not given.
        instead: what to do; to choose another run folder if not given.
    """
    shapes = _shapes(state)
    expected = _shapes(trainer.first_state())
    if differing := _differing(expected, shapes):
        identity = trainer.description
        instead = instead or f"{identity.write} {identity.another()}"
        raise UserError(
            f"{where or trainer.folder} has another network or method: its weights do not fit, "
            f"e.g. {differing[0]}; {instead}"
        )


def _read_first(folder: Path) -> GlobalState:
    """The weights that a run began with and that no checkpoint has yet."""
    try:
        return GlobalState.from_tensors(load_record(folder)[0])
    except DAMAGED as error:
        raise UserError(
            f"{folder}, the weights that this run began with, is damaged ({error}); delete "
            f"{folder.parent}, which has no finished round, to start again"
        ) from error


def _require_space(trainer: FederatedTrainer) -> None:
    """Raises a `UserError` if the disk is too full for the whole run."""
    folder = trainer.folder
    clients = trainer.datamodule.clients
    weights = size_of(trainer.first_state().tensors())
    private = size_of(trainer.model.kept_tensors())
    # Kept rounds, the best and the one being written; pending updates; three private states of each
    # client; the rest.
    rounds = trainer.keep + 2 + (trainer.num_sampled if clients else trainer.datamodule.num_clients)
    needed = weights * rounds + 3 * private * len(clients) + 50e6
    saved = (file for file in folder.rglob("*.safetensors") if file.is_file())
    needed -= sum(file.stat().st_size for file in saved)
    if (free := shutil.disk_usage(folder).free) < needed:
        problem = (
            f"has {byte_size(free)} free, and this run needs about {byte_size(needed)}; "
            f"free some space"
        )
        raise OptionError("default_root_dir", str(folder), problem, "{default_root_dir}=ANOTHER")


def _refuse_other_run(trainer: FederatedTrainer, code: Record) -> None:
    """Raises a `UserError` if the folder holds something that is not this run."""
    folder = trainer.folder
    identity = trainer.description
    config = folder / "config.yaml"
    if config.exists():
        if not trainer.resume:
            resume = "resume=auto" if identity.typed else "resume=True"
            raise UserError(
                f"{folder} holds a run already; {identity.write} {identity.another()}, "
                f"or {resume} to resume it"
            )
        _refuse_other_settings(trainer, identity.read(config))
        _refuse_other_images(trainer)
        if trainer.checkpoints.rounds():
            _refuse_other_code(trainer, code)
    elif folder.is_dir() and any(not _is_ours(item.name) for item in folder.iterdir()):
        key = identity.key("default_root_dir")
        raise UserError(
            f"{key}={folder} is not empty and holds no run; {identity.write} {identity.another()}"
        )


def _refuse_other_images(trainer: FederatedTrainer) -> None:
    """Refuses other images under the same keys: a folder that has grown, an edited split file."""
    images = trainer.datamodule.images
    clients = trainer.datamodule.clients
    file = trainer.folder / "split.json"
    if not file.exists():
        return
    try:
        before = split_file.load(
            file, fingerprint=images.fingerprint, num_images=len(images.train.images)
        )
    except UserError:  # Its message names `partition.file`, which the user did not give here.
        before = []
    if len(before) != len(clients) or not all(map(np.array_equal, before, clients)):
        raise UserError(
            f"{trainer.folder} holds a run on other images or with another split of the images; "
            f"{trainer.description.write} {trainer.description.another()}"
        )


def _refuse_other_code(trainer: FederatedTrainer, code: Record) -> None:
    """Refuses a method that was edited since the run was trained."""
    folder = trainer.folder
    identity = trainer.description
    before = foreign_code.read_record(folder)
    if before is None and not identity.typed:
        before = Record()  # A run of our own code alone has no record.
    if before is None and not code.modules:
        return
    if before is None:
        modules = foreign_code.describe([*code.modules])
        what = f"does not say which code trained it, and {modules} may have changed"
    elif changed := foreign_code.differing(before.objects, code.objects):
        what = f"was trained with other objects: {', '.join(changed)} changed since"
    elif changed := foreign_code.differing(before.modules, code.modules):
        what = f"was trained with other code: {foreign_code.describe(changed)} changed since"
    else:
        return
    fork = _elsewhere(trainer, identity.forking(folder))
    another = identity.another(_named_by_hand(trainer))
    raise UserError(
        f"{folder} {what}; {identity.write} {another} for a new run, {fork} for a new run from its "
        f"weights, or delete {folder}"
    )


def _refuse_other_settings(trainer: FederatedTrainer, before: dict[str, Any]) -> None:
    folder = trainer.folder
    identity = trainer.description
    if differing := _differing(before, identity.content):
        changes = _changes(before, identity.content, differing, spelled=identity.setting)
        fork = identity.together(identity.another(), identity.forking(folder))
        raise UserError(
            f"{folder} holds a run of another config ({changes}); {identity.write} "
            f"{identity.another()}, use the same values, or start a new run from its weights: "
            f"{fork}"
        )
