"""`federate()`: a whole run as one Python call.

from fedx_pl import federate

result = federate("cifar10-byol-fedx", rounds=5, profile="cpu")
result.history          # a DataFrame, one row per round
result.encoder          # images in, features out
result.plot()           # accuracy by round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.loggers import Loggers
from fedx_pl.callbacks.progress import ProgressBar, make_console
from fedx_pl.config.build import build, lacks_gpu
from fedx_pl.config.compose import compose
from fedx_pl.config.describe import Expectation, announcement
from fedx_pl.config.registry import bring
from fedx_pl.data.images import Arrays, ImageData
from fedx_pl.data.sources import of_arrays, pairs
from fedx_pl.errors import UserError
from fedx_pl.federation.content import flat
from fedx_pl.methods.base import SSLMethod
from fedx_pl.printing import setting
from fedx_pl.trainer import FederatedTrainer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from fedx_pl.encoder.load import Encoder

_SHORT = {
    "rounds": "federation.rounds",
    "clients": "federation.clients",
    "epochs": "federation.epochs",
}


@dataclass(frozen=True)
class Federation:
    """A finished run."""

    trainer: FederatedTrainer

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.trainer.folder

    @cached_property
    def encoder(self) -> Encoder:
        """The trained encoder, in eval mode on the CPU."""
        from fedx_pl.encoder.load import Encoder

        return Encoder.of(self.folder, allow_code=True)  # This process has run the code.

    @cached_property
    def history(self) -> pandas.DataFrame:
        """Losses, accuracies and times, one row per round; row 0 is the untrained network."""
        import pandas  # Here, since it takes a second to import.

        rows: list[dict[str, Any]] = [{"round": 0, **self.trainer.untrained}, *self.trainer.history]
        return pandas.DataFrame(rows).set_index("round")

    def plot(self) -> Figure:
        """Accuracy by round."""
        from fedx_pl.callbacks import plots

        return plots.curves(self.trainer.history, self.trainer.untrained)


def federate(
    experiment: str = "",
    *overrides: str,
    method: str | type[SSLMethod] = "",
    data: str | ImageData | Arrays | tuple[Arrays, Arrays] = "",
    callbacks: str | RoundCallback | Sequence[str | RoundCallback] | None = (),
    logger: str | Logger | bool | Sequence[str | Logger] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Federation:
    """Runs a federation, or resumes it; a finished one is read.

    Args:
        experiment: ``DATA-METHOD`` or ``DATA-METHOD-fedx``; empty if overrides say it.
        overrides: ``key=value``, as on the command line.
        method: a name as on the command line, or a class of your own.
        data: a name as on the command line, or images of your own: a pair of arrays, two such pairs
            to train on and to evaluate on, or `ImageData`.
        callbacks: round callbacks, or their names as on the command line.
        logger: False for none, Lightning loggers, or names as on the command line; a TensorBoard
            dashboard if not given.
        quiet: print nothing.
        settings: ``rounds``, ``clients``, ``epochs``, ``seed``, ``profile`` (``paper`` with a GPU
            and ``cpu`` without if not given), ..., or whole groups as mappings: ``optim={"lr":
            0.02}``.

    Raises:
        UserError: as on the command line.
    """
    all_overrides = [f"experiment={experiment}"] if experiment else []
    if method:
        all_overrides.append(f"method={_method(method)}")
    if isinstance(data, str) and data:
        all_overrides.append(f"data={data}")
    given = flat({_SHORT.get(key, key): value for key, value in settings.items()})
    all_overrides += [*overrides, *(f"{key}={_text(value)}" for key, value in given.items())]
    names, objects = _names_and_objects("callbacks", callbacks, RoundCallback)
    all_overrides += [f"callbacks={_text(names)}"] if names or objects else []
    if logger is not None and logger is not True:
        given_loggers = [] if logger is False else logger
        names, loggers = _names_and_objects("logger", given_loggers, Logger)
        all_overrides.append(f"logger={_text(names)}")
        objects += [Loggers(loggers)] if loggers else []
    config = compose(all_overrides)
    images = None if isinstance(data, str) else _images(data, all_overrides)
    if quiet:
        return Federation(build(config, lambda _: None, images=images, callbacks=objects).fit())
    console = make_console()
    console.print(announcement(config), soft_wrap=True)
    run = build(config, images=images, callbacks=[*objects, ProgressBar(console)])
    if lacks_gpu(config):
        run.trainer.callbacks.append(Expectation(run, run.trainer.note))
    return Federation(run.fit())


def _method(method: object) -> str:
    if isinstance(method, str):
        return method
    if isinstance(method, SSLMethod):
        name = type(method).__name__
        raise UserError(
            f"method is a {name} that is made already, and federate makes it from its settings; "
            f"write method={name}, or FederatedTrainer(...).fit(model, data)"
        )
    if not isinstance(method, type):
        raise UserError(
            f'method={method!r} is not possible; write method="byol", or a class of your own'
        )
    return bring(method)


def _images(data: Any, overrides: Sequence[str]) -> ImageData:
    """The user's images; overrides about other images are refused."""
    if isinstance(data, pl.LightningDataModule):
        raise UserError(
            f"data is a {type(data).__name__}, which has settings of its own; write "
            f"data=(images, labels) and the settings here, e.g. clients=10, "
            f'**{{"optim.batch_size": 64}}, or FederatedTrainer(...).fit(model, data)'
        )
    unused = [
        override
        for override in overrides
        if override.startswith("data") and not override.startswith(("data.mean=", "data.std="))
    ]
    if unused:
        raise UserError(f"{unused[0]} does nothing beside images of your own; leave it or data out")
    return data if isinstance(data, ImageData) else of_arrays(*pairs(data))


def _names_and_objects(argument: str, given: Any, kind: type) -> tuple[list[str], list[Any]]:
    """The names and the objects in an argument that is one of them, several or None."""
    if given is None:
        return [], []
    several = isinstance(given, Sequence | set) and not isinstance(given, str)
    items = list(given) if several else [given]
    if wrong := [item for item in items if not isinstance(item, str | kind)]:
        shown = (
            wrong[0].__name__ if isinstance(wrong[0], type) else f"{type(wrong[0]).__name__}(...)"
        )
        raise UserError(
            f"{argument}={shown} is not possible; write {argument}=[...] of names and "
            f"{kind.__name__} objects"
        )
    names = [item for item in items if isinstance(item, str)]
    objects = [item for item in items if not isinstance(item, str)]
    return names, objects


def _text(value: Any) -> str:
    return setting(value)
