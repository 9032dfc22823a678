"""The paper's embedding analysis: some clients train one more round, from F to their f."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.errors import Report, UserError
from fedx_pl.evaluation import geometry
from fedx_pl.evaluation.base import Evaluation, Tick, counter
from fedx_pl.evaluation.features import drawn_rows, extract
from fedx_pl.seeding import derive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedx_pl.trainer import FederatedTrainer

UNLABELED = 10_000  # Without test images, the angles are measured on so many training images.
VIEWED = 2_000  # images that alignment looks at in two views


class Geometry(Evaluation):
    """Angles between local and global model and between classes, alignment and uniformity."""

    needs_labels = False
    trains_clients = True

    def measure(
        self, trainer: FederatedTrainer, report: Report = print, tick: Tick | None = None
    ) -> dict[str, Any]:
        """Measures angles in degrees; those of classes only if there are labels."""
        data = trainer.datamodule.images
        test = data.test
        images = test.images if test is not None else _some(trainer, data.train.images, UNLABELED)
        z = embed(trainer, images)
        results: dict[str, Any] = {
            "images": len(images),
            "alignment": _alignment(trainer, images),
            **geometry.health(z),
        }
        angles = self._local_angles(trainer, images, z, report=report, tick=tick)
        results |= {"clients": len(angles), "local_global_mean": angles.mean().item()}
        if test is not None and test.labels is not None:
            labels = torch.from_numpy(test.labels).to(z.device)
            names = data.classes
            there = [
                label for label in range(len(names)) if len(angles) and (labels == label).any()
            ]
            results["local_global"] = {
                names[label]: geometry.box(angles[:, labels == label]) for label in there
            }
            between = geometry.interclass_angles(z, labels, len(names))
            results |= {"interclass": between.tolist(), "interclass_mean": between.mean().item()}
        return results

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """The number of clients that train, and their epochs."""
        return {"clients": self.options.geometry_clients, "epochs": local_epochs}

    def figure(self, name: str, results: dict[str, Any]) -> Figure:
        """Draws boxes of the angles by class, and a histogram between classes."""
        # Here, since importing matplotlib slows every start down.
        from fedx_pl.evaluation.geometry_plots import geometry_figure

        return geometry_figure({name: results})

    def _local_angles(
        self,
        trainer: FederatedTrainer,
        images: np.ndarray,
        z: Tensor,
        report: Report,
        tick: Tick | None,
    ) -> Tensor:
        """Angles between f(x) and F(x), (clients, N), of clients that the seed draws."""
        num_clients = trainer.datamodule.num_clients
        draw = np.random.default_rng(derive(trainer.seed, "geometry"))
        count = min(num_clients, self.options.geometry_clients)
        clients = sorted(draw.choice(num_clients, size=count, replace=False).tolist())
        advance = counter(tick, sum(map(trainer.steps_of, clients)))
        client_angles = []
        for client in clients:
            _require_memory(trainer, client)
            trainer.train_client(client, advance)
            angles = geometry.angles(embed(trainer, images), z)
            if torch.isfinite(angles).all():
                client_angles.append(angles)
            else:
                report(f"left client {client} out: its embeddings hold NaN or infinity")
        return torch.stack(client_angles) if client_angles else z.new_empty(0, len(images))


def embed(
    trainer: FederatedTrainer, images: np.ndarray, prepare: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Computes ``projector(backbone(x))``, (N, embed_dim), by the current model in eval mode."""
    network = nn.Sequential(trainer.model.backbone, trainer.model.projector)
    return extract(network, images, prepare or trainer.datamodule.augment.plain)


def _require_memory(trainer: FederatedTrainer, client: int) -> None:
    """Raises a `UserError` if what a client had after the round that is measured is not there."""
    number = trainer.current_round
    try:
        trainer.memory_of(client)
    except UserError as error:  # It speaks of resuming, which is not wanted here.
        kept = trainer.checkpoints.rounds()
        others = ", ".join(str(other) for other in kept if other != number)
        instead = f"type --round with one of {others}" if others else "no other round was kept"
        instead += ", or leave it out" if number < max(kept, default=0) else ""
        raise UserError(
            f"the clients' own state of round {number} is not there (that of client {client} is "
            f"missing or damaged), and geometry needs it; {instead}"
        ) from error


def _alignment(trainer: FederatedTrainer, images: np.ndarray) -> float:
    generator = torch.Generator(trainer.device).manual_seed(derive(trainer.seed, "views"))
    some = _some(trainer, images, VIEWED)
    augment = trainer.datamodule.augment
    first, second = (
        embed(trainer, some, lambda batch: augment(batch, generator)) for _ in range(2)
    )
    return geometry.alignment(first, second)


def _some(trainer: FederatedTrainer, images: np.ndarray, most: int) -> np.ndarray:
    rows = drawn_rows(len(images), most, derive(trainer.seed, "geometry images"))
    some: np.ndarray = images[rows]
    return some
