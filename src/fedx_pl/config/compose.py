"""Composes the configuration of a run from small files and overrides.

    compose(["data=cifar10", "method=byol", "fedx=true", "federation.rounds=20"])

An override is ``group=choice`` or ``key=value``. Choices are applied first, in the order data,
recipe, profile, wherever they stand on the command line; then each ``key=value``. A choice of
``data``, ``recipe`` or ``profile`` is a file ``configs/GROUP/CHOICE.yaml`` that overrides the
defaults of the schema, which are the paper's. The default ``profile=auto`` is ``paper`` with a GPU
and ``cpu`` without. ``method`` is a class, whose keyword arguments are the keys ``method.*``.
``fedx=true`` is short for ``fedx.enabled=true``.

Keys end at the first ``=``. Values are taken as they are (lists as YAML), so that paths may hold
any character.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from fedx_pl import methods
from fedx_pl.config.registry import (
    DATA,
    EVALUATION,
    METHOD,
    MIXIN,
    WORDS,
    find,
    is_foreign,
    require_known,
)
from fedx_pl.config.renamed import refuse_renamed
from fedx_pl.config.schema import TENSORBOARD, Config, Parts, frozen, schema_of
from fedx_pl.data.images import ARRAYS, RESIZED
from fedx_pl.data.sources import SOURCES
from fedx_pl.data.sources.named import STATISTICS
from fedx_pl.errors import UserError, did_you_mean, has_controls, known_names, short, wrong_type
from fedx_pl.evaluation.options import PRESETS
from fedx_pl.files.reading import parse_yaml, read_yaml
from fedx_pl.mixins import MIXINS

CONFIGS = Path(__file__).parent / "files"  # a link to configs/, or its copy in an installed package

MAX_KEY = 100  # letters of a key
MAX_GROUPS = 5  # nested in each other
_GROUPED = [name for name in MIXINS if hasattr(Config(), name)]  # They have keys of their own.
# What `fedx-pl federate server` composes first, since real sites are not trusted.
REAL_SITES = ("aggregate=clip", "aggregate.max_share=0.5")
GROUPS = ("data", "method", "recipe", "profile")
FILE_GROUPS = ("data", "recipe", "profile")
_SHORT = {
    "resume": "run.resume",
    "regularizer": "regularizer.name",
    "engine": "engine.name",
    "aggregate": "aggregate.rule",
    "backbone": "backbone.name",
    "partition": "partition.kind",
    "on_collapse": "health.on_collapse",
    **{name: f"{name}.enabled" for name in _GROUPED},
}
# These are choices, too, since they bring other keys with them.
_LONG = {"method.name": "method", "data.name": "data"}


def choices(group: str) -> list[str]:
    """The words that may be typed after ``group=``."""
    if group == "method":
        return list(methods.BUILT_IN)
    if group == "data":
        return sorted(name for name in SOURCES if name != ARRAYS)
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def compose(overrides: Sequence[str] = ()) -> Config:
    """Builds the configuration of a run.

    Args:
        overrides: ``group=choice`` and ``key=value`` strings.

    Raises:
        UserError: a key, choice or method is unknown, or a value has the wrong type; the message
            names the nearest valid one.
    """
    chosen = {"data": "cifar10", "recipe": "paper", "profile": "auto", "method": "simclr"}
    settings: list[tuple[str, str]] = []
    for override in overrides:
        if has_controls(override):
            raise UserError(
                f"{override!r} holds a character that cannot be printed; type it without"
            )
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(
                f"{override!r} is not an override; type key=value, e.g. federation.rounds=20"
            )
        refuse_renamed(key, override)
        key = _LONG.get(key, key)
        if len(key) > MAX_KEY or key.count(".") > MAX_GROUPS:
            raise UserError(f"there is no key {short(key)}; `fedx-pl train --help` lists all")
        if key == "experiment":
            chosen["data"], chosen["method"], fedx = _experiment(value)
            settings.append(("fedx.enabled", fedx))
        elif key in chosen:
            chosen[key] = value
        else:
            settings.append((_SHORT.get(key, key), value))
    if chosen["profile"] == "auto":
        chosen["profile"] = "paper" if has_gpu() else "cpu"

    schema = schema_of(_parts(chosen, settings))
    for group in FILE_GROUPS:
        if group == "data":
            require_known(DATA, chosen["data"])
            mean, std = STATISTICS.get(chosen["data"], ((), ()))
            known = {"name": chosen["data"], "mean": list(mean), "std": list(std)}
            schema = _merge(schema, {"data": known}, f"data={chosen['data']}")
        schema = _merge(
            schema, _read_choice(group, chosen[group]), f"configs/{group}/{chosen[group]}.yaml"
        )
    schema = _merge(schema, {"profile": chosen["profile"], "recipe": chosen["recipe"]}, "overrides")
    # Presets come first, so that other keys override them wherever they stand.
    for key, value in settings:
        if key == "evaluation.linear.preset" and value in PRESETS:
            schema = _merge(
                schema, _nested("evaluation.linear", dataclasses.asdict(PRESETS[value])), key
            )
    for key, value in settings:
        schema = _merge(schema, _nested(key, _value(value)), f"{key}={value}")
    for name in _GROUPED if is_foreign(METHOD, chosen["method"]) else ():
        if issubclass(find(METHOD, chosen["method"]), MIXINS[name]):
            schema[name].enabled = True
    for word in [word for word in schema.mixins if word in _GROUPED]:
        schema[word].enabled = True  # mixins=[fedx] is fedx=true.
        schema.mixins.remove(word)
    if schema.data.name not in RESIZED:
        schema.data.image_size = 0  # Profiles set it for data sets that have it.
    if not schema.name:
        schema.name = _default_name(schema)
    return frozen(schema)


def has_gpu() -> bool:
    """Whether torch has a GPU; torch is asked only where the system has a driver of one."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, Windows' own, AMD's
    if "torch" not in sys.modules and sys.platform == "linux":
        if not any(Path(driver).exists() for driver in drivers):
            return False
    import torch

    return torch.cuda.is_available()


