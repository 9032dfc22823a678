"""Each make target is one line of overrides that composes and trains a step."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from fedx_pl.config.build import make_model
from fedx_pl.config.compose import compose
from fedx_pl.data.augment import Augment
from fedx_pl.data.batches import ClientData, ImageStore
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import GlobalState, RoundContext

ROOT = Path(__file__).parents[1]
DATA = {"cifar10": (32, 3), "svhn": (32, 3), "fmnist": (28, 1), "imagenet10": (64, 3)}
METHODS = ("simclr", "moco", "byol", "protocl", "fedu")
TARGETS = [f"{d}-{m}{x}" for d in DATA for m in METHODS for x in ("", "-fedx")]


@pytest.fixture(scope="session")
def commands() -> dict[str, list[str]]:
    """What make would run for each target, without running it."""
    if shutil.which("make") is None:
        pytest.skip("needs make: apt-get install make")
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/installed", *TARGETS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "fedx-pl train" in line]
    assert len(lines) == len(TARGETS)
    return dict(
        zip(TARGETS, (line.split("fedx-pl train ")[1].split() for line in lines), strict=True)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_composes_and_trains_one_step(target: str, commands: dict[str, list[str]]) -> None:
    overrides = commands[target]
    full = compose([*overrides, "profile=paper"])
    assert f"{full.data.name}-{full.method.name}" + ("-fedx" if full.fedx.enabled else "") == target
    assert (full.federation.epochs, full.federation.clients, full.backbone.name) == (
        10,
        10,
        "resnet18",
    )

    side, channels = DATA[full.data.name]
    config = compose(
        [*overrides, f"backbone.width={4 if side <= 32 else 16}", "optim.batch_size=16"]
    )
    pixels = np.random.default_rng(0).integers(0, 256, (16, side, side, channels), dtype=np.uint8)
    model = make_model(config, channels=channels, image_size=side)
    relation = config.relation_size if model.relation_batch else 0
    size = min(config.augment.size, side)
    augment = Augment(
        type(config.augment)(**{**vars(config.augment), "size": size}),
        config.data.mean,
        config.data.std,
    )
    store = ImageStore(pixels, torch.device("cpu"), 10**9)
    data = ClientData(
        store=store,
        index=torch.arange(16),
        augment=augment,
        batch_size=16 - relation,
        relation_size=relation,
        seed=0,
    )
    context = RoundContext(
        round=1,
        rounds=config.federation.rounds,
        epochs=1,
        seed=0,
        global_state=GlobalState(weights=model.shared_state()),
        batchnorm=config.federation.batchnorm,
    )
    update = LocalTrainer(model, device=torch.device("cpu"), precision="32-true").run(
        context, client=0, data=data, memory=None
    )
    assert update.losses.isfinite().all()
    assert len(update.losses) == (2 if relation else 1)


@pytest.mark.usefixtures("commands")  # Which needs make, too.
def test_help_lists_every_target() -> None:
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for word in ("DATA-METHOD[-fedx]", *DATA, *METHODS, "make test", "make tensorboard", "PROFILE"):
        assert word in text
