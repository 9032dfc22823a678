"""The identity of a run: every setting that decides its result, as one tree of keys.

The tree is that of the command line's configuration (docs/reference/configuration.md). So a run
that was made in Python can be evaluated, exported and reported by the same commands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from fedx_pl import backbones
from fedx_pl.backbone_options import BACKBONES, BackboneOptions
from fedx_pl.data.partition import PARTITIONS
from fedx_pl.errors import UserError
from fedx_pl.federation.content import decisive, flat
from fedx_pl.federation.options import REGULARIZERS
from fedx_pl.files import checksum
from fedx_pl.files.reading import read_yaml
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.mixins import MIXINS, FedCAMixin
from fedx_pl.provenance import foreign_code, loaded_code
from fedx_pl.provenance.foreign_code import Record

if TYPE_CHECKING:
    from fedx_pl.data.module import FederatedDataModule
    from fedx_pl.methods.base import SSLMethod
    from fedx_pl.trainer import FederatedTrainer

# Hashes of objects as the first trainer got them, since training may change them.
_SEEN: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()

OWN_LAYERS = "layers of the backbone"  # of a network that no key describes
PYTHON = "python"  # the profile and the recipe of a run that was made from objects


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The description of a run in its folder and in messages to its user."""

    name: str
    seed: int
    content: dict[str, Any]  # what decides the result, by dotted key
    hash: str  # hash of the content
    text: str  # all settings, for config.yaml
    hparams: dict[str, float | str]  # what TensorBoard compares runs by
    read: Callable[[Path], dict[str, Any]]  # reads the content from a config.yaml
    typed: bool = False  # whether it was typed on the command line: messages then name its keys
    names_folder: bool = False  # whether the trainer's folder is named after the run

    @property
    def folder_name(self) -> str:
        """A folder name that no other run has."""
        return f"{self.name}-s{self.seed}-{self.hash}"

    @property
    def write(self) -> str:
        """The verb for changing a setting."""
        return "type" if self.typed else "write"

    def another(self, by_hand: bool = True) -> str:
        """The setting to change for a new run."""
        if not self.typed:
            return 'default_root_dir="ANOTHER"'
        return "run.dir=ANOTHER" if by_hand else "name=ANOTHER"

    def forking(self, folder: Path) -> str:
        """The setting to add for a run that starts from the weights of another."""
        return f"--fork {folder}" if self.typed else f'fork="{folder}"'

    def together(self, *changes: str) -> str:
        """Several things to change, as they are written in one command or call."""
        return (" " if self.typed else ", ").join(change for change in changes if change)

    def key(self, argument: str) -> str:
        """An argument of the trainer as its user wrote it."""
        return _KEYS.get(argument, argument) if self.typed else argument

    def setting(self, key: str) -> str:
        """A key of the content as its user wrote it: objects have arguments."""
        if self.typed or not key.startswith(("federation.", "optim.", "data.", "partition.")):
            return key
        arguments = {known: argument for argument, known in _KEYS.items()}
        return arguments.get(key) or key.rpartition(".")[2]


_KEYS = {
    "min_clients": "federation.min_clients",
    "max_rounds": "federation.rounds",
    "local_epochs": "federation.epochs",
    "default_root_dir": "run.dir",
    "resume": "run.resume",
}


