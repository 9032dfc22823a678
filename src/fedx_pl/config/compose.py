"""The configuration of a run: typed, composed from small files, validated, then frozen.

    compose(["data=cifar10", "method=byol", "fedx=true", "federation.rounds=20"])

An override is ``group=choice`` or ``key=value``. Choices are applied first, in the order data, recipe, profile,
whatever their place on the command line; then each ``key=value``. A choice of ``data``, ``recipe`` or ``profile`` is a
file ``configs/GROUP/CHOICE.yaml`` that overrides the schema's defaults, which are the paper's; ``profile`` is ``auto``
if nothing is said: ``paper`` with a GPU, ``cpu`` without; ``method`` is a class, whose keyword arguments are the keys
``method.*``; ``fedx=true`` is short for ``fedx.enabled=true``.

Keys end at the first ``=`` and values are taken as they are (lists as YAML), so that paths may hold any character.
"""

import copy
import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedx_pl import methods
from fedx_pl.backbones import BackboneOptions
from fedx_pl.callbacks.health import HealthOptions
from fedx_pl.config.options import FederationOptions, PartitionOptions, RunOptions
from fedx_pl.config.registry import find_method
from fedx_pl.data.augment import AugmentOptions
from fedx_pl.data.images import RESIZED, DataOptions
from fedx_pl.engines import EngineOptions
from fedx_pl.errors import UserError, did_you_mean, known_names, wrong_type
from fedx_pl.evaluation.evaluate import EvaluationOptions
from fedx_pl.evaluation.linear import PRESETS
from fedx_pl.federation.aggregate import AggregateOptions
from fedx_pl.federation.privacy import PrivacyOptions
from fedx_pl.federation.regularizers import RegularizerOptions
from fedx_pl.methods.base import OptimOptions
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.mixins import MIXINS, FedCAOptions, FedXOptions, MoonOptions

CONFIGS = Path(__file__).parent / "files"  # a link to configs/, or its copy in an installed package


@dataclass(frozen=True)
class MethodOptions:
    """Which method; `compose` adds the method's own hyper-parameters as further fields."""

    name: str = field(default="simclr", metadata={"help": "short: method=NAME"})


