"""Everything a run needs, made ready but not started: data, split, model, device; and what it will cost."""

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fedx_pl import backbones
from fedx_pl.callbacks.angle import Angle
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.compose import compose, from_tree, load
from fedx_pl.config.registry import find_callback, find_method
from fedx_pl.config.schema import Config, flat
from fedx_pl.data import sources
from fedx_pl.data.augment import Augment
from fedx_pl.data.batches import ClientData, ImageStore, batches_of
from fedx_pl.data.images import ARRAYS, DataOptions, ImageData, Split, normalization
from fedx_pl.data.sources.cache import fingerprint_of
from fedx_pl.engines import EngineOptions
from fedx_pl.errors import UserError
from fedx_pl.evaluation.evaluate import Evaluator
from fedx_pl.federation import estimate, privacy, regularizers
from fedx_pl.federation.allocator import keep_freed_memory
from fedx_pl.federation.client import LocalTrainer, resolve_device, resolve_precision
from fedx_pl.federation.round import GlobalState
from fedx_pl.federation.run_folder import RunSettings
from fedx_pl.files import size_of
from fedx_pl.methods.base import LocalRound, SSLMethod
from fedx_pl.mixins import MIXINS, wrap
from fedx_pl.provenance import loaded_code
from fedx_pl.provenance.foreign_code import Record
from fedx_pl.seeding import derive


