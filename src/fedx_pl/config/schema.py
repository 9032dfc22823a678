"""All keys of a run: typed, validated, frozen. Defaults are the paper's."""

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedx_pl.backbones import BackboneOptions
from fedx_pl.callbacks.health import HealthOptions
from fedx_pl.config.bounds import require_sensible
from fedx_pl.config.registry import (
    METHOD,
    MIXIN,
    PARTITION,
    REGULARIZER,
    WORDS,
    find,
    is_foreign,
    make,
    own_settings,
)
from fedx_pl.data.augment import AugmentOptions
from fedx_pl.data.dealing import check_beta
from fedx_pl.data.images import RESIZED, DataOptions
from fedx_pl.data.partition import FromFile, Partition
from fedx_pl.data.sources import SOURCES
from fedx_pl.engines import EngineOptions
from fedx_pl.errors import UserError, require
from fedx_pl.evaluation.evaluate import EvaluationOptions
from fedx_pl.federation.aggregate import AggregateOptions
from fedx_pl.federation.identity import decisive, flat
from fedx_pl.federation.privacy import PrivacyOptions
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.methods.base import SSLMethod
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.mixins import FedCAOptions, FedXOptions, MoonOptions, wrap

TENSORBOARD = "tensorboard"  # the logger that is our dashboard