@dataclass(frozen=True)
class Config:
    """A whole run."""

    name: str = field(default="", metadata={"help": "of the experiment; empty: DATA-METHOD[-fedx]-PROFILE"})
    seed: int = field(default=0, metadata={"help": "all randomness derives from it"})
    fork: str = field(default="", metadata={"help": "a run folder: start from its weights (short: --fork RUN)"})
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
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    health: HealthOptions = field(default_factory=HealthOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    run: RunOptions = field(default_factory=RunOptions)
    callbacks: list[str] = field(
        default_factory=list, metadata={"help": "round callbacks of your own, e.g. [package.module:Class]"}
    )

    def __post_init__(self) -> None:
        self.aggregate.require_possible(self.federation.min_clients)
        if self.fedx.enabled and not 0 < self.relation_size < self.optim.batch_size:
            raise UserError(
                f"fedx.relation_size={self.fedx.relation_size} leaves nothing of "
                f"optim.batch_size={self.optim.batch_size}; type fedx.relation_size={self.optim.batch_size // 2}"
            )

    @property
    def method_options(self) -> dict[str, Any]:
        """Keyword arguments of the method."""
        return {key: value for key, value in dataclasses.asdict(self.method).items() if key != "name"}

    @property
    def relation_size(self) -> int:
        """Images in the relation batch, if the method asks for one."""
        return self.fedx.reserved(self.optim.batch_size)

    def content(self) -> dict[str, Any]:
        """What decides the result: all keys but where things are and how the run is carried out."""
        content = dataclasses.asdict(self)
        del content["run"], content["engine"], content["health"], content["callbacks"]
        del content["aggregate"]["quarantine"]  # A client that was mended is asked again by another value.
        for place in ("cache", "download", "workers"):
            del content["data"][place]
        content["fedca"]["base"] = Path(self.fedca.base).name  # A run's folder is named after what it holds.
        content["fork"] = Path(self.fork).name
        # For a folder the root says which images, for the others only where they lie.
        if self.data.name != "folder":
            del content["data"]["root"]
        if self.data.name not in RESIZED:
            del content["data"]["image_size"]
        return content

    @cached_property
    def hash(self) -> str:
        """Eight digits that tell two results apart.

        Made of what differs from the defaults, so that a new key leaves the names of older runs as they are. A changed
        default does not show in it; those who go by the hash compare the whole `content` as well.
        """
        return hashlib.sha256(json.dumps(self.non_defaults(), sort_keys=True).encode()).hexdigest()[:8]

    def non_defaults(self) -> dict[str, Any]:
        """What differs from the defaults, and the method's name, by dotted key."""
        usual, content = _usual(self.method.name), flat(self.content())
        if self.data.name not in RESIZED and self.profile in ("cpu", "mini"):
            content["data.image_size"] = 64  # They once set it for all data sets: runs keep their names.
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


def _shown(value: Any) -> float | str:
    """As TensorBoard can take it; true it would show as 1."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(value)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys and values."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


GROUPS = ("data", "method", "recipe", "profile")
FILE_GROUPS = ("data", "recipe", "profile")
_SHORT = {
    "resume": "run.resume", "regularizer": "regularizer.name", "engine": "engine.name", "aggregate": "aggregate.rule",
    "on_collapse": "health.on_collapse",
    **{name: f"{name}.enabled" for name in MIXINS},
}  # fmt: skip
_LONG = {"method.name": "method", "data.name": "data"}  # Choices all the same: they bring other keys with them.


def choices(group: str) -> list[str]:
    """What may be typed after ``group=``."""
    if group == "method":
        return list(methods.BUILT_IN)
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def compose(overrides: Sequence[str] = ()) -> Config:
    """Builds the configuration of a run.

    Args:
        overrides: ``group=choice`` and ``key=value`` strings.

    Raises:
        UserError: an unknown key, choice or method, or a value of the wrong type; it names the nearest valid one.
    """
    chosen = {"data": "cifar10", "recipe": "paper", "profile": "auto", "method": "simclr"}
    settings: list[tuple[str, str]] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"{override!r} is not an override; type key=value, e.g. federation.rounds=20")
        key = _LONG.get(key, key)
        if key == "experiment":
            chosen["data"], chosen["method"], fedx = _experiment(value)
            settings.append(("fedx.enabled", fedx))
        elif key in chosen:
            chosen[key] = value
        else:
            settings.append((_SHORT.get(key, key), value))
    if chosen["profile"] == "auto":
        chosen["profile"] = "paper" if torch.cuda.is_available() else "cpu"

    schema = _schema(chosen["method"])
    for group in FILE_GROUPS:
        schema = _merge(schema, _read_choice(group, chosen[group]), f"configs/{group}/{chosen[group]}.yaml")
    schema = _merge(schema, {"profile": chosen["profile"], "recipe": chosen["recipe"]}, "overrides")
    # A preset first, so that a key of one's own wins wherever it stands.
    for key, value in settings:
        if key == "evaluation.linear.preset" and value in PRESETS:
            schema = _merge(schema, _nested("evaluation.linear", dataclasses.asdict(PRESETS[value])), key)
    for key, value in settings:
        schema = _merge(schema, _nested(key, _value(value)), f"{key}={value}")
    for name, mixin in MIXINS.items():
        if issubclass(find_method(chosen["method"]), mixin):
            schema[name].enabled = True
    if schema.data.name not in RESIZED:
        schema.data.image_size = 0  # Profiles set it for those that have it.
    if not schema.name:
        schema.name = _default_name(schema)
    return _frozen(schema)


def _experiment(name: str) -> tuple[str, str, str]:
    """``cifar10-byol-fedx``, as of the Makefile's targets: (data, method, whether with FedX)."""
    data, _, rest = name.partition("-")
    method = rest.removesuffix("-fedx")
    if data not in choices("data") or method not in choices("method"):
        raise UserError(
            f"experiment={name} is not DATA-METHOD or DATA-METHOD-fedx; type e.g. experiment=cifar10-byol-fedx "
            f"(data: {', '.join(choices('data'))}; methods: {', '.join(choices('method'))})"
        )
    return data, method, str(rest != method).lower()


def load(path: Path, trusted: str = "") -> Config:
    """Reads a run folder's ``config.yaml`` back.

    Args:
        path: of the file.
        trusted: a method ``module:Class`` whose code may be imported, or ``*`` for any. A run folder may be somebody
            else's, and importing a module runs it.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not a readable run configuration ({error})") from error
    method = tree.get("method") if isinstance(tree, dict) else None
    name = str(method.get("name")) if isinstance(method, dict) else ""
    if ":" in name and trusted not in ("*", name):
        raise UserError(f"{path} names code to be run, method={name}; if you trust it, add allow_code=true")
    if isinstance(tree, dict) and isinstance(evaluation := tree.get("evaluation"), dict):
        data = tree.get("data")
        evaluation.setdefault("labels", former_labels(data.get("limit") if isinstance(data, dict) else 0))
    if isinstance(tree, dict):
        tree["callbacks"] = []  # They are code, too, and belong to the command that trained, not to the run.
    return from_tree(tree, str(path))


def former_labels(limit: Any) -> str:
    """Which labels evaluations used before `evaluation.labels` was a choice, given `data.limit`."""
    return "limit" if limit else "all"  # Without a limit both are the same labels.


def from_tree(tree: Any, source: str) -> Config:
    """A configuration from nested keys and values.

    Args:
        tree: as of `Config.to_yaml`, or parts of it.
        source: where it is from, for people.
    """
    try:
        schema = _schema(tree["method"]["name"])
    except (TypeError, KeyError) as error:
        raise UserError(f"{source} is not a readable run configuration ({error})") from error
    return _frozen(_merge(schema, _plain(tree), source))


def all_keys(config_class: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """All keys of the schema as (dotted name, default, help), for ``--help``; a method's own are not among them."""
    for item in dataclasses.fields(config_class):
        default = getattr(config_class(), item.name)
        if dataclasses.is_dataclass(default):
            yield from all_keys(type(default), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, default, item.metadata.get("help", "")


def _schema(method_name: str) -> DictConfig:
    """The typed tree of all keys, with the method's hyper-parameters in their place; a new one each time."""
    return copy.deepcopy(_prototype(method_name))


@cache
def _prototype(method_name: str) -> DictConfig:
    own: list[Any] = [("name", str, field(default=method_name))]
    for key, (hint, default, _) in hyper_parameters(find_method(method_name)).items():
        many = isinstance(default, list | tuple)
        own.append((key, hint, field(default_factory=partial(list, default)) if many else field(default=default)))
    options = make_dataclass("MethodOptions", own, bases=(MethodOptions,), frozen=True)
    whole = [("method", options, field(default_factory=options))]
    return _unlocked(OmegaConf.structured(make_dataclass("Config", whole, bases=(Config,), frozen=True)))


@cache
def _usual(method_name: str) -> dict[str, Any]:
    """The defaults as dotted keys and values."""
    return {"data.image_size": 0} | flat(_frozen(_schema(method_name)).content())


def _frozen(schema: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:  # Some values are looked at only now.
        raise UserError(f"wrong value for {error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    return config


def _read_choice(group: str, choice: str) -> dict[str, Any]:
    path = CONFIGS / group / f"{choice}.yaml"
    if choice not in choices(group):
        gpu = group == "profile" and choice in ("gpu", "cuda")
        names = [*choices(group), *(["auto"] if group == "profile" else [])]
        instead = "; a GPU takes profile=paper (or auto)" if gpu else known_names(choice, names, f"{group}=")
        raise UserError(f"{group}={choice} is not known{instead}")
    return yaml.safe_load(path.read_text()) or {}


def _value(text: str) -> Any:
    """Lists and mappings are read as YAML; anything else stays text, which the schema converts to its type."""
    text = _plain(text)
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    """A dollar sign in a path is no reference to another key, nor to the environment."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(schema: DictConfig, content: dict[str, Any], where: str) -> DictConfig:
    try:
        # Into the schema itself: a copy of it for every override would be most of the time.
        return typing.cast(DictConfig, OmegaConf.unsafe_merge(schema, content))
    except OmegaConfBaseException as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key or "")) or where.partition("=")[0]
        known = _all_keys(schema)
        if key not in known:
            guess = did_you_mean(key, known) or ";"
            raise UserError(f"{where}: there is no key {key}{guess} `fedx-pl train --help` lists all") from error
        usual = OmegaConf.select(schema, key)
        usual = OmegaConf.to_container(usual) if OmegaConf.is_config(usual) else usual
        if where.startswith(f"{key}="):
            raise UserError(wrong_type(key, where.partition("=")[2], usual)) from error
        given = reduce(lambda tree, part: tree[part] if isinstance(tree, dict) else tree, key.split("."), content)
        raise UserError(f"{where}: {wrong_type(key, given, usual)}") from error


def _all_keys(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in map(str, node):
        child = node._get_node(key)
        found.append(f"{prefix}{key}")
        if isinstance(child, DictConfig):
            found += _all_keys(child, f"{prefix}{key}.")
    return found


def _unlocked(node: DictConfig) -> DictConfig:
    """OmegaConf makes nodes of frozen dataclasses read-only; composing needs to write."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if isinstance(child := node._get_node(key), DictConfig):
            _unlocked(child)
    return node


def _default_name(schema: DictConfig) -> str:
    method = str(schema.method.name).rpartition(":")[2].lower()
    added = [name for name in reversed(MIXINS) if schema[name].enabled]
    if schema.regularizer.name != "none":
        added.append(str(schema.regularizer.name))
    if schema.aggregate.rule != "mean":
        added.append(str(schema.aggregate.rule))
    return "-".join([schema.data.name, method, *added, schema.profile])
