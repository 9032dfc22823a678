"""The TensorBoard events of a run: one writer, tags that group well, and step axes that never restart."""

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from torch import Tensor

from fedx_pl.files import UNFINISHED

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Page -> chart -> patterns of tags, or (value, low, high) of a band.
Pages = Mapping[str, Mapping[str, list[str] | tuple[str, str, str]]]

_PROJECTOR = "projector_config.pbtxt"
_LARGEST = 1e20  # that torch's histograms can hold
_POINTS = 50  # of one client's curve in one round: a hundred rounds stay quick to load


class RunWriter:
    """Writes a run's scalars and pictures into its folder.

    Nothing is imported or created before the first write: a run without a dashboard pays nothing.

    Args:
        folder: where the event files go; created when needed. A resumed run adds a file to the same folder.
        known: files that were there at the last checkpoint and how long they were; what was written after it is
            cut off, for the rounds it belongs to come again.
        max_clients: the clients numbered below this get loss curves of their own; a hundred curves in one chart are
            neither readable nor cheap. By number, so that a resumed run goes on with the same ones.
    """

    def __init__(
        self, folder: Path, *, known: Mapping[str, int] | None = None, max_clients: int = 10
    ) -> None:
        self._folder = folder
        self._max_clients = max_clients
        if known is not None:
            _cut_off(folder, known)

    def lengths(self) -> dict[str, int]:
        """The event files and how long they are, after everything written so far is on the disk."""
        if "_writer" in self.__dict__:
            self._writer.flush()
        found = {}
        for file in sorted(self._folder.glob("events.*")):
            with open(file, "rb") as events:
                os.fsync(events.fileno())
            found[file.name] = file.stat().st_size
        return found

    @cached_property
    def _writer(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder))

    def accuracy(self, round_number: int, values: Mapping[str, float | None]) -> None:
        """Accuracies of the global encoder after a round, in percent, as ``accuracy/<name>``.

        Args:
            round_number: number of the round; 0 is the untrained encoder.
            values: for example ``knn_top1`` and ``linear_top1``; ``None`` and nan mean "not measured": not written.
        """
        self.round(round_number, {f"accuracy/{name}": value for name, value in values.items()})

    def round(self, round_number: int, values: Mapping[str, float | None]) -> None:
        """Figures of a whole round, then a flush, so that a dashboard that is open follows round by round.

        Args:
            round_number: number of the round.
            values: by full tag, for example ``system/images_per_second`` or ``loss/contrastive``; ``None`` and nan are
                not written.
        """
        for tag, value in values.items():
            if value is not None and not math.isnan(value):
                self._writer.add_scalar(tag, value, round_number)
        self._writer.flush()

    def client_losses(
        self, client: int, first_step: int, losses: Tensor, names: Sequence[str]
    ) -> None:
        """The loss terms of one client in one round, as ``loss_<name>/client_<number>``.

        Long rounds are thinned to about fifty points, each the mean of its bucket of rows and drawn at the last step of
        it. A nan stays: TensorBoard marks it, and the step where a loss broke is worth seeing.

        Args:
            client: number of the client.
            first_step: step of the first row, on the client's own axis: the steps it did in all earlier rounds.
            losses: (rows, terms).
            names: of the terms.
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
        """A number of each client that trained in a round.

        The first clients have a curve ``client_<name>/client_<number>``; all together are the histogram
        ``spread/<name>``.

        Args:
            name: of the number.
            round_number: in which they trained.
            values: by client; what is not finite is not written.
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
        """Who owns what: a heat map, and the size of each client as a table.

        Args:
            counts: integer (clients, classes), or (clients, 1) when the images have no labels.
            client_names: of the rows.
            classes: names of the columns.
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
        """Example pairs of augmented views: the quickest way to see a wrong augmentation.

        Args:
            first: normalised float (B, C, H, W).
            second: the other view of the same images.
            mean: of the normalisation, per channel.
            std: of the normalisation, per channel.
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
        """How the encoder sees some images: which it finds alike, and a map of all.

        Args:
            round_number: after which.
            features: float (N, D).
            images: uint8 (N, H, W, C).
            labels: (N,) or none.
            classes: their names.
        """
        from fedx_pl.callbacks import pictures, plots

        rows = pictures.nearest_neighbors(features, labels)
        grid = pictures.neighbor_grid(images, rows, labels)
        self._writer.add_image("embedding/neighbours", grid, round_number, dataformats="HWC")
        figure = pictures.embedding_map(features, labels, classes)
        self._writer.add_image(
            "embedding/map", plots.pixels(figure), round_number, dataformats="HWC"
        )

    def projector(self, features: Tensor, images: Tensor, names: Sequence[str]) -> None:
        """The points of TensorBoard's projector, with the images on them.

        Args:
            features: float (N, D).
            images: uint8 (N, H, W, C).
            names: of the points: their classes, or which images they are.
        """
        from torch.utils.tensorboard import SummaryWriter

        from fedx_pl.callbacks import pictures

        temporary = (
            self._folder / f".projector{UNFINISHED}"
        )  # If this is the end, the next start removes it.
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
        """Before there are other weights."""
        (self._folder / _PROJECTOR).unlink(missing_ok=True)

    def layout(self, pages: Pages) -> None:
        """Which charts the custom scalars tab has, page by page."""
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
        """The settings of this run, and by which scalars runs are compared, for the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        experiment, start, _ = hparams(dict(values), dict.fromkeys(metrics, 0.0))
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary)

    def finished(self) -> None:
        """Marks the run as ended well in the HParams tab."""
        from torch.utils.tensorboard.summary import hparams

        self._writer._get_file_writer().add_summary(hparams({}, {})[2])

    def text(self, tag: str, text: str, round_number: int = 0) -> None:
        """Markdown, for example the resolved configuration."""
        self._writer.add_text(tag, text, round_number)

    def close(self) -> None:
        """Write what is pending and close the file; twice does no harm."""
        if "_writer" in self.__dict__:  # not made by the closing itself
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cut_off(folder: Path, known: Mapping[str, int]) -> None:
    for file in folder.glob("events.*"):
        if file.name not in known:
            file.unlink()
        elif file.stat().st_size > known[file.name]:
            os.truncate(file, known[file.name])