@dataclass(frozen=True, kw_only=True)
class FederationOptions:
    """Who trains, and how often."""

    clients: int = field(default=10, metadata={"help": "N, how many clients own the images"})
    rounds: int = field(default=100, metadata={"help": "R, communication rounds"})
    epochs: int = field(default=10, metadata={"help": "E, local epochs per round"})
    fraction: float = field(
        default=1.0, metadata={"help": "share of the clients that train in a round"}
    )
    min_clients: int = field(default=1, metadata={"help": "good updates a round needs"})
    batchnorm: str = field(
        default="average",
        metadata={"help": "average: statistics too | local: each client keeps its own"},
    )

    def __post_init__(self) -> None:
        for name in ("clients", "rounds", "epochs", "min_clients"):
            require(
                f"federation.{name}",
                value := getattr(self, name),
                value >= 1,
                instead=f"federation.{name}=1 or more",
            )
        require(
            "federation.fraction",
            self.fraction,
            0 < self.fraction <= 1,
            instead="a share in (0, 1], e.g. 0.5",
        )
        possible = self.min_clients <= self.clients
        require(
            "federation.min_clients",
            self.min_clients,
            possible,
            instead=f"at most federation.clients={self.clients}",
        )
        known = self.batchnorm in ("average", "local")
        require(
            "federation.batchnorm",
            self.batchnorm,
            known,
            instead="federation.batchnorm=average or local",
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a run happens; nothing here changes what is computed (`compile`: but for rounding)."""

    root: str = field(default="runs", metadata={"help": "folder of all runs"})
    dir: str = field(
        default="", metadata={"help": "this run's folder; empty: ROOT/NAME-sSEED-HASH"}
    )
    resume: str = field(
        default="auto",
        metadata={"help": "auto: go on where this run stopped | never: the folder must be new"},
    )
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | cuda:1 ..."})
    threads: int = field(default=0, metadata={"help": "CPU threads; 0 = torch's choice"})
    compile: bool = field(
        default=False,
        metadata={
            "help": "torch.compile the networks: for long runs on a GPU; needs a C++ compiler"
        },
    )
    keep: int = field(default=2, metadata={"help": "checkpoints kept"})
    resident_gb: float = field(
        default=4.0, metadata={"help": "images up to this size stay on the training device"}
    )
    client_curves: int = field(
        default=10, metadata={"help": "clients with curves of their own in TensorBoard"}
    )

    def __post_init__(self) -> None:
        require(
            "run.resume",
            self.resume,
            self.resume in ("auto", "never"),
            instead="run.resume=auto or never",
        )
        known = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None
        require("run.device", self.device, known, instead="run.device=auto, cpu, cuda or cuda:1")
        require(
            "run.threads",
            self.threads,
            self.threads >= 0,
            instead="run.threads=0 for torch's choice",
        )
        require("run.keep", self.keep, self.keep >= 1, instead="run.keep=1 or more")
        require(
            "run.resident_gb",
            self.resident_gb,
            self.resident_gb >= 0,
            instead="run.resident_gb=0 or more",
        )
        require(
            "run.client_curves",
            self.client_curves,
            self.client_curves >= 0,
            instead="run.client_curves=0 or more",
        )


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """What a coordinator may ask of a site; keys of `fedx-pl federate client`."""

    max_side: int = field(
        default=4096, metadata={"help": "federate client: pixels on a side of an image"}
    )
    max_cache_gb: float = field(
        default=1000.0,
        metadata={"help": "federate client: on disk, decoded images and private state"},
    )
    max_memory_gb: float = field(
        default=0.0,
        metadata={"help": "federate client: of training, by an estimate; 0: what the device has"},
    )
    max_epochs: int = field(default=1000, metadata={"help": "federate client: epochs in a round"})
    max_seconds: float = field(
        default=604800.0, metadata={"help": "federate client: of training in a round"}
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, key = getattr(self, item.name), f"site.{item.name}"
            require(key, value, value >= 0, instead=f"{key}={item.default}")


@dataclass(frozen=True, kw_only=True)
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
        default=0.5,
        metadata={"help": "kind=dirichlet, quantity: concentration; smaller is more skewed"},
    )
    classes: int = field(
        default=2, metadata={"help": "kind=classes: how many classes each client holds"}
    )
    min_size: int = field(
        default=10, metadata={"help": "kind=dirichlet, quantity: fewest images of a client"}
    )
    file: str = field(
        default="", metadata={"help": "use this split.json of an earlier run instead"}
    )

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def made(self, clients: int) -> Partition:
        """The partition that these options describe."""
        if self.file:
            return FromFile(clients=clients, file=self.file)
        partition: Partition = make(PARTITION, self.kind, self, clients=clients)
        return partition


@dataclass(frozen=True)
class EvaluationKeys(EvaluationOptions):
    """How often and how the encoder is measured."""

    also: list[str] = field(
        default_factory=list,
        metadata={"help": "evaluations of your own, when kNN is due: [package.module:Class]"},
    )


@dataclass(frozen=True)
class RegularizerOptions:
    """Which one; plain FedAvg has none."""

    name: str = field(
        default="none", metadata={"help": "none | fedprox | scaffold (short: regularizer=fedprox)"}
    )
    mu: float = field(
        default=0.01, metadata={"help": "fedprox: weight of the pull towards the global weights"}
    )

    def __post_init__(self) -> None:
        require("regularizer.mu", self.mu, self.mu >= 0, instead="regularizer.mu=0.01")

    def made(self) -> Regularizer:
        """The regularizer that these options describe."""
        regularizer: Regularizer = make(REGULARIZER, self.name, self)
        return regularizer


@dataclass(frozen=True)
class MethodOptions:
    """Which method; `compose` adds the method's own hyper-parameters as further fields."""

    name: str = field(default="simclr", metadata={"help": "short: method=NAME"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str = field(
        default="", metadata={"help": "of the experiment; empty: DATA-METHOD[-fedx]-PROFILE"}
    )
    seed: int = field(default=0, metadata={"help": "all randomness derives from it"})
    fork: str = field(
        default="", metadata={"help": "a run folder: start from its weights (short: --fork RUN)"}
    )
    profile: str = field(default="paper", metadata={"help": "the choice made for this group"})
    recipe: str = field(default="paper", metadata={"help": "the choice made for this group"})
    data: DataOptions = field(default_factory=DataOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    augment: AugmentOptions = field(default_factory=AugmentOptions)
    backbone: BackboneOptions = field(default_factory=BackboneOptions)
    method: MethodOptions = field(default_factory=MethodOptions)
    fedx: FedXOptions = field(default_factory=FedXOptions)
    moon: MoonOptions = field(default_factory=MoonOptions)
    fedca: FedCAOptions = field(default_factory=FedCAOptions)
    regularizer: RegularizerOptions = field(default_factory=RegularizerOptions)
    aggregate: AggregateOptions = field(default_factory=AggregateOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    federation: FederationOptions = field(default_factory=FederationOptions)
    evaluation: EvaluationKeys = field(default_factory=EvaluationKeys)
    health: HealthOptions = field(default_factory=HealthOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    run: RunOptions = field(default_factory=RunOptions)
    site: SiteOptions = field(default_factory=SiteOptions)
    callbacks: list[str] = field(
        default_factory=list,
        metadata={"help": "round callbacks: [early_stopping], or your own [package.module:Class]"},
    )
    logger: list[str] = field(
        default_factory=lambda: [TENSORBOARD],
        metadata={"help": "[tensorboard,csv], or your own Lightning loggers"},
    )
    mixins: list[str] = field(
        default_factory=list,
        metadata={"help": "mixins of your own, the innermost first: [package.module:Class]"},
    )

    def __post_init__(self) -> None:
        for (group, key), kind in WORDS.items():
            find(kind, getattr(getattr(self, group), key))
        for word in self.mixins:
            find(MIXIN, word)
        self.aggregate.require_possible(self.federation.min_clients)
        if self.fedx.enabled and not 0 < self.relation_size < self.optim.batch_size:
            raise UserError(
                f"fedx.relation_size={self.fedx.relation_size} leaves nothing of "
                f"optim.batch_size={self.optim.batch_size}; type fedx.relation_size={self.optim.batch_size // 2}"
            )

    @property
    def method_options(self) -> dict[str, Any]:
        """Keyword arguments of the method."""
        return {
            key: value for key, value in dataclasses.asdict(self.method).items() if key != "name"
        }

    @property
    def relation_size(self) -> int:
        """Images in the relation batch, if the method asks for one."""
        return self.fedx.reserved(self.optim.batch_size)

    def content(self) -> dict[str, Any]:
        """What decides the result: all keys but where things are and how the run is carried out."""
        return decisive(dataclasses.asdict(self))

    @cached_property
    def hash(self) -> str:
        """Eight digits that tell two results apart.

        Made of what differs from the defaults, so that a new key leaves the names of older runs as they are. A changed
        default does not show in it; those who go by the hash compare the whole `content` as well.
        """
        return hashlib.sha256(json.dumps(self.non_defaults(), sort_keys=True).encode()).hexdigest()[
            :8
        ]

    def non_defaults(self) -> dict[str, Any]:
        """What differs from the defaults, and the method's name, by dotted key."""
        usual, content = _usual(Parts.of(dataclasses.asdict(self))), flat(self.content())
        if (
            self.data.name in SOURCES
            and self.data.name not in RESIZED
            and self.profile in ("cpu", "mini")
        ):
            content["data.image_size"] = (
                64  # They once set it for all data sets: runs keep their names.
            )
        return {k: v for k, v in content.items() if k == "method.name" or usual.get(k, ...) != v}

    def hparams(self) -> dict[str, float | str]:
        """What runs are compared by, and whatever else is not as usual.

        TensorBoard shows the first five by alphabet, capitals first.
        """
        main = {
            "Data": self.data.name,
            "FedX": self.fedx.enabled,
            "Method": self.method.name,
            "Rounds": self.federation.rounds,
            "Seed": self.seed,
        }
        told = ("data.name", "fedx.enabled", "method.name", "federation.rounds", "seed")
        rest = {key: value for key, value in self.non_defaults().items() if key not in told}
        return {key: _shown(value) for key, value in {**main, **rest}.items()}

    @property
    def run_name(self) -> str:
        """Of this run's folder and of its result."""
        return f"{self.name}-s{self.seed}-{self.hash}"

    @property
    def run_folder(self) -> Path:
        """Where this run lives."""
        return Path(self.run.dir) if self.run.dir else Path(self.run.root) / self.run_name

    def to_yaml(self) -> str:
        """The resolved configuration; `load` reads it back."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


def all_keys(config_class: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """All keys of the schema as (dotted name, default, help), for ``--help``; a method's own are not among them."""
    for item in dataclasses.fields(config_class):
        default = getattr(config_class(), item.name)
        if dataclasses.is_dataclass(default):
            yield from all_keys(type(default), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, default, item.metadata.get("help", "")


@dataclass(frozen=True)
class Parts:
    """The words that decide which keys there are."""

    method: str = "simclr"
    mixins: tuple[str, ...] = ()  # of one's own
    others: tuple[tuple[str, str, str], ...] = ()  # (group, key, word) of what is not built in

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> "Parts":
        """Those of nested keys and values, which need not be complete."""

        def word(group: str, key: str) -> str:
            part = tree.get(group)
            return str(part.get(key, "")) if isinstance(part, Mapping) else ""

        words = [(group, key, word(group, key)) for group, key in WORDS if group != "method"]
        others = [
            (group, key, told)
            for group, key, told in words
            if told and is_foreign(WORDS[group, key], told)
        ]
        mixins = tree.get("mixins")
        listed = tuple(map(str, mixins)) if isinstance(mixins, list | tuple) else ()
        return cls(word("method", "name") or "simclr", listed, tuple(others))


def schema_of(parts: Parts) -> DictConfig:
    """The typed tree of all keys, with those of the method and of other parts in their place; a new one each time."""
    return copy.deepcopy(_prototype(parts))


def method_of(name: str, mixins: Sequence[str]) -> type[SSLMethod]:
    """A method with mixins of one's own around it."""
    method: type[SSLMethod] = find(METHOD, name)
    for word in mixins:
        method = wrap(find(MIXIN, word), method)
    return method


@cache
def _prototype(parts: Parts) -> DictConfig:
    own: list[Any] = [("name", str, field(default=parts.method))]
    for key, (hint, default, _) in hyper_parameters(method_of(parts.method, parts.mixins)).items():
        many = isinstance(default, list | tuple)
        own.append(
            (
                key,
                hint,
                field(default_factory=partial(list, default)) if many else field(default=default),
            )
        )
    options = make_dataclass("MethodOptions", own, bases=(MethodOptions,), frozen=True)
    whole: list[Any] = [("method", options, field(default_factory=options))]
    groups = {item.name: item.default_factory for item in dataclasses.fields(Config)}
    for group, key, word in parts.others:
        base: Any = groups[group]
        more = own_settings(find(WORDS[group, key], word), base)
        extended = [(name, type(default), field(default=default)) for name, default in more.items()]
        kind = make_dataclass(base.__name__, extended, bases=(base,), frozen=True)
        whole.append((group, kind, field(default_factory=kind)))
    return _unlocked(
        OmegaConf.structured(make_dataclass("Config", whole, bases=(Config,), frozen=True))
    )


@cache
def _usual(parts: Parts) -> dict[str, Any]:
    """The defaults as dotted keys and values."""
    return {"data.image_size": 0} | flat(frozen(schema_of(parts)).content())


def frozen(schema: DictConfig) -> Config:
    """The configuration that a tree of `schema_of` has become."""
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:  # Some values are looked at only now.
        raise UserError(
            f"wrong value for {error.full_key}: {str(error).splitlines()[0]}"
        ) from error
    assert isinstance(config, Config)
    values = dataclasses.asdict(config)
    usual, method = _defaults(Parts.of(values)), config.method.name
    ours = (
        _defaults(Parts(method))
        if method in METHOD.built_in
        else flat(dataclasses.asdict(Config()))
    )
    require_sensible(flat(values), usual, ours)
    return config


@cache
def _defaults(parts: Parts) -> dict[str, Any]:
    """Of all keys, dotted."""
    return flat(OmegaConf.to_container(schema_of(parts)))  # type: ignore[arg-type]


def _unlocked(node: DictConfig) -> DictConfig:
    """OmegaConf makes nodes of frozen dataclasses read-only; composing needs to write."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if isinstance(child := node._get_node(key), DictConfig):
            _unlocked(child)
    return node


def _shown(value: Any) -> float | str:
    """As TensorBoard can take it; true it would show as 1."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(value)
