"""Where a round's clients train: in this process, on the workers of a Ray cluster, or at real sites over Flower.

An engine gets the round's frozen context and the list of clients, and yields what they give back as they finish. It
decides where a client trains, never what it computes: the same seed gives the same global weights on each. All else
(averaging, checkpoints, evaluation, logging) is the trainer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedx_pl.engines.base import Engine, EngineOptions
from fedx_pl.engines.local import SerialEngine
from fedx_pl.engines.ray import RayEngine
from fedx_pl.errors import require
from fedx_pl.federation.round import Lost

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

__all__ = ["ENGINES", "Engine", "EngineOptions", "Lost", "make"]

# By their words on the command line.
ENGINES: dict[str, type[Engine]] = {"serial": SerialEngine, "ray": RayEngine}


def make(options: EngineOptions, trainer: FederatedTrainer) -> Engine:
    """The engine that the options name."""
    require("engine.name", options.name, options.name in ENGINES, instead=f"engine={' or '.join(ENGINES)}")
    return ENGINES[options.name](trainer, options)
