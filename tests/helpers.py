"""Small real parts for tests: models, client data, a round to train in, an experiment."""

import importlib
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedx_pl import IID, FederatedDataModule, SSLMethod, backbones, resnet10
from fedx_pl.backbones import BackboneOptions
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config.build import Run, build
from fedx_pl.config.schema import Config
from fedx_pl.data.augment import Augment, AugmentOptions
from fedx_pl.data.batches import ClientData, ImageStore
from fedx_pl.evaluation.evaluate import EvaluationOptions
from fedx_pl.evaluation.linear import LinearOptions
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, RoundRecord, Update
from fedx_pl.methods.base import LocalRound, State
from fedx_pl.trainer import FederatedTrainer

# Threads of torch in every test and in what a test starts.
THREADS = int(os.environ.get("FEDX_TEST_THREADS", "1"))

# Seconds after which something hangs. A loaded machine may need minutes to import torch.
PATIENCE = 1800.0

# A very thin network, with which a federation takes seconds.
THIN = ("backbone.name=resnet10", "backbone.width=4", f"run.threads={THREADS}")

QUICK = EvaluationOptions(linear=LinearOptions(epochs=2))

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def silent(line: str) -> None:
    """Drops a line."""


def made(config: Config, *callbacks: RoundCallback, **settings: Any) -> Run:
    """The objects of a configuration; nothing is printed."""
    return build(config, silent, callbacks=callbacks, **settings)


def fitted(config: Config, *callbacks: RoundCallback, **settings: Any) -> FederatedTrainer:
    """Runs a configuration, or resumes it."""
    return made(config, *callbacks, **settings).fit()