def _parts(chosen: Mapping[str, str], settings: Sequence[tuple[str, str]]) -> Parts:
    """The typed words that decide which keys exist; the last one of a key counts."""
    tree: dict[str, Any] = {"method": {"name": chosen["method"]}, "data": {"name": chosen["data"]}}
    for group, key in WORDS:
        typed = [value for name, value in settings if name == f"{group}.{key}"]
        if typed:
            tree.setdefault(group, {})[key] = typed[-1]
    mixins = [value for name, value in settings if name == "mixins"]
    return Parts.of(tree | {"mixins": _value(mixins[-1]) if mixins else []})


def _experiment(name: str) -> tuple[str, str, str]:
    """Splits ``cifar10-byol-fedx`` into data, method, and whether FedX is added."""
    data, _, rest = name.partition("-")
    method = rest.removesuffix("-fedx")
    if data not in choices("data") or method not in choices("method"):
        raise UserError(
            f"experiment={name} is not DATA-METHOD or DATA-METHOD-fedx; "
            f"type e.g. experiment=cifar10-byol-fedx (data: {', '.join(choices('data'))}; "
            f"methods: {', '.join(choices('method'))})"
        )
    return data, method, str(rest != method).lower()


def code_words(tree: Mapping[str, Any]) -> set[str]:
    """The words among nested keys and values that name code outside this package.

    An example is ``method=package.module:Class``. A class of this package is known to be what its
    key asks for. A function of this package is not: called as a backbone, it might start a run or
    end the process.
    """
    parts = Parts.of(tree)
    evaluation = tree.get("evaluation")
    also = evaluation.get("also") if isinstance(evaluation, Mapping) else None
    listed = map(str, also) if isinstance(also, list) else ()
    words = [("method", METHOD, parts.method), *(("mixins", MIXIN, word) for word in parts.mixins)]
    words += [(f"{group}.{key}", WORDS[group, key], word) for group, key, word in parts.others]
    words += [("evaluation.also", EVALUATION, word) for word in listed]
    return {
        f"{key}={word}"
        for key, kind, word in words
        if ":" in word and not (kind.base is not None and word.startswith("fedx_pl."))
    }


def load(path: Path, trusted: Collection[str] = ()) -> Config:
    """Reads a run folder's ``config.yaml`` back.

    Args:
        path: the file.
        trusted: which of `code_words` may be imported, or ``*`` for all. A run folder may be
            somebody else's, and importing a module runs it.
    """
    try:
        tree = read_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable run configuration ({error})") from error
    if isinstance(tree, dict):
        # These belong to the command that trained, not to the run.
        tree["callbacks"] = []
        tree["logger"] = [TENSORBOARD]
        tree.pop("engine", None)
    foreign = code_words(tree) if isinstance(tree, dict) else set()
    if "*" not in trusted and (unknown := sorted(foreign - set(trusted))):
        raise UserError(
            f"{path} names code to be run, {unknown[0]}; if you trust it, add allow_code=true"
        )
    if isinstance(tree, dict) and isinstance(evaluation := tree.get("evaluation"), dict):
        data = tree.get("data")
        evaluation.setdefault(
            "labels", former_labels(data.get("limit") if isinstance(data, dict) else 0)
        )
    return from_tree(tree, str(path))


def former_labels(limit: Any) -> str:
    """The labels that evaluations used before the key `evaluation.labels` existed."""
    return "limit" if limit else "all"  # Without a limit both are the same labels.


