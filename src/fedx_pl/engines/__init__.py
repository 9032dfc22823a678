"""Where a round's clients train: in this process, on the workers of a Ray cluster, or at real sites over Flower.

An engine gets the round's frozen context and the list of clients, and yields what they give back as they finish. It
decides where a client trains, never what it computes: the same seed gives the same global weights on each. All else
(averaging, checkpoints, evaluation, logging) is the orchestrator's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedx_pl.engines.base import Engine, EngineOptions, Lost, Watcher

if TYPE_CHECKING:  # A plan holds the configuration, which holds `EngineOptions`.
    from fedx_pl.config.build import Plan

__all__ = ["Engine", "EngineOptions", "Lost", "Watcher", "make"]


def make(plan: Plan, watcher: Watcher) -> Engine:
    """The engine that the configuration names."""
    if plan.config.engine.name == "ray":
        from fedx_pl.engines.ray import RayEngine  # Here: most runs need no Ray.

        return RayEngine(plan, watcher)
    from fedx_pl.engines.local import SerialEngine

    return SerialEngine(plan, watcher)
