"""FederatedDataModule from names, arrays and data sets; for a federation or a plain Trainer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers import make_model
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedx_pl import FedXMixin, FedXOptions
from fedx_pl.config.compose import compose
from fedx_pl.data.images import DataOptions, ImageData
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.data.partition import IID, Dirichlet, Given, Partition
from fedx_pl.data.sources.named import STATISTICS
from fedx_pl.errors import UserError
from fedx_pl.methods import BUILT_IN, BYOL, ProtoCL, SimCLR

IMAGES = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
LABELS = np.arange(48) % 4
CPU = torch.device("cpu")


def trainer(epochs: int = 1) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )


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
        return next(
            data.client(asked.pop("client"), model=model, device=CPU, **asked).epoch(0)
        ).stacked

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
    with pytest.raises(
        UserError,
        match=r"asks for num_images .* give pl\.Trainer\.fit the FederatedDataModule itself",
    ):
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


def loaded(source: Any, **settings: Any) -> FederatedDataModule:
    one_per_client = isinstance(source, list)
    data = FederatedDataModule(
        source, **({} if one_per_client else {"partition": IID(clients=2)}) | settings
    )
    data.setup()
    return data


TEN = (IMAGES[:10], LABELS[:10])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"source": (IMAGES / 255, LABELS)},
            r"float64 .* e\.g\. \(images \* 255\)\.round\(\)\.astype\(np\.uint8\)",
        ),
        ({"source": (IMAGES.astype(int), LABELS)}, r"int64 .*images\.astype\(np\.uint8\)"),
        ({"source": (IMAGES[0, 0], LABELS)}, r"uint8 \(16, 3, 1\)|uint8 \(16, 3\)"),
        (
            {"source": (IMAGES.transpose(0, 3, 1, 2), LABELS)},
            r"channels first.*images\.transpose\(0, 2, 3, 1\)",
        ),
        (
            {"source": (IMAGES, LABELS[:9])},
            r"labels are \(9,\) for 48 images; give one for each, \(48,\)",
        ),
        (
            {"source": (IMAGES, np.eye(4)[LABELS])},
            r"labels are \(48, 4\) .*labels\.argmax\(axis=1\)",
        ),
        ({"source": (IMAGES, LABELS * 1.0)}, r"labels are float64; give integers from 0"),
        ({"source": (IMAGES, LABELS.astype(str))}, r"labels are <U\d+; give integers from 0"),
        ({"source": (IMAGES, LABELS - 5)}, r"labels begin with -5; give integers from 0"),
        ({"source": (IMAGES[:0], LABELS[:0])}, r"there are none; give at least one"),
        (
            {"source": TEN, "test": (IMAGES[..., :1], LABELS)},
            r"test images are \(16, 16, 1\) and the training images",
        ),
        (
            {"source": TEN, "test": (IMAGES[:, :8, :8], LABELS)},
            r"test images are \(8, 8, 3\) and the training images",
        ),
        ({"source": TEN, "test": (IMAGES, None)}, r"the test images have no labels"),
        ({"source": (IMAGES, None), "test": TEN}, r"the training images have no labels"),
        ({"source": TEN, "test": (IMAGES, LABELS * 1.0)}, r"the test labels are float64"),
        (
            {"source": (IMAGES, LABELS * 10**6)},
            r"labels go up to 3000000; give integers from 0 without gaps",
        ),
        (
            {"source": TEN, "mean": [120, 120, 120]},
            r"mean=\[120, 120, 120\] .*numbers in 0\.\.1: divide",
        ),
        (
            {"source": TEN, "mean": 0.5},
            r"mean=\[0\.5\] is not possible; write 3 numbers, one per channel",
        ),
        ({"source": TEN, "std": "0.5"}, r"std=\('0', '\.', '5'\) is not possible"),
        (
            {"source": TEN, "augment": "simclr"},
            r"augment='simclr' is not possible; write augment=AugmentOptions",
        ),
        ({"source": TEN, "loader": print}, r"loader= is for a data set by its name"),
        (
            {"source": TEN, "partition": IID(clients=2.5)},
            r"clients=2\.5 is not possible; .* e\.g\. clients=10",
        ),
        (
            {"source": TEN, "partition": Partition()},
            r"partition=Partition must define deal\(data, seed\)",
        ),
        ({"source": TEN, "limit": 5}, r"limit=5 is for a data set by its name; give fewer images"),
        ({"source": "cifar10", "test": TEN}, r"test= is for arrays and data sets"),
        (
            {"source": TEN, "partition": "iid"},
            r"partition='iid' is not a Partition; write .*IID\(clients=10\)",
        ),
        (
            {"source": TEN, "batch_size": 2.5},
            r"batch_size=2\.5 is not possible; write a whole number of at least 2",
        ),
        ({"source": TEN, "seed": -1}, r"seed=-1 is not possible"),
        ({"source": 3}, r"source is int; give a name"),
        ({"source": Dataset}, r"source is <class .*give a name"),
        ({"source": []}, r"source is an empty list; give one data set per client"),
    ],
)
def test_wrong_arrays_are_refused_with_what_to_give_instead(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        loaded(**settings)


@pytest.mark.parametrize(
    ("source", "shape", "labeled"),
    [
        ((IMAGES[..., 0], LABELS), (48, 16, 16, 1), True),
        ((IMAGES, LABELS[:, None].astype(np.uint8)), (48, 16, 16, 3), True),
        ((torch.from_numpy(IMAGES), torch.from_numpy(LABELS)), (48, 16, 16, 3), True),
        ((IMAGES, LABELS.tolist()), (48, 16, 16, 3), True),
        ((list(IMAGES), LABELS), (48, 16, 16, 3), True),
        (IMAGES, (48, 16, 16, 3), False),
        ((IMAGES, np.full(48, -1)), (48, 16, 16, 3), False),
        (
            TensorDataset(torch.from_numpy(IMAGES).movedim(3, 1), torch.from_numpy(LABELS)),
            (48, 16, 16, 3),
            True,
        ),
        ([[(IMAGES[0], torch.tensor([3]))], [(IMAGES[1], np.int64(2))]], (2, 16, 16, 3), True),
        ([[Image.fromarray(IMAGES[0, :, :, 0])], [IMAGES[1, :, :, 0]]], (2, 16, 16, 1), False),
        ([[torch.zeros(16, 16)]], (1, 16, 16, 1), False),
        ([[[torch.zeros(3, 16, 16), 1]]], (1, 16, 16, 3), True),
        ([[(torch.zeros(3, 16, 16),)]], (1, 16, 16, 3), False),
    ],
)
def test_images_in_other_clothes_simply_work(
    source: Any, shape: tuple[int, ...], labeled: bool
) -> None:
    data = loaded(source)
    assert data.images.train.images.shape == shape
    assert (data.images.train.labels is not None) == labeled
    if labeled:
        assert data.images.train.labels.dtype == np.int64
    first = next(data.client(0, seed=0, round_number=1, model=None, device=CPU).epoch(0))  # type: ignore[arg-type]
    assert first.stacked.shape[1:] == (shape[3], *shape[1:3])


def test_a_data_set_may_be_dealt_out_and_evaluated_on() -> None:
    pictures = TensorDataset(torch.from_numpy(IMAGES).movedim(3, 1), torch.from_numpy(LABELS))
    data = loaded(pictures, partition=IID(clients=3), test=pictures)
    assert [len(rows) for rows in data.clients] == [16, 16, 16]
    assert np.array_equal(data.images.test.images, IMAGES)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(3, 8, 8)])


class Unsized(Dataset[torch.Tensor]):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.zeros(3, 8, 8)


SQUARE = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (
            [[SQUARE], [SQUARE - 1.5]],
            r"item 0 of client 1 has values from -1\.5 to -1\.5; .*without Normalize",
        ),
        ([[SQUARE + 200]], r"item 0 of client 0 has values from 200 to 200; return bytes"),
        ([[SQUARE * torch.nan]], r"values from nan to nan"),
        ([[SQUARE.long()]], r"item 0 of client 0 is of torch\.int64; return bytes \(uint8\)"),
        (
            [[SQUARE], [SQUARE[:, :4]]],
            r"item 0 of client 1 .*\(4, 8, 3\), the first one .*\(8, 8, 3\).*Resize",
        ),
        (
            [[{"image": SQUARE, "label": 1}]],
            r"item 0 of client 0 is a dict of image, label; return \(image, label\)",
        ),
        ([[(SQUARE, 1, "name")]], r"item 0 of client 0 has 3 parts"),
        ([[(SQUARE, "cat")]], r"item 0 of client 0 has the label 'cat'; return an integer"),
        ([[(SQUARE, 0.5)]], r"item 0 of client 0 has the label 0\.5"),
        ([[(SQUARE, torch.eye(3)[0])]], r"item 0 of client 0 has the label tensor"),
        ([["a.png"]], r"item 0 of client 0 is 'a\.png'; return an image"),
        ([[SQUARE[None]]], r"item 0 of client 0 has the shape \(1, 3, 8, 8\)"),
        ([[Image.new("P", (8, 8))]], r"PIL image of mode P; return image\.convert\("),
        ([[SQUARE], []], r"client 1 is a list without images; leave it out"),
        ([Stream()], r"client 0 is a Stream, which has no length .*list\(dataset\)"),
        ([Unsized()], r"client 0 is a Unsized, which has no length"),
        ([DataLoader([SQUARE])], r"client 0 is a DataLoader; give its data set, loader\.dataset"),
        (
            [TEN, TEN],
            r"client 0 is a tuple of 2, not a data set; "
            r"give e\.g\. torch\.utils\.data\.TensorDataset",
        ),
    ],
)
def test_a_wrong_data_set_of_a_client_is_refused_with_the_item(
    clients: list[Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        loaded(clients)


def test_a_partition_beside_data_sets_of_clients_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"partition=IID beside a list of data sets.*ConcatDataset\(source\)"
    ):
        FederatedDataModule([Pictures(0.0, 3)], partition=IID(clients=2))


@dataclass(frozen=True)
class Mine(Partition):
    rows: Any = ()

    def deal(self, data: ImageData, seed: int) -> Any:
        return self.rows


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (
            Given(rows=((0, 1), (1, 2))),
            r"partition=Given gives image 1 to client 0 and to client 1",
        ),
        (Given(rows=((0, 48),)), r"partition=Given gives image 48 to client 0; .*from 0 to 47"),
        (Mine(rows=([3, -1],)), r"partition=Mine gives image -1 to client 0"),
        (Mine(rows=([3, 3],)), r"partition=Mine gives image 3 twice to client 0"),
        (Mine(rows=([1], [])), r"partition=Mine gives no images to client 1"),
        (Mine(rows=([0.5],)), r"partition=Mine gives float64 \(1,\) to client 0"),
        (Mine(rows=None), r"partition=Mine gives a NoneType; deal\(data, seed\) returns one array"),
        (Mine(rows=()), r"partition=Mine gives images to no client"),
        (
            IID(clients=49),
            r"^clients=49 is more than there are images \(48\); write clients=48 or fewer",
        ),
        (IID(clients=0), r"^clients=0 is not possible; .* e\.g\. clients=10"),
    ],
)
def test_an_invalid_split_is_refused_by_name(partition: Partition, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FederatedDataModule((IMAGES, LABELS), partition=partition).setup()


def test_rows_of_a_user_defined_partition_may_be_in_any_order() -> None:
    data = FederatedDataModule(
        (IMAGES, LABELS), partition=Mine(rows=([5, 1], np.array([0], np.int32)))
    )
    data.setup()
    assert [rows.tolist() for rows in data.clients] == [[1, 5], [0]]
    assert {rows.dtype for rows in data.clients} == {np.dtype(np.int64)}


def test_messages_speak_of_arguments_to_whoever_wrote_arguments() -> None:
    with pytest.raises(
        UserError, match=r"partition=Dirichlet\(\) needs labels .* write partition=IID\(\)"
    ):
        FederatedDataModule((IMAGES, None)).setup()
    with pytest.raises(UserError, match=r"^mean=\[0\.5\] is not possible; write 3 numbers"):
        FederatedDataModule((IMAGES, LABELS), mean=[0.5]).setup()
    with pytest.raises(UserError, match=r"^source=cifar12 is not known.*source=cifar10"):
        FederatedDataModule("cifar12").setup()


def test_statistics_may_be_numpy_s() -> None:
    data = loaded(TEN, mean=IMAGES.mean(axis=(0, 1, 2)) / 255, std=IMAGES.std(axis=(0, 1, 2)) / 255)
    assert {type(value) for value in (*data.options.mean, *data.options.std)} == {float}