def from_tree(tree: Any, source: str) -> Config:
    """A configuration from nested keys and values.

    Args:
        tree: the content of `Config.to_yaml`, or parts of it.
        source: where it comes from, for messages.
    """
    try:
        tree["method"]["name"]
        schema = schema_of(Parts.of(tree))
    except (TypeError, KeyError) as error:
        raise UserError(f"{source} is not a readable run configuration ({error})") from error
    return frozen(_merge(schema, _plain(tree), source))


def _read_choice(group: str, choice: str) -> dict[str, Any]:
    path = CONFIGS / group / f"{choice}.yaml"
    if group == "data" and not path.exists():  # These images need no other settings.
        return {}
    if choice not in choices(group):
        gpu = group == "profile" and choice in ("gpu", "cuda")
        names = [*choices(group), *(["auto"] if group == "profile" else [])]
        instead = (
            "; a GPU takes profile=paper (or auto)"
            if gpu
            else known_names(choice, names, f"{group}=")
        )
        raise UserError(f"{group}={choice} is not known{instead}")
    return read_yaml(path) or {}


def _value(text: str) -> Any:
    """Reads lists and mappings as YAML; the schema converts all other text to its type."""
    text = _plain(text)
    if not text.startswith(("[", "{")):
        return text
    try:
        return parse_yaml(text, plain=True)
    except ValueError:  # Including what is nested too deeply: the schema has no key for it.
        return text


def _plain(value: Any) -> Any:
    """Escapes ``${``, which OmegaConf would take for a reference to another key."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _nested(key: str, value: Any) -> dict[str, Any]:
    *outer, last = key.split(".")
    tree = {last: value}
    for part in reversed(outer):
        tree = {part: tree}
    return tree


def _merge(schema: DictConfig, content: dict[str, Any], where: str) -> DictConfig:
    _refuse_references(schema, content)
    try:
        # Into the schema itself: copying it for every override would take most of the time.
        return typing.cast(DictConfig, OmegaConf.unsafe_merge(schema, content))
    except OmegaConfBaseException as error:
        key = re.sub(r"\[\d+\]$", "", str(error.full_key or "")) or where.partition("=")[0]
        known = _all_keys(schema)
        if key not in known:
            guess = did_you_mean(key, known) or ";"
            raise UserError(
                f"{where}: there is no key {key}{guess} `fedx-pl train --help` lists all"
            ) from error
        try:
            usual = OmegaConf.select(schema, key)
        except OmegaConfBaseException:  # An earlier value of the same key is wrong, too.
            raise UserError(f"wrong value for {where}") from error
        usual = OmegaConf.to_container(usual) if OmegaConf.is_config(usual) else usual
        if where.startswith(f"{key}="):
            raise UserError(wrong_type(key, where.partition("=")[2], usual)) from error
        parts = key.split(".")
        given = reduce(
            lambda tree, part: tree.get(part, tree) if isinstance(tree, dict) else tree,
            parts,
            content,
        )
        raise UserError(f"{where}: {wrong_type(key, given, usual)}") from error


def _refuse_references(schema: DictConfig, content: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses what OmegaConf would accept: ``${`` in values that are not text, and ``???``."""
    for name, value in content.items():
        # `name in schema` would resolve the value.
        node = schema._get_node(name) if name in schema.keys() else None  # noqa: SIM118
        texts = [
            item
            for item in (value if isinstance(value, list) else [value])
            if isinstance(item, str)
        ]
        if isinstance(value, dict) and isinstance(node, DictConfig):
            _refuse_references(node, value, f"{prefix}{name}.")
        elif "???" in texts or (any("${" in text for text in texts) and not _takes_text(node)):
            usual = (
                OmegaConf.to_container(node)
                if OmegaConf.is_config(node)
                else node and node._value()
            )
            given = str(value).replace("\\${", "${")
            raise UserError(wrong_type(f"{prefix}{name}", given, usual))


def _takes_text(node: Any) -> bool:
    """Whether a node of the schema holds text or a list of texts."""
    if isinstance(node, ListConfig):
        return node._metadata.element_type in (str, Any)
    return node is None or isinstance(node, StringNode | AnyNode)


def _all_keys(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in map(str, node):
        child = node._get_node(key)
        found.append(f"{prefix}{key}")
        if isinstance(child, DictConfig):
            found += _all_keys(child, f"{prefix}{key}.")
    return found


def _default_name(schema: DictConfig) -> str:
    words = [
        schema.data.name,
        schema.method.name,
        *(name for name in reversed(_GROUPED) if schema[name].enabled),
    ]
    words += [*schema.mixins, schema.regularizer.name, schema.aggregate.rule, schema.profile]
    short = [str(word).rpartition(":")[2].lower() for word in words if word not in ("none", "mean")]
    return "-".join(short)
