"""The options of FedX: weights of the four terms, and variants."""

from dataclasses import dataclass, field, replace

from fedx_pl.errors import UserError, require

_TERMS = ("local_contrast", "local_relation", "global_contrast", "global_relation")


@dataclass(frozen=True, kw_only=True)
class FedXOptions:
    """The four terms and their variants."""

    enabled: bool = field(
        default=False, metadata={"help": "add FedX to the method (short: fedx=true)"}
    )
    local_contrast: float = field(
        default=1.0,
        metadata={"help": "weight of the method's own loss (and of what other mixins added to it)"},
    )
    local_relation: float = field(
        default=1.0, metadata={"help": "weight of the local relational loss"}
    )
    global_contrast: float = field(
        default=1.0, metadata={"help": "weight of the global contrastive loss"}
    )
    global_relation: float = field(
        default=1.0, metadata={"help": "weight of the global relational loss"}
    )
    tau: float = field(default=0.1, metadata={"help": "temperature of FedX's own three terms"})
    divergence: str = field(
        default="jsd", metadata={"help": "jsd (Eq. 5) | authors (the released code's form)"}
    )
    contrast: str = field(
        default="symmetric", metadata={"help": "symmetric (the released code's) | literal (Eq. 7)"}
    )
    head: bool = field(
        default=True, metadata={"help": "the projection head h; false compares f and F directly"}
    )
    relation: str = field(
        default="batch",
        metadata={
            "help": "batch: relations to a second batch B_r | queue: to earlier steps (cheaper)"
        },
    )
    relation_size: int = field(
        default=0,
        metadata={"help": "images of optim.batch_size that are B_r, or left out (queue); 0 = half"},
    )
    queue_size: int = field(default=256, metadata={"help": "relation=queue: embeddings kept"})
    warmup: int = field(
        default=0, metadata={"help": "rounds without the global terms, while F knows little"}
    )

    def __post_init__(self) -> None:
        known = self.divergence in ("jsd", "authors")
        require("fedx.divergence", self.divergence, known, instead="fedx.divergence=jsd or authors")
        known = self.contrast in ("symmetric", "literal")
        require("fedx.contrast", self.contrast, known, instead="fedx.contrast=symmetric or literal")
        known = self.relation in ("batch", "queue")
        require("fedx.relation", self.relation, known, instead="fedx.relation=batch or queue")
        require(
            "fedx.queue_size", self.queue_size, self.queue_size >= 2, instead="fedx.queue_size=256"
        )
        require(
            "fedx.tau",
            self.tau,
            self.tau > 0,
            instead="a positive number; the paper's is fedx.tau=0.1",
        )
        require(
            "fedx.warmup", self.warmup, self.warmup >= 0, instead="fedx.warmup=0 or more rounds"
        )
        weights = {name: getattr(self, name) for name in _TERMS}
        for name, weight in weights.items():
            require(
                f"fedx.{name}", weight, weight >= 0, instead=f"fedx.{name}=0 to leave the term out"
            )
        if not any(weights.values()):
            raise UserError(f"all of fedx.{', fedx.'.join(_TERMS)} are 0: nothing is left to train")
        if self.warmup and not (self.local_contrast or self.local_relation):
            raise UserError(
                f"fedx.warmup={self.warmup} leaves nothing to train in the first rounds, since fedx.local_contrast "
                f"and fedx.local_relation are 0; type fedx.warmup=0"
            )

    def reserved(self, batch_size: int) -> int:
        """How many of a step's images are not in ``B``."""
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
        """The options of a round: without the global terms while the warm-up lasts."""
        if round_number > self.warmup:
            return self
        return replace(self, global_contrast=0.0, global_relation=0.0, warmup=0)
