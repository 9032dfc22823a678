"""The TensorBoard dashboard of a run: which numbers on which page, and the pictures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.tensorboard import Pages, RunWriter
from fedx_pl.evaluation.features import extract

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer

try:
    import resource
except ImportError:  # Not on Windows, where memory is not shown.
    resource = None  # type: ignore[assignment]

GALLERY = 1000  # images whose embeddings are drawn
HEALTH = ("rankme", "uniformity", "feature_std")
WORK = ("data", "step", "aggregate", "evaluate")  # what a round spends its time on
# Columns of metrics.csv that are neither client metrics nor added by a user's callbacks.
BUILT_IN = {
    "round",
    "loss",
    "clients",
    "dropped",
    "lr",
    "images_per_second",
    "train_seconds",
    "round_seconds",
    "epsilon",
    "bytes_up",
    "bytes_down",
    "drift",
    "trained",
    "images",
    *(f"{kind}_seconds" for kind in WORK),
}
BUILT_IN_PREFIXES = ("loss_", "knn_", "linear_")
METRICS = (
    "accuracy/linear_top1",
    "accuracy/linear_best",
    "accuracy/knn_top1",
    "accuracy/knn_best",
    "loss/total",
)


class Dashboard(RoundCallback):
    """Writes a run's numbers, texts and pictures for TensorBoard.

    The first `client_curves` clients have curves of their own.
    """

    def __init__(self, client_curves: int = 10) -> None:
        self.client_curves = client_curves
        # Lengths of the event files when the last round was saved; None: not known.
        self._files: dict[str, int] | None = {}
        self._custom: dict[str, None] = {}  # numbers that callbacks added to rows, in their order

    @override
    def setup(self, trainer: FederatedTrainer) -> None:
        self.trainer = trainer
        vars(self).pop("gallery", None)  # An earlier fit had other images.
        # Cuts off what was written after the last saved round: it is written again.
        self.writer = RunWriter(
            trainer.folder / "tensorboard", lengths=self._files, max_clients=self.client_curves
        )

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        if trainer.current_round:
            return
        data = trainer.datamodule
        writer = self.writer
        writer.hparams(trainer.description.hparams, METRICS)
        writer.text("config", f"```yaml\n{trainer.description.text}```")
        if data.clients:
            counts, names = data.class_counts()
            writer.partition(counts, [f"client {i}" for i in range(len(data.clients))], names)
            views = next(trainer.client_data(0, round_number=1).epoch(0))
            writer.views(views.first[:8], views.second[:8], data.augment.mean, std=data.augment.std)
        self._evaluation(0, trainer.untrained, [])
        self._draw(0)

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        number = record.number
        row = record.row
        rows = [*trainer.history, row]
        updates = record.updates
        writer = self.writer
        writer.forget_projector()
        names = dict.fromkeys(name for update in updates for name in update.loss_names)
        losses = [name for name in names if name != "total"]
        keys = dict.fromkeys(key for update in updates for key in update.metrics)
        client_metrics = [key for key in keys if key != "lr"]
        added = [
            key
            for key, value in row.items()
            if isinstance(value, int | float)
            and key not in {*BUILT_IN, *HEALTH, *client_metrics}
            and not key.startswith(BUILT_IN_PREFIXES)
        ]
        self._custom |= dict.fromkeys(added)
        # A method's loss terms are not known before the first round.
        if row.keys() - {key for before in rows[:-1] for key in before}:
            writer.layout(layout(rows, list(self._custom)))
        if events := [*record.notes, *record.alarms]:
            writer.text("events", "\n".join(f"- {event}" for event in events), number)
        self._evaluation(number, row, rows)
        scalars = {f"loss/{name}": row[f"loss_{name}"] for name in losses} | {
            "loss/total": row["loss"]
        }
        for name in ("total", *losses):
            scalars |= band(name, scalars[f"loss/{name}"], updates)
        scalars |= {"clients/trained": row["clients"], "clients/dropped": row["dropped"]}
        scalars |= {f"clients/{key}": row[key] for key in client_metrics}
        single = {"optim/lr": "lr", "privacy/epsilon": "epsilon"}
        scalars |= {tag: row[key] for tag, key in single.items() if key in row}
        scalars |= {f"custom/{key}": row[key] for key in added}
        writer.round(number, scalars | self._system(rows))
        self._clients(number, updates)
        if trainer.due(number)[1]:
            self._draw(number)
        if number == trainer.max_rounds:
            writer.finished()

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        if len(self.gallery) >= 2 and not self.writer.has_projector():
            features = self._features()
            if torch.isfinite(features).all():
                self.writer.projector(features.cpu(), self._images(), self._names())
        self.writer.close()

    @override
    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        self.writer.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"files": self.writer.lengths(), "custom": list(self._custom)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        files = state.get("files", {})
        self._files = (
            None if files is None else {name: max(0, int(length)) for name, length in files.items()}
        )
        self._custom = dict.fromkeys(map(str, state.get("custom", [])))

    def _evaluation(
        self, round_number: int, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        accuracies = {key: row[key] for key in row if "_top" in key}
        best = {}
        for kind in ("knn", "linear"):
            if f"{kind}_top1" in accuracies and round_number:
                best[f"{kind}_best"] = max(
                    row[f"{kind}_top1"] for row in rows if f"{kind}_top1" in row
                )
        self.writer.accuracy(round_number, accuracies | best)
        self.writer.round(round_number, {f"health/{key}": row[key] for key in HEALTH if key in row})

    def _system(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        row = rows[-1]
        work = {kind: row.get(f"{kind}_seconds", 0.0) for kind in WORK}
        total = sum(work.values()) or 1.0
        scalars = {f"system/{key}": row[key] for key in ("images_per_second", "round_seconds")}
        scalars |= {f"system/share_{kind}": 100 * seconds / total for kind, seconds in work.items()}
        scalars |= {f"system/megabytes_{way}": row[f"bytes_{way}"] / 1e6 for way in ("up", "down")}
        # Rows of older versions have no traffic.
        traffic = sum(row.get(f"bytes_{way}", 0) for row in rows for way in ("up", "down"))
        scalars["system/megabytes_in_all"] = traffic / 1e6
        return scalars | {
            f"system/memory_{where}_gb": size / 1e9
            for where, size in peak_memory(self.trainer.device).items()
        }

    def _clients(self, round_number: int, updates: Sequence[Update]) -> None:
        """Writes a curve for each of the first clients, and a histogram of all of them."""
        values: dict[str, dict[int, float]] = {
            "images": {update.client: update.num_images for update in updates},
            "loss": {
                update.client: update.loss().mean().item()
                for update in updates
                if len(update.losses)
            },
        }
        for update in updates:
            for key, value in update.metrics.items():
                if key != "lr":  # Mostly the same for all: one curve is enough.
                    values.setdefault(key, {})[update.client] = value
            first_step = update.memory.steps - len(update.losses)
            self.writer.client_losses(
                update.client, first_step, update.losses, names=update.loss_names
            )
        for key, by_client in values.items():
            self.writer.clients(key, round_number, by_client)

    # --- the embedding ----------------------------------------------------------------------------

    @cached_property
    def gallery(self) -> np.ndarray:
        """Rows of the images that are drawn: some of the test images, or of the training images.

        A coordinator has none, since the images stay at the sites.
        """
        count = len(self._split.images)
        return np.linspace(0, count - 1, min(GALLERY, count)).astype(int)

    @property
    def _split(self) -> Any:
        return self.trainer.datamodule.images.test or self.trainer.datamodule.images.train

    def _images(self) -> Tensor:
        return torch.from_numpy(np.array(self._split.images[self.gallery]))

    def _labels(self) -> np.ndarray | None:
        return None if self._split.labels is None else np.asarray(self._split.labels)[self.gallery]

    def _names(self) -> list[str]:
        labels = self._labels()
        classes = self.trainer.datamodule.images.classes
        if labels is None:
            return [f"image {row}" for row in self.gallery]
        return [classes[label] if label >= 0 else "unlabeled" for label in labels]

    def _features(self) -> Tensor:
        """The features of the gallery by the current model."""
        return extract(
            self.trainer.model.backbone.to(self.trainer.device),
            self._images(),
            self.trainer.datamodule.augment.plain,
        )

    def _draw(self, round_number: int) -> None:
        if len(self.gallery) < 2:
            return
        features = self._features()
        if torch.isfinite(features).all():
            self.writer.embedding(
                round_number,
                features.cpu(),
                self._images(),
                labels=self._labels(),
                classes=self.trainer.datamodule.images.classes,
            )


def band(name: str, mean: float, updates: Sequence[Update]) -> dict[str, float]:
    """A band of one standard deviation over the clients around the mean of a loss term."""
    columns = [update.loss(name) for update in updates if name in update.loss_names]
    means = [column.mean() for column in columns if len(column)]
    spread = torch.stack(means).std(correction=0).item() if means else 0.0
    return {f"loss_band/{name}_low": mean - spread, f"loss_band/{name}_high": mean + spread}


def peak_memory(device: torch.device) -> dict[str, float]:
    """The peak memory of this process in bytes, and that on the GPU if it trains there."""
    memory: dict[str, float] = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        memory["ram"] = float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if device.type == "cuda":
        memory["gpu"] = float(torch.cuda.max_memory_allocated(device))
    return memory


def layout(rows: Sequence[Mapping[str, Any]], custom: Sequence[str] = ()) -> Pages:
    """The pages of the custom scalars tab: page, chart, and patterns of tags or a band.

    Args:
        rows: the rows of all rounds so far; a number may appear late, since not every client is in
            every round.
        custom: numbers that callbacks added to the rows.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    losses = [
        key.removeprefix("loss_") for key in keys if key.startswith("loss_") and key != "loss_scale"
    ]
    others = [
        key
        for key in keys
        if key not in {*BUILT_IN, *HEALTH, "angle", *custom}
        and not key.startswith(BUILT_IN_PREFIXES)
    ]
    client_metrics = ["drift", "angle", *others, *(["loss_scale"] if "loss_scale" in keys else [])]
    titles = {
        "drift": "Drift: how far a client went, in lengths of the global weights",
        "angle": "Angle between a client's embeddings and the global ones (degrees)",
        "divergence": "Divergence d of FedU",
    }
    bands = {
        name: (f"loss/{name}", f"loss_band/{name}_low", f"loss_band/{name}_high")
        for name in ("total", *losses)
    }
    return {
        "Accuracy": {
            "Linear probe, top-1 (%); best: on the test images": [
                "accuracy/linear_top1$",
                "accuracy/linear_best$",
            ],
            "kNN, top-1 (%); best: on the test images": [
                "accuracy/knn_top1$",
                "accuracy/knn_best$",
            ],
        },
        # TensorBoard shows charts with bands in reverse order.
        "Losses": {f"{name}, mean ± std of the clients": bands[name] for name in reversed(bands)},
        "Clients": {
            **{titles.get(name, name): [f"client_{name}/"] for name in client_metrics},
            "Loss by step": ["loss_total/client_"],
            "Images of the clients that trained": ["client_images/"],
            "Clients that trained": ["clients/trained$"],
        },
        **({"Custom": {name: [f"custom/{name}$"] for name in custom}} if custom else {}),
        "Health": {
            "Standard deviation of the features' directions": ["health/feature_std$"],
            "Uniformity: 0 is a collapse": ["health/uniformity$"],
            "RankMe: dimensions in use": ["health/rankme$"],
            "Updates refused": ["clients/dropped$"],
        },
        "System": {
            "Images per second": ["system/images_per_second$"],
            "Share of the work (%)": ["system/share_"],
            "Memory of this process, the most so far (GB)": ["system/memory_"],
            "Traffic of a round (MB)": ["system/megabytes_up$", "system/megabytes_down$"],
            "Traffic in all (MB)": ["system/megabytes_in_all$"],
        },
    }
