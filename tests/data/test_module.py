"""FederatedDataModule: from names, arrays and data sets; for a federation and for a plain Trainer."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers import make_model
from torch.utils.data import Dataset

from fedx_pl import FedXMixin, FedXOptions
from fedx_pl.config.compose import compose
from fedx_pl.data.images import DataOptions
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.data.partition import IID, Dirichlet
from fedx_pl.data.sources.named import STATISTICS
from fedx_pl.errors import UserError
from fedx_pl.methods import BUILT_IN, BYOL, ProtoCL, SimCLR

IMAGES = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
LABELS = np.arange(48) % 4
CPU = torch.device("cpu")


def trainer(epochs: int = 1) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip


def test_a_named_set_is_loaded_and_dealt(tiny_root: Path) -> None:
    options = DataOptions(name="cifar10", root=str(tiny_root), verify=False, download=False)
    data = FederatedDataModule(options, partition=Dirichlet(clients=4, beta=0.5), seed=3)
    data.setup()
    assert data.num_clients == 4
    assert np.array_equal(np.sort(np.concatenate(data.clients)), np.arange(240))
    again = FederatedDataModule(options, partition=Dirichlet(clients=4, beta=0.5), seed=3)
    again.setup()
    assert all(map(np.array_equal, data.clients, again.clients))


def test_the_means_of_named_sets_are_those_of_the_configuration() -> None:
    for name, (mean, std) in STATISTICS.items():
        options = compose([f"data={name}"]).data
        assert (tuple(options.mean), tuple(options.std)) == (mean, std)


def test_a_client_s_batches_depend_on_seed_round_and_client_only() -> None:
    data = FederatedDataModule((IMAGES, LABELS), partition=IID(clients=2), batch_size=8)
    data.setup()
    model = make_model(SimCLR)

    def first(**changed: int) -> torch.Tensor:
        asked = {"client": 0, "seed": 0, "round_number": 1} | changed
        return next(data.client(asked.pop("client"), model=model, device=CPU, **asked).epoch(0)).stacked

    assert torch.equal(first(), first())
    for changed in ({"client": 1}, {"seed": 1}, {"round_number": 2}):
        assert not torch.equal(first(), first(**changed))


@pytest.mark.parametrize(("relation", "views"), [("batch", 3), ("queue", 2)])
def test_fedx_reserves_half_of_a_batch_for_its_relations(relation: str, views: int) -> None:
    class FedXBYOL(FedXMixin, BYOL):
        pass

    data = FederatedDataModule((IMAGES, LABELS), partition=IID(clients=2), batch_size=16)
    data.setup()
    model = make_model(FedXBYOL, fedx=FedXOptions(relation=relation))
    batch = next(data.client(0, seed=0, round_number=1, model=model, device=CPU).epoch(0))
    assert len(batch.rows) == 8
    assert len(batch.stacked) == 8 * views


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_plain_trainer_trains_every_method_on_all_images(name: str) -> None:
    """The upper bound of every table: 48 images in batches of 16 are three steps per epoch."""
    data = FederatedDataModule((IMAGES, LABELS), partition=IID(clients=3), batch_size=16)
    model = make_model(BUILT_IN[name])
    before = model.backbone.conv1.weight.clone()
    trainer(epochs=2).fit(model, data)
    assert len(model.loss_history()) == 6
    assert model.loss_history().isfinite().all()
    assert not torch.equal(model.backbone.conv1.weight, before)


def test_a_plain_trainer_takes_the_loader_alone_where_the_method_asks_for_no_more() -> None:
    data = FederatedDataModule((IMAGES, LABELS), partition=IID(clients=3), batch_size=16)
    model = make_model(SimCLR)
    trainer().fit(model, data.train_dataloader())
    assert len(model.loss_history()) == 3
    with pytest.raises(UserError, match=r"asks for num_images .* give pl\.Trainer\.fit the FederatedDataModule itself"):
        trainer().fit(make_model(ProtoCL), data.train_dataloader())


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Gray squares of one brightness."""

    def __init__(self, brightness: float, count: int) -> None:
        self.brightness, self.count = brightness, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), self.brightness), number % 2


def test_one_data_set_per_client() -> None:
    data = FederatedDataModule([Pictures(0.0, 3), Pictures(1.0, 5)])
    data.setup()
    assert [len(rows) for rows in data.clients] == [3, 5]
    assert data.images.train.images[data.clients[0]].max() == 0
    assert data.images.train.images[data.clients[1]].min() == 255
    assert data.images.train.labels.tolist() == [0, 1, 0, 0, 1, 0, 1, 0]


def test_arrays_of_another_shape_are_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"float32 \(48, 16, 16, 3\); give uint8 \(N, H, W, C\)"):
        FederatedDataModule((IMAGES.astype(np.float32), LABELS)).setup()
    with pytest.raises(UserError, match="mean"):
        FederatedDataModule((IMAGES, LABELS), mean=[0.5]).setup()