def definition(folder: Path, text: str) -> Path:
    """Writes a user's experiment."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


def tiny_federation(data: Path, runs: Path) -> list[str]:
    """Overrides for a federation of seconds on ``tiny_root``: three clients, two rounds."""
    return [
        *THIN,
        *("profile=paper", "federation.clients=3", "federation.rounds=2", "federation.epochs=1"),
        *("optim.batch_size=32", "evaluation.linear.epochs=5", f"run.root={runs}"),
        *(f"data.root={data}", "data.verify=false", "data.download=false"),
    ]


def thin_model(method: type[SSLMethod], seed: int = 0, **settings: Any) -> SSLMethod:
    """A method on a very thin network, made as a user would make it."""
    torch.manual_seed(seed)
    return method(resnet10(width=4), **({"hidden_dim": 16, "embed_dim": 8} | settings))


def bright_and_dark(seed: int = 0, count: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Images of two classes and their labels."""
    labels = np.arange(count) % 2
    noise = np.random.default_rng(seed).integers(0, 100, (count, 16, 16, 3))
    return (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels


def tiny_data(**settings: Any) -> FederatedDataModule:
    """Three clients of 16 images each, and 20 test images."""
    defaults = {"partition": IID(clients=3), "batch_size": 8, "test": bright_and_dark(1, 20)}
    return FederatedDataModule(bright_and_dark(), **(defaults | settings))


def tiny_trainer(folder: Path, **settings: Any) -> FederatedTrainer:
    """Two rounds of one epoch, without a dashboard."""
    defaults: dict[str, Any] = {
        "max_rounds": 2,
        "local_epochs": 1,
        "evaluation": QUICK,
        "enable_progress_bar": False,
        "logger": False,
        "threads": THREADS,
    }
    return FederatedTrainer(default_root_dir=folder, **(defaults | settings))


def same(a: State, b: State) -> bool:
    """Whether two states are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


METHOD = """
from fedx_pl import Loss, SSLMethod
class Mine(SSLMethod):
    def loss(self, batch, z):
        return Loss(a=((z.first - z.second) ** 2).mean())
"""  # a user's module, to be written to a file


def write_modules(folder: Path, **files: str) -> None:
    """Writes modules by name; two underscores are a dot."""
    for name, text in files.items():
        file = folder / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def forget_modules(folder: Path) -> None:
    """Forgets what was imported from a folder, as a new process would."""
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(folder):
            del sys.modules[name]
    importlib.invalidate_caches()


def notebook(text: str) -> type[SSLMethod]:
    """A class as a notebook or ``python -c`` makes it: its module has no file."""
    module = ModuleType("no_file")
    sys.modules["no_file"] = module
    try:
        exec(compile(textwrap.dedent(text), "<cell 1>", "exec"), module.__dict__)
    finally:
        module.__dict__.setdefault("Mine", None)
    return module.__dict__["Mine"]


def every_round(*_: int) -> tuple[bool, bool]:
    """Evaluations are due after each round, as with `Evaluator.due`."""
    return True, True


class Watching(RoundCallback):
    """Keeps what a run would show; it can also replace an engine's trainer."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.steps = 0

    def step(self, count: int = 1) -> None:
        self.steps += count

    def working(self, worker: str, client: int | None) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        if not trainer.current_round:
            self.row({"round": 0, **trainer.untrained})

    def on_client_steps(self, trainer: FederatedTrainer, count: int) -> None:
        self.step(count)

    def on_client_start(self, trainer: FederatedTrainer, worker: str, client: int | None) -> None:
        self.working(worker, client)

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        self.row(record.row)
        for alarm in record.alarms:
            self.note(f"round {record.number}: {alarm}")

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        self.note(text)


def make_model(
    method: type[SSLMethod], seed: int = 0, channels: int = 3, **options: object
) -> SSLMethod:
    """A method on a very thin ResNet, initialized from ``seed``."""
    torch.manual_seed(seed)
    backbone = backbones.build(
        BackboneOptions("resnet10", width=4), channels=channels, image_size=16
    )
    sizes: dict[str, object] = {"hidden_dim": 16, "embed_dim": 8}
    return method(backbone, **(sizes | options)).to(memory_format=torch.channels_last)


def make_data(
    images: int = 40,
    batch_size: int = 8,
    relation_size: int = 0,
    seed: int = 0,
    side: int = 16,
    channels: int = 3,
    resident_bytes: int = 10**9,
) -> ClientData:
    """A client with random images."""
    pixels = np.random.default_rng(7).integers(
        0, 256, (images, side, side, channels), dtype=np.uint8
    )
    store = ImageStore(pixels, torch.device("cpu"), resident_bytes=resident_bytes)
    augment = Augment(AugmentOptions(), (0.5,) * channels, (0.25,) * channels)
    return ClientData(
        store=store,
        index=torch.arange(images),
        augment=augment,
        batch_size=batch_size,
        relation_size=relation_size,
        seed=seed,
    )


def data_for(
    model: SSLMethod, images: int = 40, batch_size: int = 8, seed: int = 0, side: int = 16
) -> ClientData:
    """A client whose batches carry what the model asks for."""
    return make_data(images, batch_size, batch_size if model.relation_batch else 0, seed, side)


def start(model: SSLMethod, data: ClientData, round: int = 1, epochs_before: int = 0) -> SSLMethod:
    """Starts a round by hand, without a Trainer."""
    return model.start_round(
        LocalRound(
            round=round,
            rounds=10,
            client=0,
            epochs=1,
            epochs_before=epochs_before,
            seed=0,
            data=data,
        )
    )


def train(
    model: SSLMethod,
    data: ClientData,
    *,
    state: GlobalState | State | None = None,
    memory: ClientMemory | None = None,
    round: int = 1,
    epochs: int = 1,
    client: int = 0,
    precision: str = "32-true",
    batchnorm: str = "average",
    regularizer: Regularizer | None = None,
) -> Update:
    """One client's round through the real Trainer."""
    if not isinstance(state, GlobalState):
        server = regularizer.server_state(model) if regularizer else {}
        state = GlobalState(weights=state or model.shared_state(), server=server)
    context = RoundContext(
        round=round, rounds=10, epochs=epochs, seed=0, global_state=state, batchnorm=batchnorm
    )
    trainer = LocalTrainer(
        model, device=torch.device("cpu"), precision=precision, regularizer=regularizer
    )
    return trainer.run(context, client=client, data=data, memory=memory)
