"""All keys of a run: typed, validated and frozen. The defaults are the paper's."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedx_pl.backbone_options import BackboneOptions
from fedx_pl.callbacks.options import HealthOptions
from fedx_pl.config.bounds import require_sensible
from fedx_pl.config.groups import (
    EvaluationKeys,
    FederationOptions,
    MethodOptions,
    PartitionOptions,
    RegularizerOptions,
    RunOptions,
    SiteOptions,
)
from fedx_pl.config.registry import (
    METHOD,
    MIXIN,
    WORDS,
    find,
    is_foreign,
    own_settings,
    require_known,
)
from fedx_pl.data.images import RESIZED, DataOptions
from fedx_pl.data.options import AugmentOptions
from fedx_pl.data.partition import PARTITIONS
from fedx_pl.data.sources import SOURCES
from fedx_pl.engines import EngineOptions
from fedx_pl.errors import UserError, first_line
from fedx_pl.federation.content import decisive, flat
from fedx_pl.federation.options import REGULARIZERS, AggregateOptions, PrivacyOptions
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.methods.parameters import Parameter, declared_parameters, hyper_parameters
from fedx_pl.mixins import FedCAOptions, FedXOptions, MoonOptions
from fedx_pl.options import Bounds, OptionError, Options, option

LARGEST_SEED = 2**63 - 1
TENSORBOARD = "tensorboard"  # the logger that is our dashboard


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """A whole run."""

    name: str = option("", "of the experiment; empty: DATA-METHOD[-fedx]-PROFILE")
    seed: int = option(
        0, "all randomness derives from it", at_least=-LARGEST_SEED, at_most=LARGEST_SEED
    )
    fork: str = option("", "a run folder: start from its weights (short: --fork RUN)")
    profile: str = option("paper", "the choice made for this group")
    recipe: str = option("paper", "the choice made for this group")
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
    callbacks: list[str] = option(
        [], "round callbacks: [early_stopping], or your own [package.module:Class]"
    )
    logger: list[str] = option([TENSORBOARD], "[tensorboard,csv], or your own Lightning loggers")
    mixins: list[str] = option(
        [], "mixins of your own, the innermost first: [package.module:Class]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for (group, key), kind in WORDS.items():
            require_known(kind, getattr(getattr(self, group), key))
        for word in self.mixins:
            require_known(MIXIN, word)
        self.aggregate.require_possible(self.federation.min_clients)
        if self.fedx.enabled and not 0 < self.relation_size < self.optim.batch_size:
            raise UserError(
                f"fedx.relation_size={self.fedx.relation_size} leaves nothing of "
                f"optim.batch_size={self.optim.batch_size}; "
                f"type fedx.relation_size={self.optim.batch_size // 2}"
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
        """The keys that decide the result, not where files are or how the run is executed."""
        return decisive(dataclasses.asdict(self))

    @cached_property
    def hash(self) -> str:
        """Eight digits that distinguish the results of different settings.

        Only what differs from the defaults is hashed, so that a new key does not rename older runs.
        A changed default does not show; callers compare the whole `content` as well.
        """
        text = json.dumps(self.non_defaults(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def non_defaults(self) -> dict[str, Any]:
        """The settings that differ from the defaults, and the method's name, by dotted key."""
        usual = _usual(Parts.of(dataclasses.asdict(self)))
        content = flat(self.content())
        one_size = self.data.name in SOURCES and self.data.name not in RESIZED
        if one_size and self.profile in ("cpu", "mini"):
            # These profiles once set it for all data sets, and runs keep their names.
            content["data.image_size"] = 64
        return {k: v for k, v in content.items() if k == "method.name" or usual.get(k, ...) != v}

    def hparams(self) -> dict[str, float | str]:
        """The settings that TensorBoard compares runs by, and all that are not the defaults.

        TensorBoard shows the first five in alphabetical order, capitals first.
        """
        main = {
            "Data": self.data.name,
            "FedX": self.fedx.enabled,
            "Method": self.method.name,
            "Rounds": self.federation.rounds,
            "Seed": self.seed,
        }
        shown = ("data.name", "fedx.enabled", "method.name", "federation.rounds", "seed")
        rest = {key: value for key, value in self.non_defaults().items() if key not in shown}
        return {key: _shown(value) for key, value in {**main, **rest}.items()}

    @property
    def run_name(self) -> str:
        """The name of this run's folder and of its result."""
        return f"{self.name}-s{self.seed}-{self.hash}"

    @property
    def run_folder(self) -> Path:
        """The folder of this run."""
        return Path(self.run.dir) if self.run.dir else Path(self.run.root) / self.run_name

    def to_yaml(self) -> str:
        """The resolved configuration; `load` reads it back."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)


def all_keys() -> Iterator[tuple[str, Any, str]]:
    """All keys of the schema but those of methods, as (dotted name, default, help)."""
    for key, item, default in _fields(Config()):
        yield key, default, item.metadata.get("help", "")


def _fields(options: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """All fields of nested dataclasses as (dotted name, field, value)."""
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item, value


@cache
def _bounds() -> dict[str, Bounds]:
    """The bounds of all keys of the schema."""
    return {key: item.metadata["bounds"] for key, item, _ in _fields(Config())}


# Keys of arguments of the trainer and of the data module, and of those that parts share.
_ARGUMENTS = {
    "accelerator": "run.device",
    "batchnorm": "federation.batchnorm",
    "beta": "partition.beta",
    "classes": "partition.classes",
    "clients": "federation.clients",
    "clients_per_round": "federation.fraction",
    "default_root_dir": "run.dir",
    "devices": "run.device",
    "embed_dim": "method.embed_dim",
    "file": "partition.file",
    "local_epochs": "federation.epochs",
    "max_rounds": "federation.rounds",
    "min_clients": "federation.min_clients",
    "precision": "optim.precision",
    "root": "data.root",
    **{
        f"partition={kind.__name__}()": f"partition.kind={word}"
        for word, kind in PARTITIONS.items()
    },
    **{
        f"regularizer={path.partition(':')[2]}()": f"regularizer={word}"
        for word, path in REGULARIZERS.paths.items()
    },
}


@contextmanager
def in_keys(group: str = "") -> Iterator[None]:
    """Makes an `OptionError` that is raised within name the keys of the command line.

    Args:
        group: the keys that are arguments of what is made within, e.g. ``method``.
    """
    try:
        yield
    except OptionError as error:
        prefix = _prefixes().get(error.owner.__name__, "") if error.owner else ""
        fields = _bounds()

        def key(name: str) -> str:
            if prefix + name in fields:
                return prefix + name
            return _ARGUMENTS.get(name) or (f"{group}.{name}" if group else name)

        raise UserError(error.text(key, shown=str, write="type")) from error.__cause__


@cache
def _prefixes() -> dict[str, str]:
    """The prefix of the keys of each class of options, by the name of the class."""

    def walk(options: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
        yield type(options).__name__, prefix
        for item in dataclasses.fields(options):
            if dataclasses.is_dataclass(value := getattr(options, item.name)):
                yield from walk(value, f"{prefix}{item.name}.")

    return dict(walk(Config()))


@dataclass(frozen=True)
class Parts:
    """The words that decide which keys exist."""

    method: str = "simclr"
    mixins: tuple[str, ...] = ()  # the user's own
    others: tuple[tuple[str, str, str], ...] = ()  # (group, key, word) of parts not built in

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> "Parts":
        """The words among nested keys and values, which need not be complete."""

        def word(group: str, key: str) -> str:
            part = tree.get(group)
            return str(part.get(key, "")) if isinstance(part, Mapping) else ""

        words = [(group, key, word(group, key)) for group, key in WORDS if group != "method"]
        others = [
            (group, key, name)
            for group, key, name in words
            if name and is_foreign(WORDS[group, key], name)
        ]
        mixins = tree.get("mixins")
        listed = tuple(map(str, mixins)) if isinstance(mixins, list | tuple) else ()
        return cls(word("method", "name") or "simclr", listed, tuple(others))


def schema_of(parts: Parts) -> DictConfig:
    """A new typed tree of all keys, including those of the method and of a user's own parts."""
    return copy.deepcopy(_prototype(parts))


