"""``lightly``: the local training throughput of lightly's PyTorch Lightning example of SimCLR."""

import logging
import time
import warnings
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms.simclr_transform import SimCLRTransform
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Contender, Lap, as_usual, best, interleave, synchronize
from benchmarks.report import Part, Row
from benchmarks.rounds import Setting, backbone, variant
from fedx_pl import backbones
from fedx_pl.config.build import Run
from fedx_pl.data.images import Split
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.device import resolve_precision
from fedx_pl.federation.round import RoundContext

BATCH = 64
# Batches beyond the timed ones, so that loader workers are busy to the end, as in a long epoch.
AHEAD = 8


class LightlySimCLR(pl.LightningModule):
    """The example's module on our backbone: two forward passes, lightly's head and loss."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        side, channels = run.data.images.train.images.shape[2:]
        self.backbone = backbones.build(run.config.backbone, channels=channels, image_size=side)
        model = run.model
        self.projection_head = SimCLRProjectionHead(
            model.feature_dim, model.hidden_dim, model.embed_dim
        )
        self.criterion = NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        """(n, C, h, w) -> (n, d)."""
        z: Tensor = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return z

    def training_step(self, batch: tuple[list[Tensor], Tensor], batch_index: int) -> Tensor:
        """NT-Xent of the two views."""
        x0, x1 = batch[0]
        loss: Tensor = self.criterion(self.forward(x0), self.forward(x1))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes the optimizer of the example."""
        return torch.optim.SGD(self.parameters(), lr=0.06)


class _Images(Dataset[tuple[Any, int]]):
    """A data set like torchvision's CIFAR10: transformed PIL images, and labels."""

    def __init__(self, split: Split, transform: SimCLRTransform) -> None:
        self.images: np.ndarray = split.images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[i])), 0


class _Clock(pl.Callback):
    """Times the steps after the first, so that starting Trainer and workers does not count."""

    def __init__(self, last: int, device: torch.device) -> None:
        self.last = last
        self.device = device
        self.seconds = 0.0
        self._done = 0
        self._started = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self._done += 1
        if self._done == 1:
            synchronize(self.device)
            self._started = time.perf_counter()
        elif self._done == self.last:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self._started


def lightly(run: Run, steps: int, workers: int) -> Contender:
    """The rival on a run's images, as a contender of ``steps`` timed steps.

    Args:
        run: gives the images, the backbone, the device and the precision.
        steps: number of timed steps of one call.
        workers: number of loader processes.
    """
    module = LightlySimCLR(run)
    device = run.trainer.device
    split = run.data.images.train
    dataset = _Images(split, SimCLRTransform(input_size=split.images.shape[1], gaussian_blur=0.0))
    precision = resolve_precision(run.trainer.precision, device)

    def lap() -> Lap:
        clock = _Clock(steps + 1, device)
        loader = DataLoader(dataset, BATCH, shuffle=True, drop_last=True, num_workers=workers)
        trainer = pl.Trainer(
            max_steps=steps + 1,
            max_epochs=-1,
            devices=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            precision=precision,  # type: ignore[arg-type]
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with warnings.catch_warnings():
            # Lightning advises about workers at every fit, but they are varied here.
            warnings.simplefilter("ignore")
            trainer.fit(module, train_dataloaders=loader)
        return Lap(steps * BATCH, clock.seconds)

    return lap


def ours(run: Run) -> Contender:
    """Local training of one client, start of the Trainer included."""
    trainer = run.trainer
    local = LocalTrainer(
        run.model, device=trainer.device, precision=trainer.precision, compile=trainer.compile
    )

    def lap() -> int:
        data = trainer.client_data(0, round_number=1)
        local.run(
            RoundContext(
                round=1,
                rounds=1,
                epochs=1,
                seed=0,
                global_state=trainer.first_state(),
                batchnorm="average",
            ),
            client=0,
            data=data,
            memory=None,
        )
        return len(data) * data.views_size

    return lap


def measure(setting: Setting) -> Part:
    """Measures SimCLR on one client with both networks.

    lightly runs with and without loader workers, and the better one counts.
    """
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # It greets at every fit.
    part = Part()
    for network, full in (("thin", 20), ("resnet18", 3)):
        steps = setting.few(full, 2)
        common = [
            *variant("plain", BATCH),
            *backbone(network),
            "recipe=strong",
            "federation.clients=1",
        ]
        mine = setting.build(*common, f"data.limit={steps * BATCH}")
        theirs = setting.build(*common, f"data.limit={(steps + AHEAD) * BATCH}")
        contenders = {f"{network}: ours": ours(mine)}
        contenders |= {
            f"{network}: lightly, {w} workers": as_usual(lightly(theirs, steps, w)) for w in (0, 2)
        }
        times = interleave(contenders, setting.repeats, device=setting.device, say=setting.say)
        found = best(times)
        fastest = min(seconds for name, seconds in found.items() if "lightly" in name)
        part.rows.append(
            Row(f"{network}: SimCLR against lightly", fastest / found[f"{network}: ours"])
        )
        part.contenders += [
            {"contender": name, "images/s": 1 / seconds} for name, seconds in found.items()
        ]
        part.times |= times
    return part
