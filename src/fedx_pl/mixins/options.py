"""Options of the mixins; nothing here needs torch."""

from dataclasses import dataclass, replace

from fedx_pl.options import OptionError, Options, option

_TERMS = ("local_contrast", "local_relation", "global_contrast", "global_relation")


@dataclass(frozen=True, kw_only=True)
class FedXOptions(Options):
    """The four terms and their variants."""

    enabled: bool = option(False, "add FedX to the method (short: fedx=true)")
    local_contrast: float = option(
        1.0,
        "weight of the method's own loss (and of what other mixins added to it)",
        at_least=0,
    )
    local_relation: float = option(1.0, "weight of the local relational loss", at_least=0)
    global_contrast: float = option(1.0, "weight of the global contrastive loss", at_least=0)
    global_relation: float = option(1.0, "weight of the global relational loss", at_least=0)
    tau: float = option(0.1, "temperature of FedX's own three terms", above=0)
    divergence: str = option(
        "jsd", "jsd (Eq. 5) | authors (the released code's form)", choices=("jsd", "authors")
    )
    contrast: str = option(
        "symmetric",
        "symmetric (the released code's) | literal (Eq. 7)",
        choices=("symmetric", "literal"),
    )
    head: bool = option(True, "the projection head h; false compares f and F directly")
    relation: str = option(
        "batch",
        "batch: relations to a second batch B_r | queue: to earlier steps (cheaper)",
        choices=("batch", "queue"),
    )
    relation_size: int = option(
        0, "images of optim.batch_size that are B_r, or left out (queue); 0 = half", at_least=0
    )
    queue_size: int = option(256, "relation=queue: embeddings kept", at_least=2)
    warmup: int = option(0, "rounds without the global terms, while F knows little", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(getattr(self, name) for name in _TERMS):
            others = " and ".join(f"{{{name}}}" for name in _TERMS[1:])
            problem = f"and {others} are 0, too: nothing is left to train"
            raise OptionError(_TERMS[0], 0.0, problem, f"e.g. {{{_TERMS[0]}}}=1", FedXOptions)
        if self.warmup and not (self.local_contrast or self.local_relation):
            problem = (
                "leaves nothing to train in the first rounds, "
                "since {local_contrast} and {local_relation} are 0"
            )
            raise OptionError("warmup", self.warmup, problem, "{warmup}=0", FedXOptions)

    def reserved(self, batch_size: int) -> int:
        """The number of images of a step that are not in ``B``."""
        return self.relation_size or batch_size // 2

    @property
    def relational(self) -> bool:
        """Whether there is a relational term."""
        return self.local_relation > 0 or self.global_relation > 0

    @property
    def is_global(self) -> bool:
        """Whether there is a term that needs ``F``."""
        return self.global_contrast > 0 or self.global_relation > 0

    def in_round(self, round_number: int) -> "FedXOptions":
        """The options of a round, without the global terms during the warm-up."""
        if round_number > self.warmup:
            return self
        return replace(self, global_contrast=0.0, global_relation=0.0, warmup=0)


@dataclass(frozen=True)
class MoonOptions(Options):
    """The model-contrastive term."""

    enabled: bool = option(False, "add MOON's term to the method (short: moon=true)")
    mu: float = option(1.0, "its weight; MOON tries 0.1, 1, 5 and 10", at_least=0)
    tau: float = option(0.5, "its temperature", above=0)


@dataclass(frozen=True)
class FedCAOptions(Options):
    """The alignment term."""

    enabled: bool = option(False, "add FedCA's alignment to the method (short: fedca=true)")
    beta: float = option(1.0, "its weight", at_least=0)
    base: str = option("", "run folder of the base encoder, trained on public images")