def method_parameters(name: str, mixins: Sequence[str] = ()) -> dict[str, Parameter]:
    """The keys ``method.*`` of a method inside a user's own mixins."""
    if not mixins and name in BUILT_IN.paths:
        return declared_parameters(BUILT_IN.paths[name])
    method = find(METHOD, name)  # Comes first: an unknown name should not wait for torch.
    from fedx_pl.mixins.base import wrap

    for word in mixins:
        method = wrap(find(MIXIN, word), method)
    return hyper_parameters(method)


@cache
def _prototype(parts: Parts) -> DictConfig:
    own: list[Any] = [("name", str, field(default=parts.method))]
    for key, (hint, default, _) in method_parameters(parts.method, parts.mixins).items():
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
    """The defaults of the decisive keys."""
    return {"data.image_size": 0} | flat(frozen(schema_of(parts)).content())


def frozen(schema: DictConfig) -> Config:
    """The configuration in a tree of `schema_of`, validated."""
    try:
        with in_keys():
            config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:  # Some values are converted only now.
        raise UserError(f"wrong value for {error.full_key}: {first_line(error)}") from error
    assert isinstance(config, Config)
    values = dataclasses.asdict(config)
    usual = _defaults(Parts.of(values))
    method = config.method.name
    ours = (
        _defaults(Parts(method))
        if method in METHOD.built_in
        else flat(dataclasses.asdict(Config()))
    )
    require_sensible(flat(values), usual, {key: _bounds().get(key, Bounds()) for key in ours})
    return config


@cache
def _defaults(parts: Parts) -> dict[str, Any]:
    """The defaults of all keys."""
    return flat(OmegaConf.to_container(schema_of(parts)))  # type: ignore[arg-type]


def _unlocked(node: DictConfig) -> DictConfig:
    """Makes a tree writable; OmegaConf makes nodes of frozen dataclasses read-only."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if isinstance(child := node._get_node(key), DictConfig):
            _unlocked(child)
    return node


def _shown(value: Any) -> float | str:
    """A value as TensorBoard can show it; it would show true as 1."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(value)