@dataclass(frozen=True)
class Plan:
    """A run that could start now."""

    config: Config
    data: ImageData
    clients: list[np.ndarray]  # each client's rows of the training images
    device: torch.device
    precision: str
    model: SSLMethod
    augment: Augment

    @cached_property
    def store(self) -> ImageStore:
        """The training images, put where training happens at first use."""
        return self.store_of(self.data.train)

    def store_of(self, split: Split) -> ImageStore:
        """Images where training happens."""
        return ImageStore(split.images, self.device, int(self.config.run.resident_gb * 1e9))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Measures the encoder on the labelled images."""
        return Evaluator(self.config.evaluation, self.data, self.augment.plain, self.config.seed)

    @cached_property
    def regularizer(self) -> regularizers.Regularizer:
        """What holds the clients together beside the averaging."""
        return regularizers.make(self.config.regularizer)

    @cached_property
    def own_backbone(self) -> str:
        """The class of a backbone that the method brought or changed; empty if it is the configuration's."""
        images, size = self.data.train.images, self.augment.options.size
        with torch.random.fork_rng(devices=[]):
            given = backbones.build(self.config.backbone, channels=images.shape[3], image_size=size or images.shape[1])
        trained = self.model.backbone
        same = type(trained) is type(given) and repr(trained) == repr(given)
        return "" if same else type(trained).__qualname__

    def first_state(self) -> GlobalState:
        """The global state before the first round."""
        return GlobalState(weights=self.model.shared_state(), server=self.regularizer.server_state(self.model))

    def load(self, global_state: GlobalState) -> SSLMethod:
        """The model with the weights of a global state."""
        self.model.load_shared(global_state.weights)
        return self.model

    def trainer(self, tick: Callable[[], None], secret_noise: bool = False) -> LocalTrainer:
        """Trains clients on this plan's model.

        Args:
            tick: called after every step.
            secret_noise: the noise of `privacy.noise` cannot be told from the run's seed; for real clients.
        """
        return LocalTrainer(
            self.model,
            device=self.device,
            precision=self.precision,
            compile=self.config.run.compile,
            regularizer=self.regularizer,
            privacy=self.config.privacy,
            secret_noise=secret_noise,
            callbacks=[Angle(self.config.run.client_curves)],
            tick=tick,
        )

    def client_data(self, client: int, round_number: int, rows: np.ndarray | None = None) -> ClientData:
        """A client's batches in a round; ``rows`` if not the split's but its own, as at a site."""
        rows = self.clients[client] if rows is None else rows
        seed = derive(self.config.seed, "data", round_number, client)
        size = self.config.optim.batch_size
        return batches_of(self.store, rows, self.augment, batch_size=size, model=self.model, seed=seed)

    def own_callbacks(self) -> list[RoundCallback]:
        """What ``callbacks=[...]`` names; each class is made without arguments."""
        return [find_callback(path)() for path in self.config.callbacks]

    def run_settings(self) -> RunSettings:
        """What the run folder is told."""
        config = self.config
        return RunSettings(
            folder=config.run_folder,
            named_by_hand=bool(config.run.dir),
            content=flat(config.content()),
            hash=config.hash,
            text=config.to_yaml(),
            read=lambda file: flat(load(file, trusted=config.method.name).content()),
            code=Record(loaded_code.require_current(type(self.model)), self.own_backbone),
            rounds=config.federation.rounds,
            clients_per_round=self.clients_per_round if self.clients else config.federation.clients,
            first_state=self.first_state(),
            private_bytes=size_of(self.model.kept_tensors()),
            clients=self.clients,
            partition=config.content()["partition"],
            data=self.data,
            keep=config.run.keep,
            resume=config.run.resume != "never",
            fork=config.fork,
        )

    @property
    def engine(self) -> EngineOptions:
        """Where clients are to be trained."""
        return self.config.engine

    @property
    def threads(self) -> int:
        """CPU threads that the user wants; 0: no matter."""
        return self.config.run.threads

    @property
    def on_cpu(self) -> bool:
        """Whether the user wants no GPU."""
        return self.config.run.device == "cpu"

    def elsewhere(self, *, threads: int, gpu: bool) -> Callable[[Callable[[str], None]], "Plan"]:
        """Makes the same plan in another process, without test images: only this one evaluates.

        Args:
            threads: of that process.
            gpu: whether it has one; it sees no other.
        """
        run = replace(self.config.run, threads=threads, device="cuda" if gpu else "cpu")
        return partial(_prepare_again, asdict(replace(self.config, run=run, callbacks=[])))  # They are called here.

    @property
    def clients_per_round(self) -> int:
        """How many train in a round."""
        federation = self.config.federation
        clients = len(self.clients) or federation.clients  # Real sites are not in the plan.
        share = int(federation.fraction * clients + 0.5)  # `round` would make 2 of half of 5.
        return max(share, federation.min_clients, 1)

    def choose_clients(self, round_number: int, present: Sequence[int] | None = None) -> list[int]:
        """Who trains in a round: all, or a sample of `federation.fraction`; of all clients or of those ``present``."""
        able = np.arange(len(self.clients)) if present is None else np.array(present)
        draw = np.random.default_rng(derive(self.config.seed, "clients", round_number))
        chosen = draw.choice(len(able), size=min(self.clients_per_round, len(able)), replace=False)
        return sorted(able[chosen].tolist())

    def class_counts(self) -> tuple[np.ndarray, list[str]]:
        """Images of each class at each client (clients, classes) and the classes' names; one column without labels."""
        labels = self.data.train.labels
        if labels is None:
            return np.array([[len(rows)] for rows in self.clients]), ["images"]
        names = [*self.data.classes, "unlabelled"]
        counts = np.stack([np.bincount(labels[rows] % len(names), minlength=len(names)) for rows in self.clients])
        return (counts, names) if counts[:, -1].any() else (counts[:, :-1], names[:-1])

    def epsilon_after(self, round_number: int) -> float:
        """What the client that was chosen most often has spent of its privacy by the end of a round.

        Which sites were there in which round a plan does not know: one that has missed none is assumed.
        """
        options, most = self.config.privacy, round_number
        if self.clients:
            times = Counter(client for number in range(1, round_number + 1) for client in self.choose_clients(number))
            most = max(times.values())
        return privacy.epsilon(options.noise, most, options.delta)

    def require_budget(self) -> None:
        """Raises a `UserError` if the run would spend more than `privacy.max_epsilon`."""
        options, rounds = self.config.privacy, self.config.federation.rounds
        if options.max_epsilon and (spent := self.epsilon_after(rounds)) > options.max_epsilon:
            enough = bisect(range(1, rounds + 1), options.max_epsilon, key=self.epsilon_after)
            fewer = f"federation.rounds={enough} or " if enough else ""
            raise UserError(
                f"privacy.max_epsilon={options.max_epsilon} is less than the {spent:.2f} that "
                f"privacy.noise={options.noise} spends in {rounds} rounds; type {fewer}a larger privacy.noise"
            )

    def steps_of(self, client: int) -> int:
        """Optimiser steps of a client in one round."""
        return len(self.client_data(client, round_number=1)) * self.config.federation.epochs

    def steps_between(self, first: int, last: int) -> int:
        """Optimiser steps of all clients in the rounds ``first`` to ``last``; with sampled clients, as expected."""
        steps = sum(self.steps_of(client) for client in range(len(self.clients)))
        return int(steps * self.clients_per_round / len(self.clients) * (last - first + 1))

    def estimate_seconds(self, first_round: int = 1) -> float:
        """Expected duration, from a few training steps and one batch of features; the model stays as it is."""
        rounds, epochs = self.config.federation.rounds, self.config.federation.epochs
        largest = max(range(len(self.clients)), key=lambda client: len(self.clients[client]))
        data = self.client_data(largest, round_number=1)
        # As in the last round: before it, a warm-up may leave terms out that the other rounds have.
        local = LocalRound(
            round=rounds,
            rounds=rounds,
            client=largest,
            epochs=epochs,
            epochs_before=0,
            seed=self.config.seed,
            data=data,
        )
        per_step = estimate.step_seconds(self.model, data, local, self.device, self.precision)
        with estimate.restored(self.model):
            evaluating = self.evaluator.estimate_seconds(self.model, self.device, first_round, rounds)
        return self.steps_between(first_round, rounds) * per_step + evaluating


def prepare(config: Config, report: Callable[[str], None] = print) -> Plan:
    """Loads the data, splits it and builds the model.

    Args:
        config: of the run.
        report: takes one line for each thing worth knowing.
    """
    data = load_data(config, report)
    clients = config.partition.made(config.federation.clients).deal(data, config.seed)
    return assemble(config, data, clients)


