"""`FederatedTrainer`, which is for a federation what `pl.Trainer` is for one machine.

    data = FederatedDataModule("cifar10", partition=Dirichlet(clients=10, beta=0.5))
    trainer = FederatedTrainer(max_rounds=3, local_epochs=1, default_root_dir="runs/try")
    trainer.fit(FedXBYOL(resnet18(width=16)), data)
    trainer.evaluate()

A round has four numbered steps, in `FederatedTrainer._run_round`. All else is done by callbacks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger

from fedx_pl import engines
from fedx_pl.callbacks import arguments
from fedx_pl.callbacks.angle import Angle
from fedx_pl.callbacks.base import RoundCallback, kept_state
from fedx_pl.callbacks.built_in import all_callbacks
from fedx_pl.callbacks.options import HealthOptions
from fedx_pl.engines import Engine, EngineOptions
from fedx_pl.errors import UserError
from fedx_pl.evaluation import Evaluation
from fedx_pl.evaluation.evaluate import Evaluator
from fedx_pl.evaluation.options import EvaluationOptions
from fedx_pl.federation.aggregate import Aggregator
from fedx_pl.federation.allocator import keep_freed_memory
from fedx_pl.federation.attached import Attached
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.collect import collect, next_state, require_enough
from fedx_pl.federation.identity import Identity, identity_of, made_with
from fedx_pl.federation.options import AggregateOptions, PrivacyOptions
from fedx_pl.federation.pending import UnfinishedRound
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.federation.robust import make_rule
from fedx_pl.federation.round import GlobalState, RoundRecord
from fedx_pl.federation.run_folder import open_run
from fedx_pl.federation.run_state import DAMAGED, ClientRecord, RunState
from fedx_pl.files import require_there
from fedx_pl.methods.base import SSLMethod

if TYPE_CHECKING:
    from fedx_pl.data.module import FederatedDataModule


@dataclass(kw_only=True, eq=False, repr=False)
class FederatedTrainer(Attached):
    """Trains one model across clients. Run again, it resumes after the last finished client.

    Nothing happens before `fit`.

    Args:
        max_rounds: communication rounds.
        local_epochs: epochs that a client trains in a round.
        clients_per_round: how many clients train in a round: a float is a share (1.0: all of them),
            an int a number.
        min_clients: good updates that a round needs.
        batchnorm: ``average`` BatchNorm's statistics too, or keep each client's own (``local``).
        aggregate: the rule that combines the clients' models; the weighted mean if not given.
        rule: a rule of your own; ``aggregate`` then has its settings.
        regularizer: keeps the clients' weights close, e.g. ``FedProx(mu=0.01)``.
        privacy: what a client does to its update before it leaves.
        evaluation: how and how often the encoder is evaluated; None: never.
        evaluations: evaluations of your own, run whenever kNN is due.
        health: when to raise an alarm.
        engine: where clients train: ``EngineOptions(name="ray")``, or a subclass of `Engine`; this
            process if not given.
        callbacks: round callbacks.
        client_callbacks: Lightning callbacks of every client's `pl.Trainer`.
        logger: True: a TensorBoard dashboard in the run folder; or Lightning loggers, which get the
            round's numbers.
        default_root_dir: the run folder; a folder in ``runs`` named after the run if not given.
        accelerator: ``auto``, ``cpu`` or ``gpu``.
        devices: which GPU, e.g. ``[1]``; the first if not given.
        precision: as for `pl.Trainer`, or ``auto``: bf16-mixed on GPUs that have it, 16-mixed on
            older ones, else 32-true.
        compile: run the networks through `torch.compile`.
        threads: CPU threads; 0: torch's choice.
        seed: all randomness of the rounds derives from it, but not the model's first weights.
        max_time: no round begins after this time; as for `pl.Trainer`: ``"00:12:00:00"``, a
            timedelta, a dict.
        fast_dev_run: one round of one batch, or of this many, with two clients, in a temporary
            folder.
        enable_progress_bar: show progress on the terminal.
        keep: how many checkpoints to keep.
        client_curves: how many clients get drift, angle and curves of their own.
        resume: resume the run in the run folder; False: the folder must be new.
        fork: a run folder to take the first weights from.
        identity: how the run is described in its folder; made from the objects if not given.
    """

    max_rounds: int = 100
    local_epochs: int = 10
    clients_per_round: int | float = 1.0
    min_clients: int = 1
    batchnorm: str = "average"
    aggregate: AggregateOptions = field(default_factory=AggregateOptions)
    rule: type[Aggregator] | None = None
    regularizer: Regularizer = field(default_factory=Regularizer)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    evaluation: EvaluationOptions | None = field(default_factory=EvaluationOptions)
    evaluations: list[Evaluation] = field(default_factory=list)
    health: HealthOptions = field(default_factory=HealthOptions)
    engine: EngineOptions | Callable[[FederatedTrainer], Engine] = field(
        default_factory=EngineOptions
    )
    callbacks: list[RoundCallback] = field(default_factory=list)
    client_callbacks: list[pl.Callback] = field(default_factory=list)
    logger: Logger | Sequence[Logger | bool] | bool = True
    default_root_dir: str | Path | None = None
    accelerator: str = "auto"
    devices: Sequence[int] | int | str = "auto"
    precision: str = "auto"
    compile: bool = False
    threads: int = 0
    seed: int = 0
    max_time: str | timedelta | dict[str, int] | None = None
    fast_dev_run: bool | int = False
    enable_progress_bar: bool = True
    keep: int = 2
    client_curves: int = 10
    resume: bool = True
    fork: str | Path = ""
    identity: Identity | None = None

    def __post_init__(self) -> None:
        arguments.settle(self)
        if self.fast_dev_run:
            self.max_rounds = self.local_epochs = 1
            self.clients_per_round = 2
            self.evaluation = None
            self.logger = False
        self.callbacks = all_callbacks(self)
        self.made_with = made_with(self)
        self.should_stop = False
        self.excluded: list[int] = []  # clients in quarantine
        self.untrained_seconds = 0.0  # of evaluating the untrained network
        self.state = RunState()
        self.global_state = GlobalState(weights={})
        self._record: RoundRecord | None = None
        self._holds_a_run = False

    # --- public methods ---------------------------------------------------------------------------

    def fit(self, model: SSLMethod, data: FederatedDataModule) -> None:
        """Trains to the last round. A finished round is on disk before the next one begins.

        Args:
            model: holds the first weights; at the end, those of the last round.
            data: the clients' images; anything but a `FederatedDataModule` is turned into one.

        Raises:
            UserError: the run folder holds another run, or an argument is not possible.
        """
        self.attach(model, data)
        with self._open():
            try:
                self._set_up()
                with closing(engines.make(self.engine, self)) as self.workplace:
                    model.load_shared(self.global_state.weights)
                    self._call("on_fit_start")
                    while self.current_round < self.max_rounds and not self.should_stop:
                        self._run_round()
                    # Again, in case an earlier process was killed after its last commit.
                    self.checkpoints.clear()
                    self.unfinished.clear()
                    self._call("on_fit_end")
            except BaseException as exception:
                with ExitStack() as hooks:  # All are called, even if one of them fails.
                    # If the folder is gone, that is why something failed.
                    hooks.callback(require_there, self.folder)
                    for callback in reversed(self._ready):
                        hooks.callback(callback.on_exception, self, exception)
                raise

    def evaluate(self) -> dict[str, float]:
        """Accuracies of the trained model in percent, by kNN and by a linear probe."""
        if not self._holds_a_run:
            raise UserError("there is nothing to evaluate yet; call fit(model, data) first")
        return self.evaluator.evaluate(self.model, self.device, knn=True, linear=True)

    def attach(self, model: SSLMethod, data: FederatedDataModule) -> None:
        """Loads the images and checks that all parts fit together, as `fit` does first."""
        self._holds_a_run = False
        if self.threads:
            torch.set_num_threads(self.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        data = arguments.matched(self, model, data)
        data.setup()
        arguments.require_fitting_network(model, data)
        self.model = model
        self.datamodule = data
        self.evaluator = Evaluator(
            self.evaluation or EvaluationOptions(), data.images, data.augment.plain, seed=self.seed
        )
        self.description = self.identity or identity_of(self, model, data)
        self.folder = Path(self.default_root_dir or Path("runs") / self.description.folder_name)
        arguments.require_possible(self)

    # --- a round ----------------------------------------------------------------------------------

    def _run_round(self) -> None:
        number = self.current_round + 1
        # (1) Choose the clients and freeze what they all start from.
        clients = self.workplace.choose(number, away=self.excluded)
        started = time.perf_counter()  # Only now, since real sites may have been waited for.
        record = self._record = RoundRecord(context=self._context(number), clients=clients)
        self._call("on_round_start", record)
        # (2) Each trains by itself, and (3) its update is aggregated as it arrives.
        rule = make_rule(self.aggregate, self.global_state, self.rule)
        saved = collect(self, record, rule)
        require_enough(self, record)
        self.global_state = next_state(self, record, rule, saved=saved)
        self.model.load_shared(self.global_state.weights)
        record.train_seconds = time.perf_counter() - started
        # (4) Evaluate, log, save. Logs after the last saved round are cut off when a run is
        # resumed.
        record.row = record.summary()
        self._call("on_round_end", record)
        self._commit(record, saved)
        self._call("on_round_saved", record)

    def _commit(self, record: RoundRecord, saved: dict[int, ClientRecord]) -> None:
        self.state = RunState(
            round=record.number,
            rows=[*self.state.rows, record.row],
            untrained=self.state.untrained,
            clients={**self.state.clients, **saved},
            seconds=self.state.seconds + record.row["round_seconds"],
            callbacks={callback.state_key: kept_state(callback) for callback in self.callbacks},
            config=self.description.hash,
            described=self.described,
        )
        self.checkpoints.commit(self.state, self.global_state)
        self.unfinished.clear()

    # --- the run folder ---------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Opens the run folder and restores the state of its last saved round."""
        with ExitStack() as resources:
            if self.fast_dev_run:
                self.folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            self.should_stop = False
            self.excluded = []
            self._record = None
            self.checkpoints = Checkpoints(self.folder, self.keep)
            self.unfinished = UnfinishedRound(self.folder)
            lock, (self.state, global_state) = open_run(self)
            resources.enter_context(lock)
            self.global_state = global_state.to(self.device)
            yield

    def _set_up(self) -> None:
        self._ready: list[RoundCallback] = []
        for callback in self.callbacks:
            self._restore(callback)
            callback.setup(self)
            self._ready.append(callback)
        self._holds_a_run = True

    def _restore(self, callback: RoundCallback) -> None:
        """Gives a callback its state of the last round, which may come from somebody else."""
        try:
            callback.load_state_dict(self.state.callbacks.get(callback.state_key, {}))
        except DAMAGED as error:
            raise UserError(
                f"{self.folder}: its checkpoint has a state of {callback.state_key} that is not "
                f"possible ({error})"
            ) from error

    # --- local training ---------------------------------------------------------------------------

    def local_settings(self) -> dict[str, Any]:
        """The keyword arguments of `LocalTrainer`, wherever it trains."""
        return {
            "precision": self.precision,
            "compile": self.compile,
            "regularizer": self.regularizer,
            "privacy": self.privacy,
            "callbacks": [Angle(self.client_curves), *self.client_callbacks],
            "max_batches": int(self.fast_dev_run),
        }

    def local_trainer(self) -> LocalTrainer:
        """A `LocalTrainer` that trains clients in this process."""
        return LocalTrainer(self.model, device=self.device, tick=self.step, **self.local_settings())
