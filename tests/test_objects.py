"""Federations made from plain objects, as a Lightning user would.

No configuration keys or overrides are involved.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers import (
    QUICK,
    THIN,
    THREADS,
    Watching,
    bright_and_dark,
    forget_modules,
    same,
    thin_model,
    tiny_data,
    tiny_trainer,
    write_modules,
)
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import TensorDataset

from fedx_pl import (
    BYOL,
    IID,
    Encoder,
    FederatedDataModule,
    FederatedTrainer,
    FedXMixin,
    RoundCallback,
    SimCLR,
    SSLMethod,
    federate,
    resnet10,
)
from fedx_pl.callbacks.early_stopping import EarlyStopping
from fedx_pl.cli.main import main
from fedx_pl.engines import EngineOptions
from fedx_pl.errors import UserError
from fedx_pl.evaluation.embedding import Geometry
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.options import AggregateOptions
from fedx_pl.federation.regularizers import FedProx
from fedx_pl.federation.round import RoundContext, RoundRecord, Update


class FedXBYOL(FedXMixin, BYOL): ...


def model(method: type[SSLMethod] = FedXBYOL, seed: int = 0, **settings: Any) -> Any:
    return thin_model(method, seed, **settings)


def weights(of: FederatedTrainer) -> dict[str, torch.Tensor]:
    return of.model.shared_state()


def test_the_objects_train_and_every_command_reads_their_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tiny_trainer(tmp_path / "run", enable_progress_bar=True, logger=True)
    one.fit(model(), tiny_data())
    assert [row["round"] for row in one.history] == [1, 2]
    assert "round   2/2" in capsys.readouterr().out
    found = one.evaluate()
    assert found["knn_top1"] == one.history[-1]["knn_top1"]
    assert {"linear_top1", "linear_top5", "rankme"} <= found.keys()
    files = {
        "config.yaml",
        "split.json",
        "metrics.csv",
        "encoder.safetensors",
        "tensorboard",
        "checkpoints",
    }
    assert files <= {file.name for file in (tmp_path / "run").iterdir()}
    # FedX on BYOL and nothing more: no code that one would have to trust.
    images = torch.from_numpy(bright_and_dark(1, 20)[0]).permute(0, 3, 1, 2) / 255
    encoder = Encoder.of(tmp_path / "run")
    with torch.no_grad():
        expected = one.model.eval().backbone((images - 0.5) / 0.25)
        torch.testing.assert_close(encoder(images), expected)
    assert main(["export", str(tmp_path / "run"), "--to", "safetensors"]) == 0


def test_fit_again_resumes_a_run_or_reads_a_finished_one(tmp_path: Path) -> None:
    watching = Watching()
    whole = tiny_trainer(tmp_path / "whole", max_rounds=3)
    whole.fit(model(), tiny_data())

    class Stop(RoundCallback):
        def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
            trainer.should_stop = True

    stopped = tiny_trainer(tmp_path / "run", max_rounds=3, callbacks=[Stop()])
    stopped.fit(model(), tiny_data())
    assert len(stopped.history) == 1
    resumed = tiny_trainer(tmp_path / "run", max_rounds=3, callbacks=[watching])
    with pytest.warns(UserWarning, match="other first weights"):
        resumed.fit(
            model(seed=7), tiny_data()
        )  # The weights that it is made with do not matter any more.
    assert any("resuming after round 1 of 3" in note for note in watching.notes)
    assert same(weights(whole), weights(resumed))
    with pytest.warns(UserWarning, match="began with other first weights than this model has"):
        resumed.fit(model(seed=8), tiny_data())
    words = f'default_root_dir="ANOTHER", max_rounds=6, fork="{tmp_path / "run"}"'
    assert watching.notes[-1].endswith(f"to train on, write {words}")
    assert same(weights(whole), weights(resumed))


def test_an_interrupted_first_round_resumes_from_its_first_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process has other initial weights unless the user sets a seed."""
    whole = tiny_trainer(tmp_path / "whole", max_rounds=1)
    whole.fit(model(), tiny_data())
    run = LocalTrainer.run

    def die(self: LocalTrainer, context: RoundContext, *, client: int, **rest: Any) -> Update:
        if client == 2:
            raise KeyboardInterrupt
        return run(self, context, client=client, **rest)

    monkeypatch.setattr(LocalTrainer, "run", die)
    with pytest.raises(KeyboardInterrupt):
        tiny_trainer(tmp_path / "run", max_rounds=1).fit(model(), tiny_data())
    monkeypatch.undo()
    resumed = tiny_trainer(tmp_path / "run", max_rounds=1)
    resumed.fit(model(seed=5), tiny_data())
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer": {"local_epochs": 2}}, r"local_epochs: 1 -> 2"),
        ({"trainer": {"seed": 1}}, r"seed: 0 -> 1"),
        ({"trainer": {"regularizer": FedProx(mu=0.5)}}, r"regularizer.name: none -> fedprox"),
        (
            {"trainer": {"aggregate": AggregateOptions(rule="median")}},
            r"aggregate.rule: mean -> median",
        ),
        ({"model": {"momentum": 0.5}}, r"method.momentum: 0.99 -> 0.5"),
        ({"data": {"batch_size": 4}}, r"\(batch_size: 8 -> 4"),
        ({"data": {"partition": IID(clients=2)}}, r"\(clients: 3 -> 2"),
        ({"data": {"seed": 4}}, r"another split of the images"),
    ],
)
def test_a_changed_object_is_refused_with_what_to_do(
    tmp_path: Path, changed: dict[str, dict[str, Any]], message: str
) -> None:
    tiny_trainer(tmp_path, max_rounds=1).fit(model(), tiny_data())
    with pytest.raises(UserError, match=rf'(?s){message}.*default_root_dir="ANOTHER"'):
        tiny_trainer(tmp_path, max_rounds=1, **changed.get("trainer", {})).fit(
            model(**changed.get("model", {})), tiny_data(**changed.get("data", {}))
        )