def _prepare_again(tree: dict[str, Any], report: Callable[[str], None]) -> Plan:
    plan = prepare(from_tree(tree, "the driver's configuration"), report=report)
    return replace(plan, data=replace(plan.data, test=None))


def load_data(config: Config, report: Callable[[str], None]) -> ImageData:
    """Loads the images of a configuration; what else may be wrong in it is said first, since fetching takes minutes."""
    privacy.require_possible(config.privacy, config.regularizer.name)
    resolve_device(config.run.device)
    backbones.require_possible(config.backbone)
    _require_fitting_optimizer(config)
    for path in config.callbacks:
        find_callback(path)
    return sources.load(config.data, seed=config.seed, report=report)


def assemble(config: Config, data: ImageData, clients: list[np.ndarray]) -> Plan:
    """Builds the model for data that is there already.

    Args:
        config: of the run. For arrays of one's own, ``data.*`` of the plan's says what they are: ``data.name=arrays``,
            their side, and a mean of 0.5 and a standard deviation of 0.25 unless other numbers were typed.
        data: to train on, or to evaluate on; of `sources.load`, or made of arrays.
        clients: who owns which rows; none where the images are elsewhere.
    """
    privacy.require_possible(config.privacy, config.regularizer.name)
    if data.options is None:
        config, data = _arrays(config, data)
    images = data.train.images
    device = resolve_device(config.run.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if device.type == "cpu":
        keep_freed_memory()
    _, side, _, channels = images.shape
    options = config.augment.for_side(side)
    augment = Augment(options, *normalization(config.data.mean, config.data.std, channels))
    model = build_model(config, channels=channels, image_size=options.size or side)
    plan = Plan(config, data, clients, device, resolve_precision(config.optim.precision, device), model, augment)
    plan.require_budget()
    _require_fitting_optimizer(config, plan)
    return plan


def _arrays(config: Config, data: ImageData) -> tuple[Config, ImageData]:
    """A configuration that claims no data set for arrays, and the data with a fingerprint of their content."""
    _, side, _, channels = data.train.images.shape
    usual = compose([f"data={config.data.name}"]).data if config.data.name != ARRAYS else DataOptions()
    mean = config.data.mean if config.data.mean != usual.mean else []
    std = config.data.std if config.data.std != usual.std else []
    options = DataOptions(
        name=ARRAYS, image_size=side, grayscale=channels == 1,
        mean=list(mean or [0.5] * channels), std=list(std or [0.25] * channels),
    )  # fmt: skip
    name = config.name
    if name.startswith(f"{config.data.name}-"):  # Not one of the user's own.
        name = ARRAYS + name.removeprefix(config.data.name)
    data = replace(data, name=ARRAYS, fingerprint=fingerprint_of(data.train, data.test), options=options)
    return replace(config, name=name, data=options), data


def _require_fitting_optimizer(config: Config, plan: Plan | None = None) -> None:
    """Raises a `UserError` if the regularizer does not work with an optimizer of the method's own.

    One that needs the Trainer, or the data before there are any, cannot be asked yet; the regularizer looks again
    when training starts.

    Args:
        config: of the run.
        plan: if there is one; before, a model for usual images is made.
    """
    method = find_method(config.method.name)
    own = method.configure_optimizers is not SSLMethod.configure_optimizers
    if config.regularizer.name != "scaffold" or not own:
        return
    federation = config.federation
    try:
        model = plan.model if plan else build_model(config, channels=3, image_size=32)
        data: Any = plan.client_data(0, round_number=1) if plan and plan.clients else None
        with estimate.restored(model):
            model.local = LocalRound(
                round=1,
                rounds=federation.rounds,
                client=0,
                epochs=federation.epochs,
                epochs_before=0,
                seed=config.seed,
                data=data,
            )
            optimizers = regularizers.optimizers_in(model.configure_optimizers())
    except Exception:
        return
    regularizers.make(config.regularizer).require_fitting(optimizers, method.__name__)


def build_model(config: Config, *, channels: int, image_size: int) -> SSLMethod:
    """The method of the configuration with freshly initialised weights, the same for the same seed."""
    method = find_method(config.method.name)
    options: dict[str, Any] = {}
    for name, mixin in MIXINS.items():
        if (chosen := getattr(config, name)).enabled:
            method, options[name] = wrap(mixin, method), chosen
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        backbone = backbones.build(config.backbone, channels=channels, image_size=image_size)
        try:
            model = method(backbone, optim=config.optim, **config.method_options, **options)
        except TypeError as error:
            raise UserError(
                f"method={config.method.name} cannot be made ({error}); its __init__ takes the backbone and passes "
                f"other keyword arguments on: def __init__(self, backbone, *, mine=1, **base)"
            ) from error
    return model.to(memory_format=torch.channels_last)


def lacks_gpu(config: Config) -> bool:
    """Whether the paper's setting is to be trained on CPUs; what a Ray cluster has is not known here."""
    elsewhere = config.engine.name == "ray" and bool(config.engine.address)
    return config.profile == "paper" and not elsewhere and resolve_device(config.run.device).type == "cpu"
