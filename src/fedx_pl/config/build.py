"""Makes the objects of a configuration, exactly those that a Python user would write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.loggers import Logger
from torch import nn

from fedx_pl import backbone_options, backbones
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.compose import code_words, compose, load
from fedx_pl.config.registry import (
    BACKBONE,
    CALLBACK,
    DATA,
    ENGINE,
    EVALUATION,
    LOGGER,
    METHOD,
    MIXIN,
    RULE,
    WORDS,
    find,
    is_foreign,
    make,
    making,
)
from fedx_pl.config.schema import TENSORBOARD, Config, in_keys
from fedx_pl.data import sources
from fedx_pl.data.images import ARRAYS, DataOptions, ImageData
from fedx_pl.data.module import FederatedDataModule
from fedx_pl.data.partition import Partition
from fedx_pl.data.sources.cache import fingerprint_of
from fedx_pl.engines import Engine
from fedx_pl.errors import Report, UserError, say
from fedx_pl.federation import privacy
from fedx_pl.federation.content import flat
from fedx_pl.federation.device import resolve_device
from fedx_pl.federation.identity import Identity
from fedx_pl.federation.regularizers import require_fitting_optimizer
from fedx_pl.methods.base import SSLMethod
from fedx_pl.mixins import MIXINS, wrap
from fedx_pl.seeding import derive
from fedx_pl.trainer import FederatedTrainer

if TYPE_CHECKING:
    from fedx_pl.federation.round import GlobalState


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to start: the trainer, with the model and the images attached to it."""

    config: Config
    trainer: FederatedTrainer
    model: SSLMethod
    data: FederatedDataModule

    @in_keys()
    def fit(self) -> FederatedTrainer:
        """Trains, and returns the trainer, which holds the results."""
        self.trainer.fit(self.model, self.data)
        return self.trainer

    def load(self, global_state: GlobalState) -> SSLMethod:
        """Loads the weights of a global state into the model, and returns it."""
        self.model.load_shared(global_state.weights)
        return self.model


@in_keys()
def build(
    config: Config,
    report: Report = say,
    *,
    images: ImageData | None = None,
    partition: Partition | None = None,
    callbacks: Sequence[RoundCallback] = (),
    engine: Callable[[FederatedTrainer], Engine] | None = None,
    progress: bool = False,
) -> Run:
    """Makes everything that a configuration describes, and loads the images.

    Args:
        config: the configuration. For given arrays, the run's ``data.*`` describes them:
            ``data.name=arrays``, their side, and a mean of 0.5 and a standard deviation of 0.25
            unless other numbers were typed.
        report: prints a line of information.
        images: the images; loaded if not given.
        partition: how images are dealt to clients; that of the configuration if not given.
        callbacks: more callbacks than those of the configuration.
        engine: where clients train; that of the configuration if not given.
        progress: whether the trainer shows a progress bar.
    """
    require_possible(config)
    if images is not None and images.options is None:
        config, images = _arrays(config, images)
    data = make_data(config, report, images=images, partition=partition)
    data.setup()
    if images is None and data.loader is not None:
        config = replace(config, data=data.options)  # Their size is known only now.
    model = make_model(config, channels=data.channels, image_size=data.image_size)
    trainer = make_trainer(config, callbacks=callbacks, engine=engine, progress=progress)
    trainer.attach(model, data)
    return Run(config=config, trainer=trainer, model=model, data=data)


@in_keys()
def require_possible(config: Config) -> None:
    """Raises a `UserError` for what would fail later, before images are fetched for minutes."""
    privacy.require_possible(config.privacy, config.regularizer.made())
    resolve_device(config.run.device)
    if not is_foreign(BACKBONE, config.backbone.name):
        backbone_options.require_possible(config.backbone)
    brought(config)
    for kind, words in ((LOGGER, config.logger), (CALLBACK, config.callbacks)):
        for word in words:
            find(kind, word)
    method = find(METHOD, config.method.name)
    if (
        method.configure_optimizers is SSLMethod.configure_optimizers
        or config.regularizer.name == "none"
    ):
        return
    try:
        model = make_model(config, channels=3, image_size=32)
    except Exception:  # It is reported when the model is made for the real images.
        return
    require_fitting_optimizer(config.regularizer.made(), model)


def brought(config: Config) -> list[Any]:
    """All classes and functions of the user that decide the result of a configuration."""
    deciding = {where: kind for where, kind in WORDS.items() if kind is not ENGINE}
    words = [
        (kind, str(getattr(getattr(config, group), key))) for (group, key), kind in deciding.items()
    ]
    words += [(MIXIN, word) for word in config.mixins] + [
        (EVALUATION, word) for word in config.evaluation.also
    ]
    return [find(kind, word) for kind, word in words if is_foreign(kind, word)]


@in_keys()
def make_data(
    config: Config,
    report: Report = say,
    *,
    images: ImageData | None = None,
    partition: Partition | None = None,
) -> FederatedDataModule:
    """The data module of a configuration, or of given images; nothing is loaded yet."""
    return FederatedDataModule(
        config.data if images is None else images,
        loader=_loader(config),
        partition=partition or config.partition.made(config.federation.clients),
        batch_size=config.optim.batch_size,
        augment=config.augment,
        mean=config.data.mean,
        std=config.data.std,
        resident_gb=config.run.resident_gb,
        seed=config.seed,
        report=report,
    )


@in_keys()
def load_images(config: Config, report: Report = print) -> ImageData:
    """Loads the images of a configuration, without dealing them to clients."""
    return sources.load(config.data, seed=config.seed, report=report, source=_loader(config))