OWN = """
from fedx_pl import SimCLR
class Mine(SimCLR):
    def loss(self, batch, z):
        return super().loss(batch, z) * 2.0
"""


def test_changed_source_of_a_user_s_class_is_refused(tmp_path: Path, modules: Path) -> None:
    write_modules(modules, brought_here=OWN)
    from brought_here import Mine

    tiny_trainer(tmp_path / "run", max_rounds=1).fit(model(Mine), tiny_data())
    forget_modules(modules)
    write_modules(modules, brought_here=OWN.replace("2.0", "3.0"))
    from brought_here import Mine as Edited

    with pytest.raises(
        UserError, match=r"was trained with other code: .*brought_here.py changed since"
    ):
        tiny_trainer(tmp_path / "run", max_rounds=1).fit(model(Edited), tiny_data())


def test_a_changed_argument_without_a_key_is_refused(tmp_path: Path) -> None:
    class Scaled(SimCLR):
        def __init__(
            self, backbone: torch.nn.Module, scale: float, limit: int | None = None, **base: Any
        ) -> None:
            super().__init__(backbone, **base)
            self.scale = scale

    tiny_trainer(tmp_path, max_rounds=1).fit(model(Scaled, scale=1.0), tiny_data())
    tiny_trainer(tmp_path, max_rounds=1).fit(model(Scaled, scale=1.0), tiny_data())
    for changed in ({"scale": 3.0}, {"scale": 1.0, "limit": 4}):
        with pytest.raises(UserError, match=r"arguments of Scaled changed since"):
            tiny_trainer(tmp_path, max_rounds=1).fit(model(Scaled, **changed), tiny_data())
    evaluate = ["evaluate", str(tmp_path), "geometry", "allow_code=true"]
    assert main(evaluate) != 0


class Pull(FedProx):
    def __init__(self, strength: float = 0.1, schedule: torch.Tensor | None = None) -> None:
        super().__init__(mu=strength)
        self.schedule = schedule


class Slow(pl.Callback):
    def __init__(self, factor: float) -> None:
        self._factor, self.steps = factor, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"regularizer": Pull(0.1)}, {"regularizer": Pull(0.2)}, "arguments of Pull"),
        (
            {"regularizer": Pull(0.1, torch.tensor([1.0, 0.5]))},
            {"regularizer": Pull(0.1, torch.tensor([1.0, 0.25]))},
            "arguments of Pull",
        ),
        (
            {"client_callbacks": [Slow(0.5)]},
            {"client_callbacks": [Slow(0.25)]},
            "arguments of Slow",
        ),
        ({}, {"client_callbacks": [Slow(0.5)]}, "arguments of Slow"),
        ({}, {"client_callbacks": [pl.callbacks.LambdaCallback()]}, "arguments of LambdaCallback"),
    ],
)
def test_parts_made_with_other_arguments_are_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], what: str
) -> None:
    """Also if an argument is stored under another name, and although training changes counters."""
    one = tiny_trainer(tmp_path, max_rounds=1, **before)
    one.fit(model(SimCLR), tiny_data())
    one.fit(model(SimCLR), tiny_data())
    tiny_trainer(tmp_path, max_rounds=1, **before).fit(model(SimCLR), tiny_data())
    with pytest.raises(UserError, match=rf"{what} changed since"):
        tiny_trainer(tmp_path, max_rounds=1, **after).fit(model(SimCLR), tiny_data())


