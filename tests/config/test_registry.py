"""User-defined parts of every kind, named on the command line as ``module:Class``."""

import csv
import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml
from commands import fedx_pl

from fedx_pl.cli.main import main
from fedx_pl.config import registry
from fedx_pl.config.compose import compose, load
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError

PARTS = '''
from dataclasses import dataclass

import numpy as np
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from fedx_pl import Loss, Partition, RoundCallback, SSLMethod
from fedx_pl.engines.local import SerialEngine
from fedx_pl.evaluation import Evaluation
from fedx_pl.federation.aggregate import FedAvg
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.mixins import Mixin

SEEN = []


class Method(SSLMethod):
    def __init__(self, backbone, *, scale: float = 1.0, **base):
        super().__init__(backbone, **base)
        self.scale = scale

    def loss(self, batch, z):
        return Loss(apart=self.scale * ((z.first - z.second) ** 2).mean())


class Shrinking(Mixin):
    def __init__(self, *args, shrink: float = 0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.shrink = shrink

    def loss(self, batch, z):
        return super().loss(batch, z) | Loss(shrink=self.shrink * (z.first**2).mean())


def network(channels, image_size, hidden: int = 6):
    """A backbone without an attribute for its number of features."""
    convolution = nn.Conv2d(channels, hidden, 3, stride=4)
    layers = [convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def squares(options, report, count: int = 60):
    """Gray images, bright ones and dark ones, to train on and to evaluate on."""
    labels = np.arange(options.count) % 2
    noise = np.random.default_rng(0).integers(0, 80, (options.count, 12, 12, 1))
    images = (noise + 150 * labels[:, None, None, None]).astype(np.uint8)
    report(f"made {options.count} squares")
    half = options.count // 2
    return (images[:half], labels[:half]), (images[half:], labels[half:])


@dataclass(frozen=True)
class InTurns(Partition):
    """Deals images to clients in turn."""

    first: int = 0

    def deal(self, data, seed):
        rows = np.arange(len(data.train.images))
        owners = (rows + self.first) % self.clients
        return [rows[owners == client] for client in range(self.clients)]


class Doubled(FedAvg):
    def __init__(self, reference, max_images, *, factor: float = 1.0, changes=()):
        super().__init__(reference, max_images, changes=changes)
        self.factor = factor

    def add(self, state, num_images, client=0):
        super().add(state, num_images, client)
        SEEN.append(("rule", self.factor))


class Decay(Regularizer):
    def __init__(self, strength: float = 0.1):
        self.strength = strength

    def on_before_optimizer_step(self, trainer, model, optimizer):
        SEEN.append(("regularizer", self.strength))


class Reversed(SerialEngine):
    def run(self, context, clients, memory_of):
        SEEN.append(("engine", len(clients)))
        yield from super().run(context, list(clients)[::-1], memory_of)


class Brightness(Evaluation):
    def measure(self, trainer, report=print, tick=None):
        return {"brightness": float(trainer.datamodule.images.test.images.mean()), "more": {"a": 1}}


class Lines(CSVLogger):
    def log_metrics(self, metrics, step=None):
        SEEN.append(("logger", step))


class Count(RoundCallback):
    def on_round_end(self, trainer, record):
        record.row["counted"] = len(record.updates)


class Other:
    pass
'''

WORDS = [
    "data=parts_of_mine:squares",
    "data.count=80",
    "method=parts_of_mine:Method",
    "method.scale=2",
    "mixins=[parts_of_mine:Shrinking]",
    "method.shrink=0.5",
    "backbone=parts_of_mine:network",
    "backbone.hidden=5",
    "partition=parts_of_mine:InTurns",
    "partition.first=1",
    "aggregate=parts_of_mine:Doubled",
    "aggregate.factor=3",
    "regularizer=parts_of_mine:Decay",
    "regularizer.strength=0.25",
    "engine=parts_of_mine:Reversed",
    "evaluation.also=[parts_of_mine:Brightness]",
    "logger=[parts_of_mine:Lines,csv]",
    "callbacks=[parts_of_mine:Count]",
    "federation.clients=3",
    "federation.rounds=2",
    "federation.epochs=1",
    "optim.batch_size=8",
    "evaluation.linear.epochs=2",
    "run.threads=1",
]


@pytest.fixture
def parts(modules: Path) -> Path:
    """A module with one part of every kind, where Python finds it."""
    (modules / "parts_of_mine.py").write_text(PARTS)
    return modules


