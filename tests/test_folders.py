"""Run folders that are damaged, forged, full of links, or on a full disk.

Commands never give a wrong result from them, and change nothing outside.

FEDX_FLIPS=2000 pytest -m slow tests/test_folders.py      # more than CI has time for
"""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Watching,
    bright_and_dark,
    fitted,
    silent,
    thin_model,
    tiny_federation,
    tiny_trainer,
)
from PIL import Image
from safetensors.torch import load_file, save

from fedx_pl import FederatedDataModule, FederatedTrainer
from fedx_pl.cli import main as cli
from fedx_pl.cli.evaluate import evaluate_run
from fedx_pl.config.compose import compose
from fedx_pl.data.images import ImageData
from fedx_pl.data.partition import IID
from fedx_pl.data.sources import of_arrays
from fedx_pl.encoder.embed import write_table
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.pending import UnfinishedRound
from fedx_pl.federation.round import RoundRecord, Update
from fedx_pl.files import lock, store, tensor_bytes
from fedx_pl.files.store import sums_of
from fedx_pl.methods.simclr import SimCLR

FLIPS = int(os.environ.get("FEDX_FLIPS", "100"))
BYOL = ("method=byol", "data.limit=90")  # has private states


@pytest.fixture(scope="module")
def words(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_federation(tiny_root, tmp_path_factory.mktemp("runs")), *BYOL]


