"""Numbers that go wrong: a collapsed representation, a client that diverges, a loss scale that runs out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedx_pl.errors import require
from fedx_pl.federation.round import Update

COLLAPSED = "the encoder has collapsed"


@dataclass(frozen=True)
class HealthOptions:
    """When to raise an alarm, and what follows."""

    on_collapse: str = field(
        default="warn",
        metadata={"help": "warn | stop: end the run when the encoder has collapsed (short: on_collapse)"},
    )
    min_rankme: float = field(
        default=2.0, metadata={"help": "dimensions that the features of a healthy encoder use at least"}
    )
    max_uniformity: float = field(
        default=-0.05, metadata={"help": "of the features; 0 means that all directions are the same"}
    )
    max_growth: float = field(
        default=2.0, metadata={"help": "a client diverges if its loss grows by this factor within a round"}
    )

    def __post_init__(self) -> None:
        known = self.on_collapse in ("warn", "stop")
        require("health.on_collapse", self.on_collapse, known, "on_collapse=warn or stop")
        require("health.max_growth", self.max_growth, self.max_growth > 1, "health.max_growth=2")


def look(
    options: HealthOptions, row: Mapping[str, Any], updates: Sequence[Update], name_of: Callable[[int], str]
) -> list[str]:
    """What is wrong after a round, in words.

    Args:
        options: thresholds.
        row: the round's metrics.
        updates: of its clients.
        name_of: a client's name for people.
    """
    found = []
    for key, bound, beyond, words in (
        ("rankme", options.min_rankme, row.get("rankme", math.inf) < options.min_rankme, "below"),
        ("uniformity", options.max_uniformity, row.get("uniformity", -math.inf) > options.max_uniformity, "above"),
    ):
        if beyond:
            found.append(f"{COLLAPSED}: {key} is {row[key]:.3g}, {words} {bound:g}")
    for update in updates:
        first, last = _ends(update)
        if not math.isfinite(last):
            found.append(f"{name_of(update.client)} diverges: its loss is {last}")
        elif first > 0 and last > options.max_growth * first:
            found.append(f"{name_of(update.client)} diverges: its loss grew from {first:.3g} to {last:.3g}")
        if update.metrics.get("loss_scale", 1.0) < 1.0:
            found.append(f"{name_of(update.client)}: its loss scale fell to {update.metrics['loss_scale']:.3g}")
    return found


def _ends(update: Update) -> tuple[float, float]:
    """Mean total loss of the first and of the last tenth of a client's steps."""
    total = update.loss()
    if not len(total):
        return 0.0, 0.0
    share = max(1, len(total) // 10)
    return total[:share].mean().item(), total[-share:].mean().item()