def _loader(config: Config) -> sources.Source | None:
    """The user's function that loads the images; None if the data set is built in."""
    return find(DATA, config.data.name) if is_foreign(DATA, config.data.name) else None


@in_keys("method")
def make_model(config: Config, *, channels: int, image_size: int) -> SSLMethod:
    """The method of a configuration with new weights, the same for the same seed."""
    method: type[SSLMethod] = find(METHOD, config.method.name)
    options: dict[str, Any] = {}
    for name, mixin in MIXINS.items():
        chosen = getattr(config, name, None)
        if chosen is not None and chosen.enabled:
            method = wrap(mixin, method)
            options[name] = chosen
    for word in config.mixins:
        method = wrap(find(MIXIN, word), method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        backbone = make_backbone(config, channels=channels, image_size=image_size)
        with making(METHOD.typed(config.method.name)):
            try:
                model = method(backbone, optim=config.optim, **config.method_options, **options)
            except TypeError as error:
                raise UserError(
                    f"method={config.method.name} cannot be made ({error}); its __init__ takes the "
                    f"backbone and passes other keyword arguments on: "
                    f"def __init__(self, backbone, *, mine=1, **base)"
                ) from error
    return model.to(memory_format=torch.channels_last)


def make_backbone(config: Config, *, channels: int, image_size: int) -> nn.Module:
    """The backbone of a configuration: a built-in one, or what the user's function returns.

    That function may take ``channels`` and ``image_size``; its other arguments are the keys
    ``backbone.*``.
    """
    options = config.backbone
    if not is_foreign(BACKBONE, options.name):
        return backbones.build(options, channels=channels, image_size=image_size)
    network = make(BACKBONE, options.name, options, channels=channels, image_size=image_size)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"backbone.name={options.name} returns {network!r}, which is not a torch module"
        )
    network.options = options  # type: ignore[assignment]
    network.made_by = find(BACKBONE, options.name)
    return backbones.with_feature_dim(network, channels=channels, image_size=image_size)


def make_loggers(config: Config) -> list[Logger | bool]:
    """The Lightning loggers of a configuration; True stands for our dashboard."""
    words = list(dict.fromkeys(config.logger))
    others = [
        make(LOGGER, word, None, save_dir=config.run_folder)
        for word in words
        if word != TENSORBOARD
    ]
    return [*([True] if TENSORBOARD in words else []), *others]


@in_keys()
def make_trainer(
    config: Config,
    *,
    callbacks: Sequence[RoundCallback] = (),
    engine: Callable[[FederatedTrainer], Engine] | None = None,
    progress: bool = False,
) -> FederatedTrainer:
    """The trainer of a configuration; the arguments are those of `build`."""
    federation = config.federation
    run = config.run
    accelerator, _, number = run.device.partition(":")
    return FederatedTrainer(
        max_rounds=federation.rounds,
        local_epochs=federation.epochs,
        clients_per_round=federation.fraction,
        min_clients=federation.min_clients,
        batchnorm=federation.batchnorm,
        aggregate=config.aggregate,
        regularizer=config.regularizer.made(),
        privacy=config.privacy,
        rule=find(RULE, config.aggregate.rule) if is_foreign(RULE, config.aggregate.rule) else None,
        evaluation=config.evaluation,
        evaluations=[
            make(EVALUATION, word, None, config.evaluation) for word in config.evaluation.also
        ],
        health=config.health,
        engine=engine or partial(make, ENGINE, config.engine.name, None, options=config.engine),
        callbacks=[*(make(CALLBACK, word, None) for word in config.callbacks), *callbacks],
        logger=make_loggers(config),
        default_root_dir=config.run_folder,
        accelerator=accelerator,
        devices=[int(number or 0)],
        precision=config.optim.precision,
        compile=run.compile,
        threads=run.threads,
        seed=config.seed,
        enable_progress_bar=progress,
        keep=run.keep,
        client_curves=run.client_curves,
        resume=run.resume != "never",
        fork=config.fork,
        identity=typed_identity(config),
    )


def typed_identity(config: Config) -> Identity:
    """The identity of a run that was started from the command line."""
    return Identity(
        name=config.name,
        seed=config.seed,
        content=flat(config.content()),
        hash=config.hash,
        text=config.to_yaml(),
        hparams=config.hparams(),
        read=lambda file: flat(
            load(file, trusted=code_words(dataclasses.asdict(config))).content()
        ),
        typed=True,
        names_folder=not config.run.dir,
    )


def _arrays(config: Config, data: ImageData) -> tuple[Config, ImageData]:
    """The configuration of given arrays, and the arrays with a fingerprint of their content."""
    _, side, _, channels = data.train.images.shape
    usual = (
        compose([f"data={config.data.name}"]).data if config.data.name != ARRAYS else DataOptions()
    )
    mean = config.data.mean if config.data.mean != usual.mean else []
    std = config.data.std if config.data.std != usual.std else []
    options = DataOptions(
        name=ARRAYS,
        image_size=side,
        grayscale=channels == 1,
        mean=list(mean or [0.5] * channels),
        std=list(std or [0.25] * channels),
    )
    name = config.name
    if name.startswith(f"{config.data.name}-"):  # Not a name that the user chose.
        name = ARRAYS + name.removeprefix(config.data.name)
    data = replace(
        data, name=ARRAYS, fingerprint=fingerprint_of(data.train, data.test), options=options
    )
    return replace(config, name=name, data=options), data


def lacks_gpu(config: Config) -> bool:
    """Whether the paper's setting would be trained on CPUs; a Ray cluster may have GPUs."""
    elsewhere = config.engine.name == "ray" and bool(config.engine.address)
    return (
        config.profile == "paper"
        and not elsewhere
        and resolve_device(config.run.device).type == "cpu"
    )