def test_a_changed_network_or_a_changed_argument_of_any_type_is_refused(tmp_path: Path) -> None:
    class Net(torch.nn.Sequential):
        def __init__(self, rate: float, last: type[torch.nn.Module] = torch.nn.ReLU) -> None:
            super().__init__(
                torch.nn.Conv2d(3, 4, 3, stride=4),
                last(),
                torch.nn.AdaptiveAvgPool2d(1),
                torch.nn.Flatten(),
            )
            self.rate = rate

    class Mine(SimCLR):
        def __init__(self, backbone: torch.nn.Module, *, scale: Any = None, **base: Any) -> None:
            super().__init__(backbone, **base)

    def fit(folder: str, network: torch.nn.Module, **settings: Any) -> None:
        tiny_trainer(tmp_path / folder, max_rounds=1).fit(Mine(network, **settings), tiny_data())

    fit("net", Net(0.1))
    fit("net", Net(0.1))
    for other in (Net(0.9), Net(0.1, torch.nn.Tanh)):
        with pytest.raises(UserError, match="layers of the backbone changed since"):
            fit("net", other)
    changed = resnet10(width=4)
    fit("ours", changed)
    changed.relu = torch.nn.Tanh()
    with pytest.raises(UserError, match="layers of the backbone changed since"):
        fit("ours", changed)
    fit("list", resnet10(width=4), scale={"a": [1.0]})
    fit("list", resnet10(width=4), scale={"a": [1.0]})
    with pytest.raises(UserError, match="arguments of Mine changed since"):
        fit("list", resnet10(width=4), scale={"a": [50.0]})
    # The encoder of a network that only its script can make.
    with pytest.raises(UserError, match=r"allow.code"):
        Encoder.of(tmp_path / "net")
    encoder = Encoder.of(tmp_path / "net", backbone=Net(0.1))
    assert encoder(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


def test_frozen_layers_and_networks_of_other_shapes_are_refused(tmp_path: Path) -> None:
    def net(features: int, frozen: bool = False) -> torch.nn.Module:
        layers = (
            torch.nn.Conv2d(3, features, 3, stride=4),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )
        network = torch.nn.Sequential(*layers)
        network.feature_dim = features  # type: ignore[assignment]
        network[0].bias.requires_grad_(not frozen)
        return network

    tiny_trainer(tmp_path, max_rounds=1).fit(SimCLR(net(5)), tiny_data())
    with pytest.raises(UserError, match="frozen layers of the backbone changed since"):
        tiny_trainer(tmp_path, max_rounds=1).fit(SimCLR(net(5, frozen=True)), tiny_data())
    with pytest.raises(
        UserError, match=r'layers of the backbone changed since; write default_root_dir="ANOTHER"'
    ):
        tiny_trainer(tmp_path, max_rounds=1).fit(SimCLR(net(6)), tiny_data())
    (tmp_path / "code.json").unlink()  # As if it were not known.
    with pytest.raises(UserError, match=r"changed since|its weights do not fit"):
        tiny_trainer(tmp_path, max_rounds=1).fit(SimCLR(net(6)), tiny_data())


def test_without_a_folder_the_run_is_named_after_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = []
    for epochs in (1, 2):
        one = FederatedTrainer(
            max_rounds=1, local_epochs=epochs, evaluation=None, enable_progress_bar=False
        )
        one.fit(model(SimCLR), tiny_data())
        folders.append(one.folder)
    assert all(str(folder).startswith("runs/arrays-simclr-s0-") for folder in folders)
    assert folders[0] != folders[1]


def test_one_data_set_per_client_and_a_user_s_network(tmp_path: Path) -> None:
    class Net(torch.nn.Sequential):
        feature_dim = 5

    def net() -> Net:
        return Net(
            torch.nn.Conv2d(3, 5, 3, stride=4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )

    pixels, labels = (torch.from_numpy(array) for array in bright_and_dark())
    pixels = pixels.permute(0, 3, 1, 2)
    sets = [TensorDataset(pixels[:10], labels[:10]), TensorDataset(pixels[10:], labels[10:])]
    one = tiny_trainer(
        tmp_path, aggregate=AggregateOptions(rule="median"), regularizer=FedProx(mu=0.1)
    )
    one.fit(SimCLR(net()), FederatedDataModule(sets, batch_size=8))
    assert [len(rows) for rows in one.datamodule.clients] == [10, 38]
    assert one.history[-1]["loss"] > 0
    with pytest.raises(UserError, match="Net"):
        Encoder.of(tmp_path)  # Only the script can make it.
    again = tiny_trainer(
        tmp_path, aggregate=AggregateOptions(rule="median"), regularizer=FedProx(mu=0.1)
    )
    again.fit(SimCLR(net()), FederatedDataModule(sets, batch_size=8))
    assert same(weights(one), weights(again))


def test_clients_per_round_is_a_number_or_a_share(tmp_path: Path) -> None:
    for number, (wanted, expected) in enumerate(
        [(1, 1), (2, 2), (1.0, 3), (0.4, 1), (0.5, 2), (7, 3)]
    ):
        one = tiny_trainer(tmp_path / str(number), clients_per_round=wanted)
        one.attach(model(SimCLR), tiny_data())
        assert len(one.choose_clients(1)) == one.num_sampled == expected
    for wrong in (0, 0.0, 1.5, -2):
        with pytest.raises(UserError, match="clients_per_round"):
            FederatedTrainer(clients_per_round=wrong)
    with pytest.raises(UserError, match="max_rounds"):
        FederatedTrainer(max_rounds=0)
    with pytest.raises(UserError, match="accelerator"):
        FederatedTrainer(accelerator="gpuu")


def test_a_trial_run_leaves_nothing_behind(tmp_path: Path) -> None:
    watching = Watching()
    one = tiny_trainer(
        tmp_path / "run", max_rounds=50, local_epochs=9, fast_dev_run=True, callbacks=[watching]
    )
    one.fit(model(), tiny_data())
    assert watching.steps == 2  # One batch of two clients.
    assert not (tmp_path / "run").exists()


def test_loggers_of_lightning_get_the_numbers_of_every_round(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version="")
    tiny_trainer(tmp_path / "run", logger=[logger]).fit(model(SimCLR), tiny_data())
    rows = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[rows[0].split(",").index("step")] for row in rows[1:]] == ["0", "1", "2"]
    assert not (tmp_path / "run" / "tensorboard").exists()
    tiny_trainer(
        tmp_path / "both", logger=[True, CSVLogger(tmp_path, name="more", version="")]
    ).fit(model(SimCLR), tiny_data())
    assert (tmp_path / "both" / "tensorboard").exists()
    assert (tmp_path / "more" / "metrics.csv").exists()


def test_a_run_ends_when_its_time_is_up_and_can_be_resumed(tmp_path: Path) -> None:
    watching = Watching()
    one = tiny_trainer(tmp_path, max_time={"seconds": 0}, callbacks=[watching])
    one.fit(model(SimCLR), tiny_data())
    assert len(one.history) == 1
    assert any("time of 0:00:00 is up" in note for note in watching.notes)
    two = tiny_trainer(tmp_path, max_time="00:01:00:00")
    two.fit(model(SimCLR), tiny_data())
    assert len(two.history) == 2


def test_early_stopping_ends_a_run_that_does_not_improve(tmp_path: Path) -> None:
    never = EarlyStopping("loss", patience=2, min_delta=1e9, mode="min")
    one = tiny_trainer(tmp_path, max_rounds=9, callbacks=[never], evaluation=None)
    one.fit(model(SimCLR), tiny_data())
    assert len(one.history) == 3  # The first is the best; two more are waited for.
    always = EarlyStopping("round", mode="max")
    two = tiny_trainer(tmp_path, max_rounds=9, callbacks=[always], evaluation=None)
    two.fit(model(SimCLR), tiny_data())
    assert len(two.history) == 9


def test_an_evaluation_that_trains_clients_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    """Its numbers are added to those of the round under separate names."""
    plain, measured = (
        tiny_trainer(tmp_path / "plain"),
        tiny_trainer(tmp_path / "measured", evaluations=[Geometry(QUICK)]),
    )
    for one in (plain, measured):
        one.fit(model(SimCLR), tiny_data())
    assert same(weights(plain), weights(measured))
    assert plain.evaluate() == measured.evaluate()
    assert plain.history[-1]["rankme"] == measured.history[-1]["rankme"]
    assert {"geometry_rankme", "geometry_clients", "local_global_mean"} <= measured.history[
        -1
    ].keys()


def test_a_trainer_fits_again_on_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = FederatedTrainer(
        max_rounds=1, local_epochs=1, evaluation=QUICK, enable_progress_bar=False, threads=THREADS
    )
    one.fit(model(SimCLR), tiny_data())
    first = one.folder
    one.fit(model(SimCLR), tiny_data(test=bright_and_dark(2, 12)))
    assert one.folder != first


def test_a_refused_fit_leaves_nothing_to_evaluate(tmp_path: Path) -> None:
    one = tiny_trainer(tmp_path, max_rounds=1)
    one.fit(model(SimCLR), tiny_data())
    with pytest.raises(UserError, match="another config"):
        one.fit(model(SimCLR, tau=0.7), tiny_data())
    with pytest.raises(UserError, match=r"call fit\(model, data\) first"):
        one.evaluate()


def test_several_of_one_callback_keep_their_own_state() -> None:
    keys = {EarlyStopping("loss", mode="min").state_key, EarlyStopping("knn_top1").state_key}
    assert len(keys) == 2


def test_client_callbacks_are_those_of_every_client_s_trainer(tmp_path: Path) -> None:
    class Counting(pl.Callback):
        fits = 0

        def on_fit_start(self, *_: Any) -> None:
            self.fits += 1

    counting = Counting()
    tiny_trainer(tmp_path, client_callbacks=[counting]).fit(model(SimCLR), tiny_data())
    assert counting.fits == 6


def test_evaluating_before_fitting_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"call fit\(model, data\) first"):
        tiny_trainer(tmp_path).evaluate()


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name='rai' is not known; write serial or ray"):
        tiny_trainer(tmp_path, engine=EngineOptions(name="rai")).fit(model(SimCLR), tiny_data())