def identity_of(trainer: FederatedTrainer, model: SSLMethod, data: FederatedDataModule) -> Identity:
    """Describes a run that is made from objects."""
    tree = _tree(trainer, model, data)
    content = flat(decisive(tree))
    split = [rows.tolist() for rows in data.clients]
    text = json.dumps([content, data.images.fingerprint, split], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    hparams: dict[str, float | str] = {
        "Data": data.options.name,
        "FedX": "true" if tree["fedx"]["enabled"] else "false",
        "Method": type(model).__name__,
        "Rounds": trainer.max_rounds,
        "Seed": trainer.seed,
    }
    return Identity(
        name=tree["name"],
        seed=trainer.seed,
        content=content,
        hash=digest,
        text=yaml.safe_dump(tree, sort_keys=False),
        hparams=hparams,
        read=_read,
    )


def code_record(trainer: FederatedTrainer, model: SSLMethod, data: FederatedDataModule) -> Record:
    """The code of a run, and the class of its backbone, that are not this package's.

    Raises:
        UserError: a file was edited after it was imported; Python would use the old content.
    """
    code = loaded_code.require_current(plain_method(type(model)))
    parts = (
        model.backbone,
        data.partition,
        trainer.regularizer,
        *trainer.client_callbacks,
        *trainer.evaluations,
    )
    made_by = (getattr(model.backbone, "made_by", None), data.loader, trainer.rule)
    for source in (*map(type, parts), *made_by):
        code |= {} if source is None else foreign_code.code_of(source)
    identity = trainer.description
    backbone = own_backbone(identity, model, data)
    objects = _of_other_runs(model)
    if not identity.typed:
        objects |= (
            trainer.made_with | _beyond_keys(model) | (_layers(model.backbone) if backbone else {})
        )
    return Record(code, backbone, objects)


def _of_other_runs(model: SSLMethod) -> dict[str, str]:
    """The checksum of FedCA's base, of which a setting has only the path."""
    if not isinstance(model, FedCAMixin):
        return {}
    return {"weights of fedca.base": model.base_checksum}


def _layers(network: torch.nn.Module) -> dict[str, str]:
    """A hash of the classes and the plain attributes of a network's layers, without weights."""
    layers = {
        name: (
            type(layer),
            {key: value for key, value in vars(layer).items() if _is_setting(key, value)},
        )
        for name, layer in network.named_modules()
    }
    return {OWN_LAYERS: foreign_code.hash_of_values(layers)}


def _is_setting(key: str, value: object) -> bool:
    return (
        not key.startswith("_")
        and key != "training"
        and not isinstance(value, torch.nn.Module | torch.Tensor)
    )


def made_with(trainer: FederatedTrainer) -> dict[str, str]:
    """Hashes of the arguments of the user's regularizer, client callbacks and evaluations."""
    hashes_of: dict[str, list[str]] = {}
    for part in (trainer.regularizer, *trainer.client_callbacks, *trainer.evaluations):
        if type(part) not in REGULARIZERS.values():
            if part not in _SEEN:
                _SEEN[part] = foreign_code.hash_of_values(_arguments(part))
            hashes_of.setdefault(f"arguments of {type(part).__name__}", []).append(_SEEN[part])
    return {name: checksum(repr(hashes).encode()) for name, hashes in hashes_of.items()}


def _arguments(part: object) -> dict[str, Any]:
    """The arguments that an object keeps under their names, or all attributes if one is missing."""
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    signature = inspect.signature(type(part)).parameters.values()
    expected = [parameter.name for parameter in signature if parameter.kind in named]
    kept = {
        name: value for name, value in vars(part).items() if not isinstance(value, torch.nn.Module)
    }
    arguments = {name: kept[key] for name in expected for key in (name, f"_{name}") if key in kept}
    return arguments if len(arguments) == len(expected) else kept


def _beyond_keys(model: SSLMethod) -> dict[str, str]:
    """Hashes of what no key describes: arguments without a plain default, and frozen layers."""
    keys = {*hyper_parameters(type(model)), "optim", *MIXINS}
    parameters = inspect.signature(type(model)).parameters
    others = {
        name: value
        for name, value in model.hparams.items()
        if name not in keys
        and not isinstance(value, torch.nn.Module | torch.Tensor)
        and not (name in parameters and parameters[name].default is value)
    }
    frozen = [
        name for name, parameter in model.backbone.named_parameters() if not parameter.requires_grad
    ]
    contents = {
        f"arguments of {type(model).__name__}": others,
        "frozen layers of the backbone": {"names": frozen} if frozen else {},
    }
    return {
        name: foreign_code.hash_of_values(content) for name, content in contents.items() if content
    }


def own_backbone(identity: Identity, model: SSLMethod, data: FederatedDataModule) -> str:
    """The class of a backbone that is not the one of the settings; else empty.

    The user made it, or the method changed it.
    """
    trained = model.backbone
    settings = identity.content
    if settings["backbone.name"] in BACKBONES:
        fields = [field.name for field in dataclasses.fields(BackboneOptions)]
        values = {name: settings[f"backbone.{name}"] for name in fields}
        options = BackboneOptions(**values)
        with torch.random.fork_rng(devices=[]):
            given = backbones.build(options, channels=data.channels, image_size=data.image_size)
        if type(trained) is type(given) and repr(trained) == repr(given):
            return ""
    return type(trained).__qualname__


def _tree(trainer: FederatedTrainer, model: SSLMethod, data: FederatedDataModule) -> dict[str, Any]:
    name = _word(plain_method(type(model)), BUILT_IN)
    backbone = getattr(model.backbone, "options", None) or BackboneOptions(
        name=_path(type(model.backbone))
    )
    mixins: dict[str, Any] = {word: {"enabled": False} for word in MIXINS}
    for word, mixin in MIXINS.items():
        if isinstance(model, mixin):
            mixins[word] = dataclasses.asdict(getattr(model, word)) | {"enabled": True}
    mixins["fedca"].setdefault("base", "")
    sampled = trainer.clients_per_round
    clients = data.num_clients
    return {
        "name": f"{data.options.name}-{type(model).__name__.lower()}",
        "seed": trainer.seed,
        "fork": str(trainer.fork),
        "profile": PYTHON,
        "recipe": PYTHON,
        "data": dataclasses.asdict(data.options),
        "partition": {"kind": _word(type(data.partition), PARTITIONS)}
        | _settings(data.partition, leave=("clients",)),
        "augment": dataclasses.asdict(data.augment_options),
        "backbone": dataclasses.asdict(backbone),
        "method": {"name": name} | _hyper_parameters(model),
        **mixins,
        "regularizer": {"name": _word(type(trainer.regularizer), REGULARIZERS)}
        | _settings(trainer.regularizer),
        "aggregate": dataclasses.asdict(trainer.aggregate)
        | ({"rule": _path(trainer.rule)} if trainer.rule else {}),
        "privacy": dataclasses.asdict(trainer.privacy),
        "optim": dataclasses.asdict(model.optim)
        | {"batch_size": data.batch_size, "precision": trainer.precision},
        "federation": {
            "clients": clients,
            "rounds": trainer.max_rounds,
            "epochs": trainer.local_epochs,
            "fraction": float(sampled if isinstance(sampled, float) else min(sampled / clients, 1)),
            "min_clients": trainer.min_clients,
            "batchnorm": trainer.batchnorm,
        },
        "evaluation": dataclasses.asdict(trainer.evaluator.options),
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        return flat(decisive(read_yaml(file)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a readable run configuration ({error})") from error


def _hyper_parameters(model: SSLMethod) -> dict[str, Any]:
    """The keyword arguments of a method as it was made; Lightning keeps them as ``hparams``."""
    defaults = hyper_parameters(type(model))
    return {
        key: _plain(model.hparams.get(key, default)) for key, (_, default, _) in defaults.items()
    }


def _settings(part: object, leave: tuple[str, ...] = ()) -> dict[str, Any]:
    """The plain arguments that a part was made with and keeps under their names."""
    names = [name for name in inspect.signature(type(part)).parameters if name not in leave]
    kept = {name: getattr(part, name) for name in names if hasattr(part, name)}
    return {
        name: value for name, value in kept.items() if isinstance(value, bool | int | float | str)
    }


def _word(kind: type, classes: Mapping[str, type]) -> str:
    """A class as it is called on the command line."""
    return next((word for word, other in classes.items() if other is kind), _path(kind))


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def plain_method(method: type[SSLMethod]) -> type[SSLMethod]:
    """The method beneath our mixins, if a class adds only those.

    It is BYOL for ``class FedXBYOL(FedXMixin, BYOL)``, as in ``method=byol fedx=true``.
    """
    dunder = {name for name in vars(method) if name.startswith("__") and name.endswith("__")}
    *added, inner = method.__bases__
    ours = [mixin for mixin in reversed(list(MIXINS.values())) if mixin in added]
    if not added or "__init__" in dunder or vars(method).keys() - dunder or added != ours:
        return method
    return plain_method(inner)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