def test_one_of_every_kind_from_outside_trains_from_the_command_line(
    parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = parts / "run"
    assert main(["train", *WORDS, f"run.dir={run}"]) == 0
    out = capsys.readouterr().out
    assert "made 80 squares" in out
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["counted"] for row in rows] == ["3", "3"]
    last = {key: float(value) for key, value in rows[-1].items() if value}
    assert 75 < last["brightness"] < 155
    assert last["loss"] == pytest.approx(last["loss_apart"] + last["loss_shrink"], rel=1e-5)
    import parts_of_mine

    assert {
        ("rule", 3.0),
        ("regularizer", 0.25),
        ("engine", 3),
        ("logger", 1),
        ("logger", 2),
    } <= set(parts_of_mine.SEEN)
    assert list(run.rglob("metrics.csv")) != [
        run / "metrics.csv"
    ]  # Lightning's CSVLogger writes one, too.
    assert not (run / "tensorboard").exists()
    split = json.loads((run / "split.json").read_text())["clients"]
    assert split == [[r for r in range(40) if (r + 1) % 3 == client] for client in range(3)]
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert (
        recorded["partition"]["first"],
        recorded["aggregate"]["factor"],
        recorded["backbone"]["hidden"],
    ) == (1, 3.0, 5)
    assert "parts_of_mine" in json.loads((run / "code.json").read_text())["modules"]

    # The same command resumes; a changed setting of a part is refused.
    assert main(["train", *WORDS, f"run.dir={run}"]) == 0
    assert main(["train", *WORDS, f"run.dir={run}", "regularizer.strength=0.5"]) == 2
    assert "regularizer.strength: 0.25 -> 0.5" in capsys.readouterr().err

    # Afterwards: evaluation and encoder, if the code is trusted.
    assert main(["evaluate", str(run), "parts_of_mine:Brightness"]) == 2
    assert "names code to be run" in capsys.readouterr().err
    assert main(["evaluate", str(run), "knn", "parts_of_mine:Brightness", "allow_code=true"]) == 0
    found = json.loads((run / "evaluation" / "parts_of_mine.Brightness.json").read_text())
    assert found["results"]["brightness"] == pytest.approx(last["brightness"], abs=1e-3)
    with pytest.raises(UserError, match="allow_code"):
        Encoder.of(run)
    assert Encoder.of(run, allow_code=True).backbone[0].out_channels == 5