def test_federate_takes_a_class_and_arrays(tmp_path: Path) -> None:
    class Mine(SimCLR):
        """A class that cannot be imported."""

    seen: list[int] = []

    class Look(RoundCallback):
        def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
            seen.append(record.number)

    settings = {
        "rounds": 1,
        "epochs": 1,
        "clients": 2,
        "run": {"root": str(tmp_path), "threads": THREADS},
    }
    done = federate(
        "",
        *THIN,
        "optim.batch_size=8",
        method=Mine,
        data=bright_and_dark(),
        callbacks=[Look()],
        quiet=True,
        **settings,
    )
    assert seen == [1]
    assert done.folder.name.startswith("arrays-")
    assert done.encoder(torch.zeros(1, 3, 16, 16)).shape[0] == 1


WITHOUT_WORDS = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] in (["fedx_pl", "config"], ["fedx_pl", "cli"], ["fedx_pl", "api"]):
            raise ImportError(f"{name} is of another floor")

sys.meta_path.insert(0, Forbidden())
import numpy as np, torch
from fedx_pl import BYOL, Dirichlet, FederatedDataModule, FederatedTrainer, FedXMixin, resnet10

class FedXBYOL(FedXMixin, BYOL): ...

torch.set_num_threads(1)
images = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
labels = np.arange(60) % 3
data = FederatedDataModule(
    (images[:40], labels[:40]), test=(images[40:], labels[40:]),
    partition=Dirichlet(clients=2, min_size=4), batch_size=8,
)
trainer = FederatedTrainer(max_rounds=1, local_epochs=1, default_root_dir=sys.argv[1])
trainer.fit(FedXBYOL(resnet10(width=4)), data)
trainer.evaluate()
above = ("fedx_pl.config", "fedx_pl.cli", "fedx_pl.api")
assert not [name for name in sys.modules if name.startswith(above)]
"""


def test_the_first_floor_works_without_those_above_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WORDS, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "encoder.safetensors").exists()
