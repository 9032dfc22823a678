"""Images that are brought from Python as arrays: what is recorded of them, and what can be done with their run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Watching, fitted, made

from fedx_pl.cli.evaluate import evaluate_run
from fedx_pl.cli.main import main
from fedx_pl.config.compose import compose, load
from fedx_pl.config.schema import Config
from fedx_pl.data import sources
from fedx_pl.data.images import ImageData, Split
from fedx_pl.data.partition import Given
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError
from fedx_pl.trainer import FederatedTrainer

SIDE = 24
CLIENTS = Given(clients=2, rows=(tuple(range(24)), tuple(range(24, 48))))


def images(seed: int = 0, channels: int = 3) -> ImageData:
    """Two classes; the name is one that the user may well give."""
    rng = np.random.default_rng(seed)
    labels = np.arange(60) % 2
    pixels = (
        rng.integers(0, 100, (60, SIDE, SIDE, channels)) + 150 * labels[:, None, None, None]
    ).astype(np.uint8)
    train, test = Split(pixels[:48], labels[:48]), Split(pixels[48:], labels[48:])
    return ImageData(
        name="cifar10",
        train=train,
        test=test,
        classes=("dark", "bright"),
        group_names=(),
        source="my scanner",
        fingerprint="mine",
    )


def settings(tmp_path: Path, *words: str) -> Config:
    return compose([
        "backbone.name=resnet10", "backbone.width=4", "federation.clients=2", "federation.rounds=1",
        "federation.epochs=1", "optim.batch_size=16", "evaluation.linear.epochs=2", "run.threads=1",
        f"run.root={tmp_path / 'runs'}", f"data.root={tmp_path / 'data'}", *words,
    ])  # fmt: skip


def run(tmp_path: Path, *words: str, data: ImageData | None = None) -> FederatedTrainer:
    return fitted(
        settings(tmp_path, *words), Watching(), images=data or images(), partition=CLIENTS
    )


def test_the_run_says_what_the_arrays_are_and_the_encoder_knows_their_side(tmp_path: Path) -> None:
    """Not CIFAR-10's mean and standard deviation, nor a limit of the profile that nobody applied."""
    folder = run(tmp_path, "profile=cpu", "backbone.stem=cifar").folder
    config = load(folder / "config.yaml")
    assert folder.name.startswith("arrays-simclr-cpu-")
    assert (config.data.name, config.data.image_size, config.data.limit) == ("arrays", SIDE, 0)
    assert (config.data.mean, config.data.std) == ([0.5] * 3, [0.25] * 3)
    encoder = Encoder.of(folder)
    assert (encoder.side, encoder.channels) == (SIDE, 3)
    assert encoder.mean.flatten().tolist() == [0.5] * 3
    assert main(["export", str(folder), "--to", "torch"]) == 0


def test_arrays_are_normalised_as_typed_and_may_be_gray(tmp_path: Path) -> None:
    words = settings(tmp_path, "data.mean=[0.4]", "data.std=[0.1]")
    gray = made(words, images=images(channels=1), partition=CLIENTS)
    assert (gray.config.data.mean, gray.config.data.std) == ([0.4], [0.1])
    pixels = next(gray.trainer.client_data(0, round_number=1).plain_batches())
    expected = (
        torch.from_numpy(images(channels=1).train.images[:24]).permute(0, 3, 1, 2) / 255 - 0.4
    ) / 0.1
    torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=1e-5)
    assert made(
        settings(tmp_path), images=images(channels=1), partition=CLIENTS
    ).config.data.mean == [0.5]


def test_a_data_set_that_was_loaded_stays_what_it_is(tiny: list[str]) -> None:
    config = compose(tiny)
    data = sources.load(config.data, report=lambda line: None)
    loaded = made(config, images=data)
    assert loaded.config == config
    assert loaded.data.images.fingerprint == data.fingerprint


def test_evaluating_arrays_is_refused_at_once_and_works_in_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is looked for, fetched or written."""
    result = run(tmp_path)
    folder, said = result.folder, list[str]()
    assert main(["evaluate", str(folder), "knn"]) == 2
    error = capsys.readouterr().err
    assert (
        "was trained on arrays that were brought from Python, and no command can load them" in error
    )
    assert f"evaluate_run(Path('{folder}'), ['knn'], data=DATA)" in error
    with pytest.raises(UserError, match="arrays"):
        evaluate_run(folder, ["knn"], report=said.append)
    assert said == []
    assert not (tmp_path / "data").exists()
    assert not (folder / "evaluation").exists()
    found = evaluate_run(folder, ["knn", "geometry"], report=said.append, data=images())
    assert found["knn"]["knn_top1"] == result.history[-1]["knn_top1"]
    assert found["geometry"]["clients"] == 2
    with pytest.raises(UserError, match="trained on other images; give those as data"):
        evaluate_run(folder, ["knn"], report=said.append, data=images(seed=1))


def test_a_run_on_other_arrays_is_another_run(tmp_path: Path) -> None:
    """Whatever fingerprint the user gave them."""
    run(tmp_path)
    with pytest.raises(UserError, match="holds a run on other images"):
        run(tmp_path, data=images(seed=1))
    again = run(tmp_path, data=replace(images(), fingerprint="another name"))
    assert again.history


def test_no_command_loads_arrays(tmp_path: Path) -> None:
    options = made(settings(tmp_path), images=images(), partition=CLIENTS).config.data
    with pytest.raises(
        UserError, match=r"data\.name=arrays: these images were brought from Python.*evaluate_run"
    ):
        sources.load(options)
