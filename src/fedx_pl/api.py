"""The command line's power in Python::

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

        return Encoder.of(self.folder, allow_code=True)  # This process has run it.

    @cached_property
    def history(self) -> pandas.DataFrame:
        """Losses, accuracies and times, one row per round; row 0 is the untrained network."""
        import pandas  # Here, for it takes a second.

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
    """Runs a federation, or goes on with it; a finished one is read.

    Args:
        experiment: ``DATA-METHOD`` or ``DATA-METHOD-fedx``; empty if overrides say it.
        overrides: ``key=value``, as on the command line.
        method: a name as on the command line, or a class of your own.
        data: a name as on the command line, or images of your own: a pair of arrays, two such pairs to train on and
            to evaluate on, or `ImageData`.
        callbacks: round callbacks, or their names as on the command line.
        logger: False for none, Lightning loggers, or names as on the command line; a TensorBoard dashboard if not
            given.
        quiet: print nothing.
        settings: ``rounds``, ``clients``, ``epochs``, ``seed``, ``profile`` (``paper`` with a GPU and ``cpu`` without
            if not given), ..., or whole groups as mappings: ``optim={"lr": 0.02}``.

    Raises:
        UserError: as on the command line.
    """
    words = [f"experiment={experiment}"] if experiment else []
    if method:
        words.append(f"method={_method(method)}")
    if isinstance(data, str) and data:
        words.append(f"data={data}")
    given = flat({_SHORT.get(key, key): value for key, value in settings.items()})
    words += [*overrides, *(f"{key}={_text(value)}" for key, value in given.items())]
    named, own = _parted("callbacks", callbacks, RoundCallback)
    words += [f"callbacks={_text(named)}"] if named or own else []
    if logger is not None and logger is not True:
        named, loggers = _parted("logger", [] if logger is False else logger, Logger)
        words.append(f"logger={_text(named)}")
        own += [Loggers(loggers)] if loggers else []
    config = compose(words)
    images = None if isinstance(data, str) else _images(data, words)
    if quiet:
        return Federation(build(config, lambda line: None, images=images, callbacks=own).fit())
    console = make_console()
    console.print(announcement(config), soft_wrap=True)
    run = build(config, images=images, callbacks=[*own, ProgressBar(console)])
    if lacks_gpu(config):
        run.trainer.callbacks.append(Expectation(run, run.trainer.note))
    return Federation(run.fit())


def _method(method: object) -> str:
    if isinstance(method, str):
        return method
    if isinstance(method, SSLMethod):
        name = type(method).__name__
        raise UserError(
            f"method is a {name} that is made already, and federate makes it from its settings; write method={name}, "
            f"or FederatedTrainer(...).fit(model, data)"
        )
    if not isinstance(method, type):
        raise UserError(
            f'method={method!r} is not possible; write method="byol", or a class of your own'
        )
    return bring(method)


def _images(data: Any, words: Sequence[str]) -> ImageData:
    """Images of one's own; words about others would do nothing beside them."""
    if isinstance(data, pl.LightningDataModule):
        raise UserError(
            f"data is a {type(data).__name__}, which has settings of its own; write data=(images, labels) and the "
            f'settings here, e.g. clients=10, **{{"optim.batch_size": 64}}, or FederatedTrainer(...).fit(model, data)'
        )
    idle = [
        word
        for word in words
        if word.startswith("data") and not word.startswith(("data.mean=", "data.std="))
    ]
    if idle:
        raise UserError(f"{idle[0]} does nothing beside images of your own; leave it or data out")
    return data if isinstance(data, ImageData) else of_arrays(*pairs(data))


def _parted(name: str, given: Any, kind: type) -> tuple[list[str], list[Any]]:
    """Words and objects, from one, several or none."""
    several = [] if given is None else list(given) if isinstance(given, Sequence | set) else [given]
    if isinstance(given, str):
        several = [given]
    if wrong := [one for one in several if not isinstance(one, str | kind)]:
        shown = (
            wrong[0].__name__ if isinstance(wrong[0], type) else f"{type(wrong[0]).__name__}(...)"
        )
        raise UserError(
            f"{name}={shown} is not possible; write {name}=[...] of words and {kind.__name__} objects"
        )
    return [one for one in several if isinstance(one, str)], [
        one for one in several if not isinstance(one, str)
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)
