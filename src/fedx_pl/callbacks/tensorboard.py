"""Writes the TensorBoard events of a run, with step axes that never restart."""

import math
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from torch import Tensor

from fedx_pl.files import UNFINISHED

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Page -> chart -> patterns of tags, or (value, low, high) of a band.
Pages = Mapping[str, Mapping[str, list[str] | tuple[str, str, str]]]

_PROJECTOR = "projector_config.pbtxt"
_LARGEST = 1e20  # value that torch's histograms can hold
_POINTS = 50  # of one client's curve in one round, so that a hundred rounds load fast


class RunWriter:
    """Writes a run's scalars and pictures into its folder.

    Nothing is imported or created before the first write.

    Args:
        folder: where the event files go. A resumed run adds a file to the same folder.
        lengths: the event files and their lengths at the last checkpoint. What was written after it
            is cut off, since those rounds are trained again.
        max_clients: clients with smaller numbers get curves of their own; a hundred curves in one
            chart are neither readable nor cheap.
    """

    def __init__(
        self, folder: Path, *, lengths: Mapping[str, int] | None = None, max_clients: int = 10
    ) -> None:
        self._folder = folder
        self._max_clients = max_clients
        if lengths is not None:
            _cut_off(folder, lengths)

    def lengths(self) -> dict[str, int]:
        """The event files and their lengths, when everything written so far is on disk."""
        if "_writer" in self.__dict__:
            self._writer.flush()
        lengths = {}
        for file in sorted(self._folder.glob("events.*")):
            with open(file, "rb") as events:
                os.fsync(events.fileno())
            lengths[file.name] = file.stat().st_size
        return lengths

    @cached_property
    def _writer(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_thread()
        return SummaryWriter(str(self._folder))

    def accuracy(self, round_number: int, values: Mapping[str, float | None]) -> None:
        """Writes accuracies of the global encoder in percent, as ``accuracy/<name>``.

        Args:
            round_number: the round; 0 is the untrained encoder.
            values: for example ``knn_top1`` and ``linear_top1``; ``None`` and nan are not written.
        """
        self.round(round_number, {f"accuracy/{name}": value for name, value in values.items()})

    def round(self, round_number: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of a round and flushes, so that an open dashboard follows.

        Args:
            round_number: the round.
            values: by full tag, for example ``system/images_per_second`` or ``loss/contrastive``;
                ``None`` and nan are not written.
        """
        for tag, value in values.items():
            if value is not None and not math.isnan(value):
                self._writer.add_scalar(tag, value, round_number)
        self._writer.flush()

    def client_losses(
        self, client: int, first_step: int, losses: Tensor, names: Sequence[str]
    ) -> None:
        """Writes the loss terms of one client in one round, as ``loss_<name>/client_<number>``.

        Long rounds are reduced to about fifty points, each the mean of some steps, drawn at the
        last of them. A nan stays: TensorBoard marks it, which shows where a loss broke.

        Args:
            client: the client's number.
            first_step: the client's step of the first row: its steps in all earlier rounds.
            losses: (rows, terms).
            names: the names of the terms.
        """
        if client >= self._max_clients or len(losses) == 0:
            return
        size = math.ceil(len(losses) / _POINTS)
        done = 0
        for bucket in losses.detach().float().cpu().split(size):
            done += len(bucket)
            step = first_step + done - 1
            for name, value in zip(names, bucket.mean(0).tolist(), strict=True):
                self._writer.add_scalar(f"loss_{name}/client_{client:03d}", value, step)

    def clients(self, name: str, round_number: int, values: Mapping[int, float]) -> None:
        """Writes a number of each client that trained in a round.

        The first clients have a curve ``client_<name>/client_<number>``; all together are the
        histogram ``spread/<name>``.

        Args:
            name: the name of the number.
            round_number: the round.
            values: by client; values that are not finite are not written.
        """
        finite = {client: value for client, value in values.items() if math.isfinite(value)}
        for client in sorted(finite):
            if client < self._max_clients:
                self._writer.add_scalar(
                    f"client_{name}/client_{client:03d}", finite[client], round_number
                )
        within = [value for value in finite.values() if abs(value) < _LARGEST]
        if within:
            self._writer.add_histogram(f"spread/{name}", np.array(within), round_number)

    def partition(
        self, counts: np.ndarray, client_names: Sequence[str], classes: Sequence[str]
    ) -> None:
        """Writes a heat map of the images of each client and class, and a table of client sizes.

        Args:
            counts: integer (clients, classes), or (clients, 1) if the images have no labels.
            client_names: the names of the rows.
            classes: the names of the columns.
        """
        from fedx_pl.callbacks import plots

        figure = plots.partition_heatmap(counts, classes, client_names)
        self._writer.add_image("partition/heatmap", plots.pixels(figure), 0, dataformats="HWC")
        sizes = zip(client_names, np.asarray(counts).sum(1), strict=True)
        table = [
            "| client | images |",
            "|---|---:|",
            *(f"| {name} | {size:,} |" for name, size in sizes),
        ]
        self.text("partition/sizes", "\n".join(table))

    def views(
        self, first: Tensor, second: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        """Writes example pairs of augmented views, which show a wrong augmentation at once.

        Args:
            first: normalized float (B, C, H, W).
            second: the other view of the same images.
            mean: mean of the normalization, per channel.
            std: standard deviation of the normalization, per channel.
        """
        from fedx_pl.callbacks import plots

        self._writer.add_image(
            "views/pairs", plots.view_grid(first, second, mean, std=std), 0, dataformats="HWC"
        )

    def embedding(
        self,
        round_number: int,
        features: Tensor,
        images: Tensor,
        labels: np.ndarray | None,
        classes: Sequence[str],
    ) -> None:
        """Writes the nearest neighbors of some images, and a map of the embedding.

        Args:
            round_number: the round.
            features: float (N, D).
            images: uint8 (N, H, W, C).
            labels: (N,), or None.
            classes: the names of the labels.
        """
        from fedx_pl.callbacks import pictures, plots

        rows = pictures.nearest_neighbors(features, labels)
        grid = pictures.neighbor_grid(images, rows, labels)
        self._writer.add_image("embedding/neighbors", grid, round_number, dataformats="HWC")
        figure = pictures.embedding_map(features, labels, classes)
        self._writer.add_image(
            "embedding/map", plots.pixels(figure), round_number, dataformats="HWC"
        )

    def projector(self, features: Tensor, images: Tensor, names: Sequence[str]) -> None:
        """Writes the points of TensorBoard's projector, with the images on them.

        Args:
            features: float (N, D).
            images: uint8 (N, H, W, C).
            names: the names of the points.
        """
        from torch.utils.tensorboard import SummaryWriter

        from fedx_pl.callbacks import pictures

        # If the process is killed here, the next start removes it.
        temporary = self._folder / f".projector{UNFINISHED}"
        shutil.rmtree(temporary, ignore_errors=True)
        with SummaryWriter(str(temporary)) as writer:
            writer.add_embedding(features, list(names), pictures.thumbnails(images), tag="encoder")
        shutil.rmtree(self._folder / "00000", ignore_errors=True)
        for name in ("00000", _PROJECTOR):
            os.replace(temporary / name, self._folder / name)
        shutil.rmtree(temporary)

    def has_projector(self) -> bool:
        """Whether the projector has its points."""
        return (self._folder / _PROJECTOR).exists()

    def forget_projector(self) -> None:
        """Removes the projector's points, since they are of older weights."""
        (self._folder / _PROJECTOR).unlink(missing_ok=True)

    def layout(self, pages: Pages) -> None:
        """Sets the charts of the custom scalars tab, page by page."""
        self._writer.add_custom_scalars(
            {
                page: {
                    title: ["Margin" if isinstance(tags, tuple) else "Multiline", list(tags)]
                    for title, tags in charts.items()
                }
                for page, charts in pages.items()
            }
        )

    def hparams(self, values: Mapping[str, float | str], metrics: Sequence[str]) -> None:
        """Writes the settings of this run and the scalars to compare, for the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        experiment, start, _ = hparams(dict(values), dict.fromkeys(metrics, 0.0))
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary)

    def finished(self) -> None:
        """Marks the run as finished in the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        self._writer._get_file_writer().add_summary(hparams({}, {})[2])

    def text(self, tag: str, text: str, round_number: int = 0) -> None:
        """Writes Markdown, for example the configuration."""
        self._writer.add_text(tag, text, round_number)

    def close(self) -> None:
        """Writes what is pending and closes the file; a second call does nothing."""
        if "_writer" in self.__dict__:  # Closing must not make one.
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _silence_writer_thread() -> None:
    """Keeps TensorBoard's thread from printing a traceback when it cannot write.

    The next call of the writer raises the same error, which the user then sees as one line.
    """
    usual = threading.excepthook
    if usual.__module__ == __name__:
        return  # It is silenced already.

    def report(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            usual(error)

    threading.excepthook = report


def _cut_off(folder: Path, lengths: Mapping[str, int]) -> None:
    for file in folder.glob("events.*"):
        if file.name not in lengths:
            file.unlink()
        elif file.stat().st_size > lengths[file.name]:
            os.truncate(file, lengths[file.name])
