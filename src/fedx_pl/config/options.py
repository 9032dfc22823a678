"""Options that belong to no part of the house in particular: who trains how often, and how a run is carried out."""

import dataclasses
import re
from dataclasses import dataclass, field

from fedx_pl.data import partition
from fedx_pl.data.dealing import check_beta
from fedx_pl.data.partition import Partition
from fedx_pl.errors import UserError, known_names, require

PARTITIONS: dict[str, type[Partition]] = {
    "iid": partition.IID,
    "dirichlet": partition.Dirichlet,
    "classes": partition.ClassesPerClient,
    "quantity": partition.QuantitySkew,
    "folders": partition.Folders,
}


@dataclass(frozen=True)
class FederationOptions:
    """Who trains, and how often."""

    clients: int = field(default=10, metadata={"help": "N, how many clients own the images"})
    rounds: int = field(default=100, metadata={"help": "R, communication rounds"})
    epochs: int = field(default=10, metadata={"help": "E, local epochs per round"})
    fraction: float = field(default=1.0, metadata={"help": "share of the clients that train in a round"})
    min_clients: int = field(default=1, metadata={"help": "good updates a round needs"})
    batchnorm: str = field(
        default="average", metadata={"help": "average: statistics too | local: each client keeps its own"}
    )

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "epochs", "min_clients"):
            require(f"federation.{name}", value := getattr(self, name), value >= 1, f"federation.{name}=1 or more")
        require("federation.fraction", self.fraction, 0 < self.fraction <= 1, "a share in (0, 1], e.g. 0.5")
        possible = self.min_clients <= self.clients
        require("federation.min_clients", self.min_clients, possible, f"at most federation.clients={self.clients}")
        known = self.batchnorm in ("average", "local")
        require("federation.batchnorm", self.batchnorm, known, "federation.batchnorm=average or local")


@dataclass(frozen=True)
class RunOptions:
    """Where and how a run happens; nothing here changes what is computed (`compile`: but for rounding)."""

    root: str = field(default="runs", metadata={"help": "folder of all runs"})
    dir: str = field(default="", metadata={"help": "this run's folder; empty: ROOT/NAME-sSEED-HASH"})
    resume: str = field(
        default="auto", metadata={"help": "auto: go on where this run stopped | never: the folder must be new"}
    )
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | cuda:1 ..."})
    threads: int = field(default=0, metadata={"help": "CPU threads; 0 = torch's choice"})
    compile: bool = field(
        default=False, metadata={"help": "torch.compile the networks: for long runs on a GPU; needs a C++ compiler"}
    )
    keep: int = field(default=2, metadata={"help": "checkpoints kept"})
    resident_gb: float = field(default=4.0, metadata={"help": "images up to this size stay on the training device"})
    client_curves: int = field(default=10, metadata={"help": "clients with curves of their own in TensorBoard"})

    def __post_init__(self) -> None:
        require("run.resume", self.resume, self.resume in ("auto", "never"), "run.resume=auto or never")
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None
        require("run.device", self.device, known, "run.device=auto, cpu, cuda or cuda:1")
        require("run.threads", self.threads, self.threads >= 0, "run.threads=0 for torch's choice")
        require("run.keep", self.keep, self.keep >= 1, "run.keep=1 or more")
        require("run.resident_gb", self.resident_gb, self.resident_gb >= 0, "run.resident_gb=0 or more")
        require("run.client_curves", self.client_curves, self.client_curves >= 0, "run.client_curves=0 or more")


@dataclass(frozen=True)
class PartitionOptions:
    """How images are dealt to clients."""

    kind: str = field(
        default="dirichlet",
        metadata={
            "help": "iid; dirichlet: skewed class mix; classes: a few classes each; quantity: skewed sizes, same mix; "
            "folders: one sub-folder of data.root per client"
        },
    )
    beta: float = field(
        default=0.5, metadata={"help": "kind=dirichlet, quantity: concentration; smaller is more skewed"}
    )
    classes: int = field(default=2, metadata={"help": "kind=classes: how many classes each client holds"})
    min_size: int = field(default=10, metadata={"help": "kind=dirichlet, quantity: fewest images of a client"})
    file: str = field(default="", metadata={"help": "use this split.json of an earlier run instead"})

    def __post_init__(self) -> None:
        check_beta(self.beta)
        if self.kind not in PARTITIONS:
            instead = known_names(str(self.kind), [*PARTITIONS], prefix="partition.kind=")
            raise UserError(f"partition.kind={self.kind} is not known{instead}")

    def made(self, clients: int) -> Partition:
        """The partition that these options describe."""
        if self.file:
            return partition.FromFile(clients=clients, file=self.file)
        kind = PARTITIONS[self.kind]
        taken = {item.name for item in dataclasses.fields(kind)} & {"beta", "classes", "min_size"}
        return kind(clients=clients, **{name: getattr(self, name) for name in taken})
