"""Engines, which train clients in this process, on a Ray cluster, or at sites over Flower.

An engine gets the round's frozen context and the list of clients, and yields their updates as they
finish. It decides where a client trains, never what it computes: the same seed gives the same
global weights on each. Averaging, checkpoints, evaluation and logging are the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedx_pl.engines.options import EngineOptions
from fedx_pl.errors import UserError
from fedx_pl.options import OptionError
from fedx_pl.parts import Parts, importing

if TYPE_CHECKING:
    from fedx_pl.engines.base import Engine
    from fedx_pl.federation.round import Lost
    from fedx_pl.trainer import FederatedTrainer

__all__ = ["ENGINES", "Engine", "EngineOptions", "Lost", "make"]

# By their names on the command line.
ENGINES: Parts[type[Engine]] = Parts(
    {"serial": "fedx_pl.engines.local:SerialEngine", "ray": "fedx_pl.engines.ray:RayEngine"}
)

__getattr__ = importing(
    __name__, {"fedx_pl.engines.base": ("Engine",), "fedx_pl.federation.round": ("Lost",)}
)


def make(
    options: EngineOptions | Callable[[FederatedTrainer], Engine], trainer: FederatedTrainer
) -> Engine:
    """The engine that the options name, or that a class or function makes."""
    from fedx_pl.engines.base import Engine

    if not isinstance(options, EngineOptions):
        made = options(trainer)
        if not isinstance(made, Engine):
            raise UserError(f"engine={options!r} makes {made!r}; give a subclass of fedx_pl.Engine")
        return made
    if options.name not in ENGINES:
        known = " or ".join(ENGINES)
        raise OptionError("name", options.name, "is not known", known, EngineOptions)
    return ENGINES[options.name](trainer, options)