@pytest.fixture(scope="module")
def finished(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted(
        compose([*words, f"run.dir={tmp_path_factory.mktemp('finished') / 'run'}"])
    ).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(2):
        Image.fromarray(np.full((32, 32, 3), 90 * i, np.uint8)).save(folder / f"{i}.png")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def forge(
    run: Path, change: Callable[[Any], Any], weights: Callable[[Any], Any] = lambda state: state
) -> None:
    """Changes the newest round as a stranger would, with matching checksums."""
    folder = run / "checkpoints" / "round_00002"
    shutil.rmtree(run / "checkpoints" / "best", ignore_errors=True)
    shutil.rmtree(run / "checkpoints" / "round_00001")
    forge_record(folder, change, weights)


def forge_record(
    folder: Path,
    change: Callable[[Any], Any],
    tensors: Callable[[Any], Any] = lambda tensors: tensors,
) -> None:
    """Changes a record, with matching checksums."""
    changed = change(json.loads((folder / "state.json").read_text()))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    content = save(tensors(load_file(folder / "global.safetensors")))
    files = {"global.safetensors": content, "state.json": text.encode()}
    for name, content in (files | {"SHA256SUMS": sums_of(files)}).items():
        (folder / name).unlink()
        (folder / name).write_bytes(content)


# --- links and devices ----------------------------------------------------------------------------

LINKS = (
    "evaluation/geometry.png",
    "encoder-torch.pt2",
    "evaluation",
    ".lock",
    "accuracy.png",
    "tensorboard",
    "clients",
    "checkpoints",
    "pending",
    "config.yaml",
    "split.json",
    "metrics.csv",
    "checkpoints/best",
    "checkpoints/round_00002/state.json",
    "anything",
)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_run_folder_is_refused_and_what_it_leads_to_stays(
    run: Path, words: list[str], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("events.out", "a.safetensors", "file", ".b.tmp"):
        (outside / file).write_text("somebody's")
    before, link = contents(outside), run / name
    directory = link.is_dir() or name == "pending"
    if link.exists():
        shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside if directory else outside / "file")
    shutil.copy(
        run.parent / "run" / "config.yaml", tmp_path / "config.yaml"
    ) if name != "config.yaml" else None
    for command in (
        ["evaluate", str(run), "knn"],
        ["export", str(run)],
        ["train", *words, f"run.dir={run}"],
    ):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert str(link) in error, (command, error)
    assert contents(outside) == before


@pytest.mark.parametrize(
    "name", [".lock", "evaluation/knn.json", "pending/00000/state.json", "pipe"]
)
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(
    run: Path, words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).parent.mkdir(exist_ok=True, parents=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in (
        ["evaluate", str(run), "knn"],
        ["export", str(run)],
        ["train", *words, f"run.dir={run}"],
    ):
        assert cli.main(command) == 2
        assert f"{run / name} is neither a file nor a folder" in capsys.readouterr().err


def test_a_link_to_a_run_folder_and_a_logger_s_links_are_fine(
    run: Path, words: list[str], tmp_path: Path
) -> None:
    """Weights & Biases keeps links in its own folder, which this package does not write to."""
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(run)
    assert cli.main(["export", str(tmp_path / "link"), "--to", "safetensors"]) == 0
    assert cli.main(["train", *words, f"run.dir={tmp_path / 'link'}"]) == 0


# --- the updates of an unfinished round -----------------------------------------------------------


class Interrupted(Watching):
    """Raises KeyboardInterrupt when the second client of a round is done."""

    def __init__(self, round_number: int) -> None:
        super().__init__()
        self.round_number = round_number

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        if record.number == self.round_number and update.client == 1:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two saved updates of its first round."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        fitted(compose([*words, f"run.dir={run}", "logger=[]"]), Interrupted(1))
    return run


def first_update(run: Path) -> Path:
    return run / "pending" / "00000"


def one_image_less(run: Path) -> None:
    file = first_update(run) / "state.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"num_images": values["num_images"] - 1}))


def another_shape(run: Path) -> None:
    """A well-formed record of a malformed update."""

    def other_shape(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        four_dimensional = (name for name, tensor in tensors.items() if tensor.ndim == 4)
        return tensors | {next(four_dimensional): torch.zeros(3)}

    forge_record(first_update(run), lambda values: values, other_shape)


def unknown_client(run: Path) -> None:
    shutil.copytree(first_update(run), run / "pending" / "00077")
    forge_record(run / "pending" / "00077", lambda values: values | {"client": 77})


def another_client(run: Path) -> None:
    """Puts the update of one client in the place of another."""
    shutil.rmtree(run / "pending" / "00001")
    shutil.copytree(first_update(run), run / "pending" / "00001")


def wrong_types(run: Path) -> None:
    wrong = {"metrics": [7], "loss_names": 3, "num_images": "5"}
    forge_record(first_update(run), lambda values: values | wrong)


def private_state(run: Path) -> None:
    """Damages private state; it is noticed at once, not when the client trains next."""
    file = run / "clients" / "00000_round_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def of_an_earlier_version(run: Path) -> None:
    """A journal and a file for each client."""
    for folder in list((run / "pending").iterdir()):
        values = json.loads((folder / "state.json").read_text())
        with open(run / "pending" / "journal.jsonl", "a") as journal:
            journal.write(json.dumps(values) + "\n")
        os.replace(folder / "global.safetensors", folder.with_suffix(".safetensors"))
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "damage",
    [
        one_image_less,
        another_shape,
        unknown_client,
        another_client,
        wrong_types,
        private_state,
        of_an_earlier_version,
    ],
)
def test_a_bad_record_of_an_unfinished_round_is_dropped_and_its_client_trains_again(
    words: list[str],
    finished: Path,
    interrupted: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    """The run ends bit-identical to one that was never interrupted."""
    config = compose([*words, f"run.dir={tmp_path / 'run'}", "logger=[]"])
    shutil.copytree(interrupted, tmp_path / "run")
    assert len(list((tmp_path / "run" / "pending").iterdir())) == 2
    damage(tmp_path / "run")
    fitted(config)
    for number in (1, 2):
        name = Path("checkpoints") / f"round_{number:05d}" / "global.safetensors"
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    assert contents(tmp_path / "run" / "clients") == contents(finished / "clients")


@pytest.mark.parametrize("name", ["state.json", "SHA256SUMS", "global.safetensors"])
def test_every_flip_of_a_saved_update_drops_it(
    interrupted: Path, tmp_path: Path, name: str
) -> None:
    run = Path(shutil.copytree(interrupted, tmp_path / "run"))
    file = first_update(run) / name
    content = file.read_bytes()
    draw = random.Random(0)
    assert [update.client for update, _ in UnfinishedRound(run).load(1)] == [0, 1]
    for _ in range(100):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        assert [update.client for update, _ in UnfinishedRound(run).load(1)] == [1]


# --- what the files beside the checkpoints say ----------------------------------------------------


def other_mean(run: Path) -> str:
    file = run / "config.yaml"
    text = file.read_text()
    number = re.search(r"mean:\n  - (0\.\d+)", text)
    assert number
    file.write_text(text.replace(number[1], number[1].replace("0.4", "0.5")))
    return "config.yaml (data.mean: "


def other_clients(run: Path) -> str:
    file = run / "split.json"
    split = json.loads(file.read_text())
    file.write_text(json.dumps(split | {"clients": split["clients"][::-1]}))
    return "split.json changed since round 2"


def no_split(run: Path) -> str:
    (run / "split.json").write_text("{")
    return "split.json is damaged"


@pytest.mark.parametrize("damage", [other_mean, other_clients, no_split])
def test_what_train_refuses_the_other_commands_refuse(
    run: Path,
    words: list[str],
    pictures: Path,
    tmp_path: Path,
    damage: Callable[[Path], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = damage(run)
    for command in (
        ["evaluate", str(run), "knn"],
        ["export", str(run)],
        ["embed", str(run), str(pictures), "-o", str(tmp_path / "a.npz")],
        [
            "neighbors",
            str(run),
            str(pictures / "0.png"),
            str(pictures),
            "-o",
            str(tmp_path / "a.html"),
        ],
    ):
        assert cli.main(command) == 2, command
        assert message in capsys.readouterr().err
    assert cli.main(["train", *words, f"run.dir={run}"]) == 2


def test_a_run_of_an_earlier_version_is_read_as_before(run: Path) -> None:
    """Such a run has no checksums of its other files."""
    other_mean(run)
    forge(
        run, lambda manifest: {key: value for key, value in manifest.items() if key != "described"}
    )
    assert cli.main(["export", str(run), "--to", "safetensors"]) == 0


@pytest.fixture(scope="module")
def images() -> ImageData:
    return of_arrays(bright_and_dark())


def fit_in_python(images: ImageData, run: Path) -> None:
    """Runs two rounds from Python objects."""
    data = FederatedDataModule(images, partition=IID(clients=2), batch_size=8)
    tiny_trainer(run, evaluation=None).fit(thin_model(SimCLR), data)


@pytest.fixture(scope="module")
def made_in_python(images: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("python") / "run"
    fit_in_python(images, run)
    return run


@pytest.mark.parametrize("damage", [other_mean, other_clients, no_split, None])
def test_other_files_are_refused_for_a_run_made_from_objects_too(
    made_in_python: Path, images: ImageData, tmp_path: Path, damage: Callable[[Path], str] | None
) -> None:
    run = Path(shutil.copytree(made_in_python, tmp_path / "run"))
    if damage is None:
        assert Encoder.of(run).channels == 3
        assert (
            evaluate_run(run, ["geometry"], report=silent, data=images)["geometry"]["clients"] == 2
        )
        return
    if damage is other_mean:
        (run / "config.yaml").write_text(
            (run / "config.yaml").read_text().replace("- 0.5\n", "- 0.4\n")
        )
    message = "config.yaml (data.mean: " if damage is other_mean else damage(run)
    with pytest.raises(UserError, match=re.escape(message)):
        Encoder.of(run)
    with pytest.raises(UserError, match=re.escape(message)):
        evaluate_run(run, ["geometry"], report=silent, data=images)


def test_the_first_weights_of_a_run_made_from_objects_have_a_checksum(
    made_in_python: Path, images: ImageData, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(made_in_python, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")  # It was interrupted in its first round.
    file = run / "fork" / "global.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"fork, the weights that this run began with, is damaged"):
        fit_in_python(images, run)


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copy", ["round_backup_of_4", "round_00001_my_backup", "round_9", "round_000099"]
)
def test_a_copy_among_the_checkpoints_is_neither_read_nor_deleted(
    run: Path, words: list[str], copy: str
) -> None:
    """Only folders named ``round_`` and five digits belong to the run."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "round_00001", checkpoints / copy)
    assert Checkpoints(run).rounds() == [1, 2]
    assert Checkpoints(run).latest(mend=False)[0].round == 2
    assert cli.main(["export", str(run), "--to", "safetensors"]) == 0
    exported, newest = (
        load_file(run / "encoder-safetensors.safetensors"),
        load_file(run / "encoder.safetensors"),
    )
    assert all(torch.equal(exported[name], newest[name]) for name in newest)
    Checkpoints(run, keep=1).clear()
    assert (checkpoints / copy / "state.json").exists()
    assert cli.main(["train", *words, f"run.dir={run}"]) == 0
    assert (checkpoints / copy / "state.json").exists()


def test_a_round_that_training_replaces_while_it_is_read_is_not_called_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reading = store.read_bytes, []

    def read(path: Path) -> bytes:
        if path.name == "state.json" and not reading:
            reading.append(path)
            state, weights = Checkpoints(run).read(1)
            state.round = 3
            state.rows[-1]["round"] = 3
            Checkpoints(run, keep=1).commit(state, weights)
        return real(path)

    monkeypatch.setattr(store, "read_bytes", read)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Checkpoints(run).latest(mend=False)
    assert reading[0].parent.name == "round_00002"
    assert found[0].round == 3


@pytest.mark.parametrize("name", ["best", "round_00001"])
def test_damage_of_an_older_round_is_warned_about_and_repaired(
    run: Path, words: list[str], name: str
) -> None:
    folder = run / "checkpoints" / name
    content = bytearray((folder / "global.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "global.safetensors").unlink()  # The round and the best share it.
    (folder / "global.safetensors").write_bytes(content)
    with pytest.warns(UserWarning, match=rf"{name} is damaged \(its files do not match"):
        assert Encoder.of(run)
    with pytest.warns(UserWarning, match=rf"{name} is damaged"):
        fitted(compose([*words, f"run.dir={run}"]))
    assert (run / "checkpoints" / f"damaged_{name}").is_dir()
    assert folder.is_dir() == (name == "best")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Encoder.of(run)


# --- forged states --------------------------------------------------------------------------------


def changed(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | values


def in_rows(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | {"rows": [row | values for row in manifest["rows"]]}


def of_client(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: (
        manifest
        | {"clients": {client: record | values for client, record in manifest["clients"].items()}}
    )


def of_callback(key: str, **values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | {"callbacks": manifest["callbacks"] | {key: values}}


FORGED: dict[str, Callable[[Any], Any]] = {
    "a list": lambda manifest: [manifest],
    "nothing": lambda _: {},
    "deep": lambda _: "[" * 50_000,
    "a huge number": lambda _: '{"round": ' + "9" * 5000 + "}",
    "deep rows": lambda manifest: json.dumps(manifest).replace(
        '"rows": [', '"rows": [' + "[" * 40_000, 1
    ),
    "text round": changed(round="2"),
    "another round": changed(round=7),
    "negative round": changed(round=-1),
    "large round": changed(round=10**30),
    "rows of text": changed(rows=["a"]),
    "rows missing": lambda manifest: {
        key: value for key, value in manifest.items() if key != "rows"
    },
    "rows without round": changed(rows=[{"loss": 1.0}]),
    "text loss": in_rows(loss="x", round_seconds="x"),
    "text accuracy": in_rows(knn_top1="x", linear_top1=[]),
    "large accuracy": in_rows(linear_top1=10**400),
    "untrained text": changed(untrained="x"),
    "untrained of text": changed(untrained={"knn_top1": "x"}),
    "seconds": changed(seconds="x"),
    "infinite seconds": changed(seconds=float("inf")),
    "clients": changed(clients=[1]),
    "client names": changed(clients={"x": {}}),
    "client record": of_client(more=1),
    "client types": of_client(last_round="1", bytes=None),
    "large client": of_client(last_round=10**300),
    "another file": of_client(sha256="../../x", bytes=0),
    "callbacks": changed(callbacks=[]),
    "callback state": changed(callbacks={"Dashboard": 7, "Health": [1]}),
    "quarantine": of_callback("Quarantine", strikes={"x": "y"}),
    "strikes": of_callback("Quarantine", strikes={"0": "y"}),
    "event files": of_callback("Dashboard", files={"events.out": "x"}, custom=[[1]]),
    "event lengths": of_callback("Dashboard", files={"../config.yaml": -5}, custom=7),
    "alarms": of_callback("Health", alarms=7),
    "config": changed(config=7),
    "described": changed(described=7),
    "description": changed(described={"config.yaml": 7}),
    "descriptions": changed(described={"config.yaml": {}, "split.json": [[[]]]}),
}


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_state_ends_in_a_clean_error(
    run: Path, words: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checksums match; a command may accept a part that it does not need."""
    forge(run, FORGED[kind])
    for command in (
        ["export", str(run), "--to", "safetensors"],
        ["train", *words, f"run.dir={run}"],
    ):
        assert cli.main(command) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_weights_of_another_network_end_in_a_clean_error(
    run: Path, words: list[str], command: str
) -> None:
    forge(run, lambda manifest: manifest, lambda _: {"w": torch.zeros(3)})
    arguments = (
        ["train", *words, f"run.dir={run}"] if command == "train" else ["evaluate", str(run), "knn"]
    )
    assert cli.main(arguments) == 2


def test_weights_that_are_not_finite_are_not_exported(
    run: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "backbone.conv1.weight"
    forge(
        run,
        lambda manifest: manifest,
        lambda weights: weights | {name: torch.full_like(weights[name], np.nan)},
    )
    for command in (["export", str(run)], ["embed", str(run), str(pictures), "-o", "a.npz"]):
        assert cli.main(command) == 2
        assert f"{name} of round 2 has values that are not finite" in capsys.readouterr().err
    assert not list(run.glob("encoder-*"))


# --- flips of every file --------------------------------------------------------------------------


def results(run: Path) -> list[Any]:
    """Encoder, accuracy and geometry.

    None for what is refused, or what a warning reports as from another round.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[Any] = []
        for measure in (
            lambda: tensor_bytes(Encoder.of(run).state_dict()),
            lambda: evaluate_run(run, ["knn"], report=silent),
            lambda: evaluate_run(run, ["geometry"], report=silent),
        ):
            try:
                found.append(measure())
            except UserError:
                found.append(None)
    shutil.rmtree(run / "evaluation", ignore_errors=True)
    return (
        [None] * len(found)
        if any("is damaged" in str(warning.message) for warning in caught)
        else found
    )


def test_no_flip_of_a_bit_that_decides_gives_another_result(run: Path) -> None:
    """Flips bits in the files that export reads, except the images."""
    draw = random.Random(1)
    expected = Encoder.of(run)
    names = ["config.yaml", "split.json"]
    names += [
        str(file.relative_to(run))
        for file in sorted((run / "checkpoints").rglob("*"))
        if file.is_file()
    ]
    for name in names * 2:
        file = run / name
        whole, content = file.read_bytes(), bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.unlink()
        file.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = Encoder.of(run, 2)
            except UserError:
                continue
            finally:
                file.write_bytes(whole)
        assert all(map(torch.equal, found.state_dict().values(), expected.state_dict().values())), (
            name
        )


@pytest.mark.slow
def test_no_flip_of_any_file_gives_another_result(run: Path) -> None:
    """A flip is refused, warned about, or has no effect."""
    draw, usual = random.Random(0), results(run)
    assert None not in usual
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    whole = {path: path.read_bytes() for path in files}
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = bytearray(whole[path])
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.unlink()
        path.write_bytes(content)
        for found, expected in zip(results(run), usual, strict=True):
            assert found is None or found == expected, path
        path.write_bytes(whole[path])


# --- disks, locks and folders that go away --------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("to", ["safetensors", "torch", "onnx"])
def test_a_full_disk_leaves_the_encoder_that_was_exported_before(
    run: Path,
    tmp_path: Path,
    to: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs ONNX: pip install -e '.[onnx]'")
    file = tmp_path / "out" / f"a.{to}"
    file.parent.mkdir()
    file.write_text("earlier")
    monkeypatch.setattr("os.fsync", full)
    assert cli.main(["export", str(run), "--to", to, "-o", str(file)]) == 2
    assert "No space left on device; free some space" in capsys.readouterr().err
    assert contents(file.parent) == {file.name: b"earlier"}


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_a_full_disk_leaves_the_table_that_was_embedded_before(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[tables]'")
    file = tmp_path / f"a.{suffix}"
    file.write_text("earlier")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_table(file, ["a", "b"], torch.zeros(2, 3))
    assert contents(tmp_path) == {file.name: b"earlier"}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_a_file_that_may_not_grow_leaves_the_earlier_one(
    run: Path, tmp_path: Path, to: str
) -> None:
    """Simulates a full disk in a separate process, which torch's own writers would abort."""
    if to == "onnx":
        pytest.importorskip("onnxscript", reason="needs ONNX: pip install -e '.[onnx]'")
    (tmp_path / "a").write_text("earlier")
    code = (
        "import resource, sys; from fedx_pl.cli.main import main; import torch.export\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main())"
    )
    words = ["export", str(run), "--to", to, "-o", str(tmp_path / "a")]
    found = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2, found.stderr
    assert "free some space" in found.stderr
    assert (tmp_path / "a").read_text() == "earlier"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB, if mounting is allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_run_that_fills_its_disk_ends_in_one_line_and_resumes_when_there_is_room(
    words: list[str], finished: Path, small_disk: Path
) -> None:
    """There is room for the run when it starts; then another program takes it."""
    run = small_disk / "run"
    code = (
        "import os, sys; from pathlib import Path; from fedx_pl.cli.main import main\n"
        "from fedx_pl.callbacks.metrics import MetricsFiles as M\n"
        "def fill(self, trainer, record, saved=M.on_round_saved):\n"
        "    saved(self, trainer, record)\n"
        f"    with open({str(small_disk / 'other')!r}, 'wb') as other:\n"
        "        try:\n"
        "            while True: other.write(bytes(4096)); other.flush()\n"
        "        except OSError: pass\n"
        "M.on_round_saved = fill\n"
        "sys.exit(main())"
    )
    command = ["train", *words, f"run.dir={run}"]
    full = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    assert full.returncode == 2, full.stderr
    (line,) = full.stderr.splitlines()
    assert "No space left on device" in line
    assert "free some space" in line
    (small_disk / "other").unlink()
    assert cli.main(command) == 0
    name = Path("checkpoints") / "round_00002" / "global.safetensors"
    assert (run / name).read_bytes() == (finished / name).read_bytes()


def test_a_device_is_not_replaced_and_a_missing_folder_is_named(
    run: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    for command in (["export", str(run), "-o"], ["embed", str(run), str(pictures), "-o"]):
        assert cli.main([*command, str(tmp_path / "pipe.npz")]) == 2
        assert "pipe.npz is not a file" in capsys.readouterr().err
        assert cli.main([*command, str(tmp_path / "nowhere" / "a.npz")]) == 2
        assert (
            f"there is no folder {tmp_path / 'nowhere'}; make it first" in capsys.readouterr().err
        )
    assert (tmp_path / "pipe.npz").is_fifo()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_that_cannot_lock_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", cannot)
    with pytest.warns(
        UserWarning, match=r"cannot lock files \(No locks available\): a second process that trains"
    ):
        lock(tmp_path).close()


def test_a_lock_does_not_truncate_a_file(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    lock(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == "mine"


class Deleted(Watching):
    """Deletes the run folder when a client is done, or when the round is."""

    def __init__(self, client: int | None) -> None:
        super().__init__()
        self.client = client

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        if update.client == self.client:
            shutil.rmtree(trainer.folder)

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        if self.client is None:
            shutil.rmtree(trainer.folder)


@pytest.mark.parametrize("client", [1, 2, None])
@pytest.mark.parametrize("logger", ["[]", "[tensorboard]"])
def test_a_run_folder_that_is_deleted_during_training_is_reported_and_not_made_again(
    words: list[str], tmp_path: Path, client: int | None, logger: str
) -> None:
    config = compose([*words, f"run.dir={tmp_path / 'run'}", f"logger={logger}"])
    with pytest.raises(
        UserError, match=r"run was deleted or moved while it was trained in.*start again"
    ):
        fitted(config, Deleted(client))
    assert not (tmp_path / "run").exists()


def test_a_stray_range_of_values_does_not_become_the_run_s(run: Path, words: list[str]) -> None:
    """The images have 8 bits, so their range of values cannot be chosen later."""
    (run / "value_range.json").write_text("[0, 65535]")
    with pytest.raises(UserError, match=r"value_range.json changed since"):
        Encoder.of(run)
    assert cli.main(["train", *words, f"run.dir={run}"]) == 0
    assert Encoder.of(run).value_range is None


def test_a_received_run_does_not_choose_where_decoded_copies_are_written(
    run: Path, tiny_root: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tiny_root / "cifar-10-binary.tar.gz", elsewhere)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(f"root: {tiny_root}", f"root: {elsewhere}"))
    assert cli.main(["evaluate", str(run), "knn"]) == 0
    assert [file.name for file in elsewhere.iterdir()] == ["cifar-10-binary.tar.gz"]
