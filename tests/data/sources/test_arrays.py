"""Arrays from Python: what a run records of them, and what can be done with that run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import silent
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
    """Images of two classes with a name that a user may give."""
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


def settings(folder: Path, *overrides: str) -> Config:
    return compose(
        [
            *("profile=cpu", "backbone.name=resnet10", "backbone.width=4", "backbone.stem=cifar"),
            *("federation.clients=2", "federation.rounds=1", "federation.epochs=1"),
            *("optim.batch_size=16", "evaluation.linear.epochs=2", "run.threads=1"),
            f"run.root={folder / 'runs'}",
            f"data.root={folder / 'data'}",
            *overrides,
        ]
    )


def fit(folder: Path, data: ImageData) -> FederatedTrainer:
    return fitted(settings(folder), Watching(), images=data, partition=CLIENTS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrays")


@pytest.fixture(scope="module")
def trained(home: Path) -> FederatedTrainer:
    return fit(home, images())


def test_the_run_says_what_the_arrays_are_and_the_encoder_knows_their_side(
    trained: FederatedTrainer,
) -> None:
    """It records neither CIFAR-10's mean and deviation nor an unused limit of the profile."""
    folder = trained.folder
    config = load(folder / "config.yaml")
    assert folder.name.startswith("arrays-simclr-cpu-")
    assert (config.data.name, config.data.image_size, config.data.limit) == ("arrays", SIDE, 0)
    assert (config.data.mean, config.data.std) == ([0.5] * 3, [0.25] * 3)
    encoder = Encoder.of(folder)
    assert (encoder.side, encoder.channels) == (SIDE, 3)
    assert encoder.mean.flatten().tolist() == [0.5] * 3
    assert main(["export", str(folder), "--to", "torch"]) == 0


def test_arrays_are_normalized_as_typed_and_may_be_gray(tmp_path: Path) -> None:
    data = images(channels=1)
    config = settings(tmp_path, "data.mean=[0.4]", "data.std=[0.1]")
    gray = made(config, images=data, partition=CLIENTS)
    assert (gray.config.data.mean, gray.config.data.std) == ([0.4], [0.1])
    pixels = next(gray.trainer.client_data(0, round_number=1).plain_batches())
    stored = torch.from_numpy(data.train.images[:24]).permute(0, 3, 1, 2)
    torch.testing.assert_close(pixels, (stored / 255 - 0.4) / 0.1, atol=1e-5, rtol=1e-5)
    usual = made(settings(tmp_path), images=data, partition=CLIENTS)
    assert usual.config.data.mean == [0.5]


def test_a_data_set_that_was_loaded_stays_what_it_is(tiny: list[str]) -> None:
    config = compose(tiny)
    data = sources.load(config.data, report=silent)
    loaded = made(config, images=data)
    assert loaded.config == config
    assert loaded.data.images.fingerprint == data.fingerprint


def test_evaluating_arrays_is_refused_at_once_and_works_in_python(
    home: Path, trained: FederatedTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is searched, fetched or written."""
    folder = trained.folder
    lines: list[str] = []
    assert main(["evaluate", str(folder), "knn"]) == 2
    error = capsys.readouterr().err
    assert (
        "was trained on arrays that were brought from Python, and no command can load them" in error
    )
    assert f"evaluate_run(Path('{folder}'), ['knn'], data=DATA)" in error
    with pytest.raises(UserError, match="arrays"):
        evaluate_run(folder, ["knn"], report=lines.append)
    assert lines == []
    assert not (home / "data").exists()
    assert not (folder / "evaluation").exists()
    results = evaluate_run(folder, ["knn", "geometry"], report=lines.append, data=images())
    assert results["knn"]["knn_top1"] == trained.history[-1]["knn_top1"]
    assert results["geometry"]["clients"] == 2
    with pytest.raises(UserError, match="trained on other images; give those as data"):
        evaluate_run(folder, ["knn"], report=lines.append, data=images(seed=1))


@pytest.mark.usefixtures("trained")
def test_a_run_on_other_arrays_is_another_run(home: Path) -> None:
    """The arrays count, whatever fingerprint the user gave them."""
    with pytest.raises(UserError, match="holds a run on other images"):
        fit(home, images(seed=1))
    assert fit(home, replace(images(), fingerprint="another name")).history


def test_no_command_loads_arrays(tmp_path: Path) -> None:
    options = made(settings(tmp_path), images=images(), partition=CLIENTS).config.data
    with pytest.raises(
        UserError, match=r"data\.name=arrays: these images came from Python.*evaluate_run"
    ):
        sources.load(options)
