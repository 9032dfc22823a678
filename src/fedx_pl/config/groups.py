"""Groups of keys that belong to a whole run, beside those of its parts."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedx_pl.config.registry import PARTITION, REGULARIZER, make
from fedx_pl.data.partition import FromFile, Partition
from fedx_pl.evaluation.options import EvaluationOptions
from fedx_pl.options import OptionError, Options, option

if TYPE_CHECKING:
    from fedx_pl.federation.regularizers import Regularizer


@dataclass(frozen=True, kw_only=True)
class FederationOptions(Options):
    """Options of the rounds: clients, rounds and local epochs."""

    clients: int = option(10, "N, how many clients own the images", at_least=1)
    rounds: int = option(100, "R, communication rounds", at_least=1)
    epochs: int = option(10, "E, local epochs per round", at_least=1)
    fraction: float = option(
        1.0, "share of the clients that train in a round", example=0.5, above=0, at_most=1
    )
    min_clients: int = option(1, "good updates a round needs", at_least=1)
    batchnorm: str = option(
        "average",
        "average: statistics too | local: each client keeps its own",
        choices=("average", "local"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_clients > self.clients:
            advice = f"at most {{clients}}={self.clients}"
            raise OptionError(
                "min_clients", self.min_clients, advice=advice, owner=FederationOptions
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options of execution; only ``compile`` changes results, by rounding."""

    root: str = option("runs", "folder of all runs")
    dir: str = option("", "this run's folder; empty: ROOT/NAME-sSEED-HASH")
    resume: str = option(
        "auto",
        "auto: resume this run where it stopped | never: the folder must be new",
        choices=("auto", "never"),
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:1 ...")
    threads: int = option(0, "CPU threads; 0 = torch's choice", at_least=0, at_most=1024)
    compile: bool = option(
        False, "torch.compile the networks: for long runs on a GPU; needs a C++ compiler"
    )
    keep: int = option(2, "checkpoints kept", at_least=1)
    resident_gb: float = option(
        4.0, "images up to this size stay on the training device", at_least=0, at_most=10**9
    )
    client_curves: int = option(10, "clients with curves of their own in TensorBoard", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is None:
            advice = "auto, cpu, cuda or cuda:1"
            raise OptionError("device", self.device, advice=advice, owner=RunOptions)


@dataclass(frozen=True, kw_only=True)
class SiteOptions(Options):
    """Limits on what a coordinator may ask of a site; keys of `fedx-pl federate client`."""

    max_side: int = option(4096, "federate client: pixels on a side of an image", at_least=0)
    max_cache_gb: float = option(
        1000.0, "federate client: on disk, decoded images and private state", at_least=0
    )
    max_memory_gb: float = option(
        0.0,
        "federate client: of training, by an estimate; 0: what the device has",
        at_least=0,
    )
    max_epochs: int = option(1000, "federate client: epochs in a round", at_least=0)
    max_seconds: float = option(604800.0, "federate client: of training in a round", at_least=0)


@dataclass(frozen=True, kw_only=True)
class PartitionOptions(Options):
    """Options of the partition of images among clients."""

    kind: str = option(
        "dirichlet",
        "iid; dirichlet: skewed class mix; classes: a few classes each; "
        "quantity: skewed sizes, same mix; folders: one sub-folder of data.root per client",
    )
    beta: float = option(
        0.5, "kind=dirichlet, quantity: concentration; smaller is more skewed", above=0
    )
    classes: int = option(2, "kind=classes: how many classes each client holds")
    min_size: int = option(10, "kind=dirichlet, quantity: fewest images of a client")
    file: str = option("", "use this split.json of an earlier run instead")

    def made(self, clients: int) -> Partition:
        """The partition that these options describe."""
        if self.file:
            return FromFile(clients=clients, file=self.file)
        partition: Partition = make(PARTITION, self.kind, self, clients=clients)
        return partition


@dataclass(frozen=True)
class EvaluationKeys(EvaluationOptions):
    """Options of the evaluation of the encoder."""

    also: list[str] = option([], "evaluations of your own, when kNN is due: [package.module:Class]")


@dataclass(frozen=True)
class RegularizerOptions(Options):
    """The choice of a regularizer; plain FedAvg has none."""

    name: str = option("none", "none | fedprox | scaffold (short: regularizer=fedprox)")
    mu: float = option(0.01, "fedprox: weight of the pull towards the global weights", at_least=0)

    def made(self) -> "Regularizer":
        """The regularizer that these options describe."""
        regularizer: Regularizer = make(REGULARIZER, self.name, self)
        return regularizer


@dataclass(frozen=True)
class MethodOptions(Options):
    """The choice of a method; `compose` adds its hyper-parameters as further fields."""

    name: str = option("simclr", "short: method=NAME")
