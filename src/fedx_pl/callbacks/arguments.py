"""Checks the arguments of `FederatedTrainer`, and converts them as `pl.Trainer` would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, Timer
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from fedx_pl import backbones
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.options import HealthOptions
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.engines import ENGINES, EngineOptions
from fedx_pl.errors import UserError, first_line, known_names, options_of
from fedx_pl.evaluation import Evaluation
from fedx_pl.evaluation.options import EvaluationOptions
from fedx_pl.federation import privacy
from fedx_pl.federation.aggregate import Aggregator
from fedx_pl.federation.device import device_of, resolve_precision
from fedx_pl.federation.options import REGULARIZERS, RULES, AggregateOptions, PrivacyOptions
from fedx_pl.federation.regularizers import Regularizer, require_fitting_optimizer
from fedx_pl.methods.base import SSLMethod
from fedx_pl.methods.optim import PRECISIONS
from fedx_pl.options import OptionError, check, whole_number

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

_LEAST = {
    "max_rounds": 1,
    "local_epochs": 1,
    "min_clients": 1,
    "keep": 1,
    "threads": 0,
    "client_curves": 0,
    "seed": 0,
}
_SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}  # as of `pl.Trainer`


def settle(trainer: FederatedTrainer) -> None:
    """Checks all arguments of a new trainer, and converts each to its type.

    Raises:
        UserError: an argument is not possible.
    """
    for name, least in _LEAST.items():
        setattr(trainer, name, whole_number(name, getattr(trainer, name), at_least=least))
    for name in ("compile", "enable_progress_bar", "resume"):
        check(name, getattr(trainer, name), choices=(True, False))
    if not isinstance(trainer.fast_dev_run, bool):
        trainer.fast_dev_run = whole_number("fast_dev_run", trainer.fast_dev_run, at_least=0)
    trainer.clients_per_round = _share(trainer.clients_per_round)
    check("batchnorm", trainer.batchnorm, choices=("average", "local"))
    trainer.callbacks = _listed("callbacks", trainer.callbacks, RoundCallback)
    trainer.client_callbacks = _listed("client_callbacks", trainer.client_callbacks, pl.Callback)
    trainer.evaluations = _listed("evaluations", trainer.evaluations, Evaluation)
    trainer.logger = True if trainer.logger is None else trainer.logger
    _listed("logger", trainer.logger, Logger | bool)
    _require_states_apart(trainer.callbacks)
    for callback in trainer.client_callbacks:
        if isinstance(callback, Checkpoint | LearningRateMonitor | DeviceStatsMonitor):
            raise UserError(
                f"client_callbacks={_shown(callback)} needs a logger or checkpoints of the "
                f"client's own trainer, which has none: the run folder keeps checkpoints, "
                f"and every row has the learning rate; leave it out"
            )
    trainer.aggregate = _options("aggregate", trainer.aggregate, AggregateOptions, RULES, "rule")
    trainer.aggregate.require_possible(trainer.min_clients)
    trainer.privacy = _options("privacy", trainer.privacy, PrivacyOptions)
    trainer.health = _options("health", trainer.health, HealthOptions)
    trainer.regularizer = _regularizer(trainer.regularizer)
    privacy.require_possible(trainer.privacy, trainer.regularizer)
    if trainer.evaluation is not None:
        trainer.evaluation = _evaluation(trainer.evaluation)
    if not callable(trainer.engine):
        trainer.engine = _options("engine", trainer.engine, EngineOptions, ENGINES, "name")
    trainer.fork = "" if trainer.fork is None else trainer.fork
    _require_place(trainer)


def matched(trainer: FederatedTrainer, model: Any, data: Any) -> FederatedDataModule:
    """The images that `fit` was given, as a data module.

    Raises:
        UserError: the model is not a method, or the data are not images.
    """
    if isinstance(data, nn.Module) and not isinstance(model, nn.Module):
        raise UserError("fit was given the images first; write fit(model, data)")
    if isinstance(model, type):
        raise UserError(
            f"fit was given the class {model.__name__}; "
            f"write fit({model.__name__}(resnet18()), data)"
        )
    if not isinstance(model, SSLMethod):
        raise UserError(
            f"fit was given a {type(model).__name__}, which is not an SSLMethod; "
            f"write e.g. fit(SimCLR(network), data)"
        )
    if type(model).loss is SSLMethod.loss:
        raise UserError(
            f"{type(model).__name__} has no loss of its own; write def loss(self, batch, z)"
        )
    if isinstance(data, FederatedDataModule):
        return data
    if isinstance(data, type | DataLoader | pl.LightningDataModule):
        name = data.__name__ if isinstance(data, type) else type(data).__name__
        raise UserError(
            f"fit was given {name} as images; write fit(model, FederatedDataModule(...))"
        )
    return FederatedDataModule(data, seed=trainer.seed)


def require_fitting_network(model: SSLMethod, data: FederatedDataModule) -> None:
    """Passes a blank image through the backbone, unless it is one of ours and its channels fit.

    Raises:
        UserError: it cannot take the images, or gives something else than ``feature_dim`` features.
    """
    network = model.backbone
    channels = data.channels
    taken = backbones.first_channels(network)
    if hasattr(network, "options") and taken in (channels, None):
        return
    blank = data.augment.plain(
        torch.zeros((2, *data.images.train.images.shape[1:]), dtype=torch.uint8)
    )
    try:
        features = backbones.passed(network, blank)
    except Exception as error:  # Whatever a user's network raises.
        reason = f"{type(error).__name__}: {first_line(error)}"
        instead = "a backbone for images of this size"
        if taken not in (channels, None):
            reason = f"its first convolution takes {taken} channels"
            instead = f"e.g. resnet18(channels={channels})"
        shape = " x ".join(map(str, blank.shape[1:]))
        raise UserError(
            f"the images have {channels} channel{'s' * (channels > 1)} ({shape}), and the backbone "
            f"{type(network).__name__} cannot take them ({reason}); write {instead}"
        ) from error
    if features.shape != (2, model.feature_dim):
        raise UserError(
            f"the backbone {type(network).__name__} gives features of shape "
            f"{tuple(features.shape[1:])} for these images, and its feature_dim is "
            f"{model.feature_dim}; set backbone.feature_dim before the method is made"
        )


def require_possible(trainer: FederatedTrainer) -> None:
    """Raises a `UserError` for what cannot be done with this model and these images."""
    data = trainer.datamodule
    if trainer.min_clients > data.num_clients:
        advice = f"at most {data.num_clients}: there are no more clients"
        raise OptionError("min_clients", trainer.min_clients, advice=advice)
    privacy.require_budget(trainer.privacy, trainer.max_rounds, trainer.epsilon_after)
    sample = trainer.client_data(0, round_number=1) if data.clients else None
    require_fitting_optimizer(trainer.regularizer, trainer.model, sample)


def _share(sampled: Any) -> int | float:
    if hasattr(sampled, "__index__") and not isinstance(sampled, bool):
        return whole_number("clients_per_round", sampled, at_least=1)
    if not (isinstance(sampled, float | np.floating) and 0 < float(sampled) <= 1):
        advice = "a whole number, or a share above 0 and of at most 1, e.g. {clients_per_round}=0.5"
        raise OptionError("clients_per_round", sampled, advice=advice)
    return float(sampled)


def _listed(name: str, value: Any, kind: Any) -> list[Any]:
    """A list of objects, made from one, several or none."""
    several = isinstance(value, Iterable) and not isinstance(value, str | kind)
    items = [] if value is None else list(value) if several else [value]
    for item in items:
        if not isinstance(item, kind):
            raise UserError(f"{name}={_shown(item)} {_what_instead(name, item)}")
    return items


def _what_instead(name: str, item: Any) -> str:
    homes: list[tuple[str, Any]] = [
        ("callbacks", RoundCallback),
        ("client_callbacks", pl.Callback),
        ("evaluations", Evaluation),
        ("logger", Logger),
        ("regularizer", Regularizer),
    ]
    if isinstance(item, type) and issubclass(item, dict(homes)[name]):
        made = "EvaluationOptions()" if name == "evaluations" else ""
        return f"is a class; write {name}=[{item.__name__}({made})]"
    for home, kind in homes:
        if isinstance(item, kind):
            return f"is of another kind; write {home}=[{type(item).__name__}(...)]"
    example = {
        "callbacks": "[EarlyStopping()]",
        "client_callbacks": "[Timer()], of pytorch_lightning.callbacks",
        "evaluations": "[Geometry(EvaluationOptions())], of fedx_pl.evaluation.embedding",
        "logger": 'True for a TensorBoard dashboard, False for none, or CSVLogger("logs")',
    }[name]
    return f"is not possible; write e.g. {name}={example}"


def _require_states_apart(callbacks: Iterable[RoundCallback]) -> None:
    keeping = [one for one in callbacks if type(one).state_dict is not RoundCallback.state_dict]
    for key, count in Counter(one.state_key for one in keeping).items():
        if count > 1:
            raise UserError(
                f"callbacks={key}: {count} callbacks would keep their states under this one name; "
                f"define the property state_key so that each has its own"
            )


def _options(name: str, value: Any, kind: type, words: Iterable[str] = (), field: str = "") -> Any:
    """An options object; None stands for the defaults, a word for a value of ``field``."""
    if isinstance(value, str) and field:
        if value not in words:
            raise UserError(f"{name}={value!r} is not known{known_names(value, words)}")
        return kind(**{field: value})
    if isinstance(value, type) and issubclass(value, Aggregator):
        raise UserError(
            f"{name}={value.__name__} is a class of a rule; write rule={value.__name__}"
        )
    return options_of(name, value, kind)


def _regularizer(value: Any) -> Regularizer:
    if value is None:
        return Regularizer()
    if isinstance(value, str):
        if value not in REGULARIZERS:
            raise UserError(f"regularizer={value!r} is not known{known_names(value, REGULARIZERS)}")
        return REGULARIZERS[value]()
    if isinstance(value, Regularizer):
        return value
    made = (
        value.__name__ if isinstance(value, type) and issubclass(value, Regularizer) else "FedProx"
    )
    raise UserError(f"regularizer={_shown(value)} is not possible; write regularizer={made}()")


def _evaluation(value: Any) -> EvaluationOptions | None:
    if isinstance(value, bool):
        return EvaluationOptions() if value else None
    if isinstance(value, Evaluation):
        raise UserError(
            f"evaluation={_shown(value)} is an evaluation of its own; write evaluations=[...]"
        )
    options: EvaluationOptions = _options("evaluation", value, EvaluationOptions)
    return options


def _require_place(trainer: FederatedTrainer) -> None:
    """Checks where and how a run is executed."""
    trainer.precision = _SHORT_PRECISIONS.get(str(trainer.precision), trainer.precision)
    check("precision", trainer.precision, choices=PRECISIONS)
    _require_one_device(trainer.devices)
    trainer.device = device_of(trainer.accelerator, trainer.devices)
    resolve_precision(trainer.precision, trainer.device)  # Refuses what this device cannot do.
    if trainer.max_time is not None:
        try:
            Timer(trainer.max_time)
        except (MisconfigurationException, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f'max_time={trainer.max_time!r} is not a time; write "00:12:00:00" '
                f'(days, hours, minutes, seconds), a timedelta or e.g. {{"hours": 12}}'
            ) from error
    folder = trainer.default_root_dir
    if folder is not None and not isinstance(folder, str | Path):
        raise OptionError("default_root_dir", folder, advice='e.g. "runs/first"')
    if folder is not None and Path(folder).is_file():
        raise OptionError("default_root_dir", str(folder), "is a file", "the name of a folder")


def _require_one_device(devices: Any) -> None:
    word = devices in ("auto", "1", 1) and not isinstance(devices, bool)
    listed = (
        isinstance(devices, list | tuple)
        and len(devices) == 1
        and type(devices[0]) is int
        and devices[0] >= 0
    )
    if not word and not listed:
        advice = '{devices}="auto", or {devices}=[0] for the first GPU: one is used'
        raise OptionError("devices", devices, advice=advice)


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    return repr(value) if isinstance(value, str | int | float) else f"{type(value).__name__}(...)"
