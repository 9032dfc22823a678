"""Where a round's clients train: in this process, on the workers of a Ray cluster, or at real sites over Flower.

An engine gets the round's frozen context and the list of clients, and yields what they give back as they finish. It
decides where a client trains, never what it computes: the same seed gives the same global weights on each. All else
(averaging, checkpoints, evaluation, logging) is the orchestrator's.
"""

from fedx_pl.engines.base import Engine, EngineOptions, Lost, Watcher, Work

__all__ = ["Engine", "EngineOptions", "Lost", "Watcher", "Work", "make"]


def make(plan: Work, watcher: Watcher) -> Engine:
    """The engine that the options name."""
    if plan.engine.name == "ray":
        from fedx_pl.engines.ray import RayEngine  # Here: most runs need no Ray.

        return RayEngine(plan, watcher)
    from fedx_pl.engines.local import SerialEngine

    return SerialEngine(plan, watcher)