def test_a_sweep_and_a_dry_run_find_a_run_on_user_defined_images(
    parts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name does not depend on what is known only once the images are loaded."""
    monkeypatch.chdir(parts)
    words = [word for word in WORDS if word.startswith(("data", "federation", "run", "backbone"))]
    words += [
        "backbone.hidden=3",
        "federation.rounds=1",
        "evaluation.linear.epochs=1",
        "method.hidden_dim=8",
    ]
    assert main(["train", *words]) == 0
    (found,) = (parts / "runs").iterdir()
    assert compose(words).run_folder.resolve() == found.resolve()
    assert load(found / "config.yaml", trusted="*").hash == compose(words).hash
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert main(["data", "parts_of_mine:squares", "data.count=30"]) == 0
    assert (
        "parts_of_mine:squares: 12 x 12 pixels, 1 channel\ntrain: 15 images"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("word", [word for word in WORDS if ":" in word])
def test_a_run_folder_that_names_code_imports_none_unless_it_is_trusted(
    parts: Path, word: str
) -> None:
    """Covers every kind of part; parts that belong to a command only are not loaded at all."""
    file = parts / "config.yaml"
    file.write_text(compose([*WORDS, "profile=paper"]).to_yaml())
    tree = yaml.safe_load(file.read_text())
    plain = yaml.safe_load(compose(["profile=paper"]).to_yaml())
    key = word.partition("=")[0]
    group = key.partition(".")[0]
    plain[group] = tree[group]
    file.write_text(yaml.safe_dump(plain))
    if group in ("engine", "logger", "callbacks"):
        config = load(file)
        assert "parts_of_mine" not in config.to_yaml()
        return
    with pytest.raises(UserError, match=r"names code to be run, .*parts_of_mine:.*allow_code=true"):
        load(file)


@pytest.mark.parametrize("key", ["data", "backbone"])
def test_the_encoder_of_a_run_that_names_code_imports_none(
    quick: list[str], modules: Path, key: str
) -> None:
    """Exports in a separate process, as for a folder from somebody else."""
    run = modules / "run"
    assert main(["train", *quick, f"run.dir={run}"]) == 0
    (modules / "evil.py").write_text("print('IMPORTED')\ndef f(): ...\n")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree[key]["name"] = "evil:f"
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    done = fedx_pl("export", str(run), "--to", "safetensors", cwd=modules)
    assert done.returncode == 2
    assert "names code to be run" in done.stderr
    assert "IMPORTED" not in done.stdout


@pytest.mark.parametrize("kind", registry.KINDS, ids=lambda kind: kind.key)
def test_every_kind_has_the_same_door(
    parts: Path, monkeypatch: pytest.MonkeyPatch, kind: registry.Kind
) -> None:
    (word,) = [word for word in WORDS if word.startswith(_typed(kind))]
    path = word.partition("=")[2].strip("[]").partition(",")[0]
    found = registry.find(kind, path)
    assert found.__module__ == "parts_of_mine"
    point = EntryPoint("short", path, f"fedx_pl.{kind.group}")
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [point] if group == point.group else []
    )
    assert registry.find(kind, "short") is found
    for name, thing in kind.built_in.items():
        assert registry.find(kind, name) is thing
    with pytest.raises(
        UserError, match=r"is not known.*give your own (class|function) as .*package\.module:"
    ):
        registry.find(kind, "shrt")
    if kind.base is not None:
        with pytest.raises(UserError, match=r"which is not a subclass of"):
            registry.find(kind, "parts_of_mine:Other")


def _typed(kind: registry.Kind) -> str:
    return {
        "backbone.name": "backbone=",
        "partition.kind": "partition=",
        "evaluate": "evaluation.also=",
    }.get(kind.key, f"{kind.key}=")


def test_the_error_for_a_missing_part_explains_how_to_name_one(parts: Path) -> None:
    with pytest.raises(
        UserError, match=r"callbacks=\[counting\] is not known.* callbacks=\[package.module:Class\]"
    ):
        registry.find(registry.CALLBACK, "counting")
    with pytest.raises(UserError, match=r"parts_of_mine has no 'Countin'; it has Count"):
        registry.find(registry.CALLBACK, "parts_of_mine:Countin")
    with pytest.raises(UserError, match=r"not a subclass of fedx_pl.RoundCallback"):
        registry.find(registry.CALLBACK, "parts_of_mine:Other")
    with pytest.raises(UserError, match=r"callbacks=nowhere:A: cannot import nowhere"):
        registry.find(registry.CALLBACK, "nowhere:A")


STOPPING = """
from fedx_pl import RoundCallback

class Stopping(RoundCallback):
    def on_round_end(self, trainer, record):
        record.row["counted"] = len(record.updates)
        trainer.should_stop = True
"""


def test_a_callback_is_not_part_of_what_a_run_is(quick: list[str], modules: Path) -> None:
    """The run can be resumed without the callback."""
    (modules / "watchful.py").write_text(STOPPING)
    run = modules / "run"
    assert main(["train", *quick, "callbacks=[watchful:Stopping]", f"run.dir={run}"]) == 0
    with open(run / "metrics.csv") as file:
        assert [row["counted"] for row in csv.DictReader(file)] == ["3"]
    assert main(["train", *quick, f"run.dir={run}"]) == 0
    with open(run / "metrics.csv") as file:
        assert [row["counted"] for row in csv.DictReader(file)] == ["3", ""]


BROKEN = """
from pytorch_lightning.loggers import CSVLogger

from fedx_pl import Partition, RoundCallback, SimCLR
from fedx_pl.engines.local import SerialEngine
from fedx_pl.evaluation import Evaluation
from fedx_pl.federation.regularizers import Regularizer

class Failing:
    def __init__(self, *args, **kwargs):
        raise ValueError("no such thing")

class Method(Failing, SimCLR): ...
class Callback(Failing, RoundCallback): ...
class Logger(Failing, CSVLogger): ...
class Engine(Failing, SerialEngine): ...
class Measure(Failing, Evaluation): ...
class Pull(Failing, Regularizer): ...
class Deal(Failing, Partition): ...
def network(channels, image_size):
    raise ValueError("no such thing")
def images(options, report):
    raise ValueError("no such thing")

class Asking(RoundCallback):
    def __init__(self, metric, patience: int = 3): ...
def asking(channels, depth, width: int = 3): ...
"""


@pytest.mark.parametrize(
    "word",
    [
        "method=broken:Method",
        "callbacks=[broken:Callback]",
        "logger=[broken:Logger]",
        "engine=broken:Engine",
        "evaluation.also=[broken:Measure]",
        "regularizer=broken:Pull",
        "partition=broken:Deal",
        "backbone=broken:network",
        "data=broken:images",
    ],
)
def test_a_part_that_raises_when_it_is_made_is_named_with_its_error(
    quick: list[str], modules: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "broken.py").write_text(BROKEN)
    words = [other for other in quick if word[:4] != "data" or not other.startswith("data")]
    assert main(["train", *words, word, f"run.dir={modules / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert word.partition("=")[2].strip("[]") in error
    assert "(ValueError: no such thing)" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("word", "argument"),
    [("callbacks=[broken:Asking]", "metric"), ("backbone=broken:asking", "depth")],
)
def test_an_argument_without_a_default_is_named(
    quick: list[str], modules: Path, word: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "broken.py").write_text(BROKEN)
    assert main(["train", *quick, word]) == 2
    error = capsys.readouterr().err
    assert (
        f"its argument {argument} has no default; keys come from arguments with plain defaults"
        in error
    )
