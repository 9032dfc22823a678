"""Options of the server and of privacy, and the names of its parts; nothing here needs torch."""

import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedx_pl.errors import install_hint
from fedx_pl.options import OptionError, Options, option
from fedx_pl.parts import Parts

if TYPE_CHECKING:
    from fedx_pl.federation.aggregate import Aggregator
    from fedx_pl.federation.regularizers import Regularizer

MAX_IMAGES = 10_000_000

# By their words on the command line.
RULES: "Parts[type[Aggregator]]" = Parts(
    {
        "mean": "fedx_pl.federation.aggregate:FedAvg",
        "clip": "fedx_pl.federation.robust:NormClipping",
        "median": "fedx_pl.federation.robust:Median",
        "trimmed": "fedx_pl.federation.robust:TrimmedMean",
        "krum": "fedx_pl.federation.robust:MultiKrum",
    }
)
REGULARIZERS: "Parts[type[Regularizer]]" = Parts(
    {
        "none": "fedx_pl.federation.regularizers:Regularizer",
        "fedprox": "fedx_pl.federation.regularizers:FedProx",
        "scaffold": "fedx_pl.federation.regularizers:Scaffold",
    }
)


@dataclass(frozen=True, kw_only=True)
class AggregateOptions(Options):
    """Options of aggregation; docs/robustness.md describes each rule."""

    rule: str = option("mean", "mean | clip | median | trimmed | krum (short: aggregate=clip)")
    clip: float = option(
        2.0, "clip: largest norm of an update, in median norms of the round", above=0
    )
    trim: float = option(
        0.1, "trimmed: share of the clients left out at either end", at_least=0, below=0.5
    )
    byzantine: int = option(1, "krum: f, how many clients of a round may be bad", at_least=0)
    max_growth: float = option(
        3.0,
        "an update whose weights are this many times as long is refused; 0: any, shrunk ones too",
        above=1,
        at_most=math.inf,
        also=(0,),
    )
    max_images: int = option(MAX_IMAGES, "a client that claims to own more is refused", at_least=1)
    max_share: float = option(
        1.0,
        "largest share of a round's images that one client may count for; real sites: 0.5",
        example=0.5,
        above=0,
        at_most=1,
    )
    quarantine: int = option(
        3,
        "bad updates in a row after which a client is not asked again; 0: always ask",
        at_least=0,
    )

    def require_possible(self, min_clients: int) -> None:
        """Raises an `OptionError` if a round may have fewer good updates than the rule needs."""
        needed = 2 * self.byzantine + 3
        if self.rule == "krum" and min_clients < needed:
            problem = (
                f"with {{rule}}=krum needs {needed} good updates in a round, "
                f"and {{min_clients}}={min_clients}"
            )
            advice = f"{{min_clients}}={needed}"
            raise OptionError("byzantine", self.byzantine, problem, advice, AggregateOptions)


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions(Options):
    """Options of differential privacy; off by default."""

    clip: float = option(
        0.0, "C, largest L2 norm of a client's update; 0: any", example=1.0, at_least=0
    )
    noise: float = option(
        0.0,
        "standard deviation of the noise on an update, in units of C",
        example=10.0,
        at_least=0,
    )
    delta: float = option(1e-5, "of (epsilon, delta) differential privacy", above=0, below=1)
    max_epsilon: float = option(
        0.0, "do not start a run that would spend more; 0: any", example=8.0, at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise and not self.clip:
            problem = "protects only updates of bounded norm"
            raise OptionError("noise", self.noise, problem, "{clip}=1 as well", PrivacyOptions)
        if self.max_epsilon and not self.noise:
            advice = "{noise}=10 as well"
            raise OptionError(
                "max_epsilon", self.max_epsilon, "needs noise", advice, PrivacyOptions
            )

    def require_accountant(self) -> None:
        """Raises an `OptionError` if noise is on and the extra that accounts for it is missing."""
        if self.noise and importlib.util.find_spec("dp_accounting") is None:
            problem = f"needs dp-accounting; type {install_hint('privacy')}"
            raise OptionError("noise", self.noise, problem, owner=PrivacyOptions)
