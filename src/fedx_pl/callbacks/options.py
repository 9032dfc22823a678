"""Options of the round callbacks; nothing here needs torch."""

import math
from dataclasses import dataclass

from fedx_pl.options import Options, option


@dataclass(frozen=True, kw_only=True)
class HealthOptions(Options):
    """Options of health alarms: their bounds, and what happens after an alarm."""

    on_collapse: str = option(
        "warn",
        "warn | stop: end the run when the encoder has collapsed (short: on_collapse)",
        choices=("warn", "stop"),
    )
    min_rankme: float = option(
        2.0, "dimensions that the features of a healthy encoder use at least"
    )
    max_uniformity: float = option(
        -0.05, "of the features; 0 means that all directions are the same", at_least=-(10**9)
    )
    max_growth: float = option(
        2.0,
        "a client diverges if its loss grows by this factor within a round",
        above=1,
        at_most=math.inf,
    )
