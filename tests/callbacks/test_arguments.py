"""Arguments of FederatedTrainer and fit: converted, or refused with what to write instead."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchvision
from helpers import THREADS, Watching
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedx_pl import (
    IID,
    EarlyStopping,
    Evaluation,
    FederatedDataModule,
    FederatedTrainer,
    FedProx,
    FedXMixin,
    OptimOptions,
    RoundCallback,
    SimCLR,
    SSLMethod,
    resnet10,
    resnet18,
)
from fedx_pl.callbacks.dashboard import Dashboard
from fedx_pl.engines import EngineOptions
from fedx_pl.engines.local import SerialEngine
from fedx_pl.errors import UserError
from fedx_pl.evaluation.embedding import Geometry
from fedx_pl.evaluation.evaluate import EvaluationOptions
from fedx_pl.federation.options import AggregateOptions
from fedx_pl.federation.privacy import PrivacyOptions
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.federation.robust import Median
from fedx_pl.federation.round import RoundRecord

LABELS = np.arange(24) % 2
IMAGES = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
PIXELS = torch.from_numpy(IMAGES).movedim(3, 1)


def trainer(folder: Path, **settings: Any) -> FederatedTrainer:
    usual: dict[str, Any] = {
        "max_rounds": 1,
        "local_epochs": 1,
        "evaluation": None,
        "enable_progress_bar": False,
        "threads": THREADS,
        "logger": False,
        "min_clients": 1,
    }
    return FederatedTrainer(default_root_dir=folder, **(usual | settings))


def model(backbone: Any = None) -> SimCLR:
    return SimCLR(backbone or resnet10(width=4), hidden_dim=8, embed_dim=4)


def data(images: np.ndarray = IMAGES, **settings: Any) -> FederatedDataModule:
    return FederatedDataModule((images, LABELS), partition=IID(clients=2), batch_size=8, **settings)


class Keeping(RoundCallback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_rounds": 1.5},
            r"max_rounds=1\.5 is not possible; write a whole number .* e\.g\. max_rounds=1",
        ),
        ({"max_rounds": True}, r"max_rounds=True"),
        ({"max_rounds": "3"}, r"max_rounds='3'"),
        ({"local_epochs": -1}, r"local_epochs=-1"),
        ({"min_clients": None}, r"min_clients=None"),
        ({"keep": 0}, r"keep=0"),
        ({"threads": -1}, r"threads=-1"),
        ({"client_curves": 2.0}, r"client_curves=2\.0"),
        ({"seed": -1}, r"seed=-1"),
        ({"seed": 0.5}, r"seed=0\.5"),
        ({"fast_dev_run": -2}, r"fast_dev_run=-2"),
        ({"resume": "auto"}, r"resume='auto' is not possible; write True or False"),
        ({"clients_per_round": 2.5}, r"clients_per_round=2\.5 .*a share above 0 and of at most 1"),
        ({"clients_per_round": True}, r"clients_per_round=True"),
        ({"clients_per_round": "half"}, r"clients_per_round='half'"),
        ({"batchnorm": "none"}, r"batchnorm='none' .*write average or local"),
        (
            {"precision": "fp32"},
            r"precision='fp32' is not possible; write auto or 32-true or bf16-mixed",
        ),
        (
            {"precision": "16-mixed", "accelerator": "cpu"},
            r"^precision='16-mixed' needs a GPU; write auto",
        ),
        ({"accelerator": "tpu"}, r'accelerator="tpu" is not known; write accelerator="auto"'),
        ({"devices": 2}, r"devices=2 is not possible"),
        ({"devices": "all"}, r"devices='all'"),
        ({"devices": [0, 1]}, r"devices=\[0, 1\]"),
        ({"max_time": "12h"}, r"""max_time='12h' is not a time; write "00:12:00:00\""""),
        ({"max_time": 3600}, r"max_time=3600 is not a time"),
        (
            {"default_root_dir": __file__},
            r"default_root_dir=\S+ is a file; write the name of a folder",
        ),
        ({"default_root_dir": 3}, r"default_root_dir=3"),
        (
            {"callbacks": [pl.Callback()]},
            r"callbacks=Callback\(\.\.\.\) .*write client_callbacks=\[Callback",
        ),
        (
            {"callbacks": CSVLogger("x")},
            r"callbacks=CSVLogger\(\.\.\.\) .*write logger=\[CSVLogger",
        ),
        (
            {"callbacks": [EarlyStopping]},
            r"callbacks=EarlyStopping is a class; write callbacks=\[EarlyStopping\(\)\]",
        ),
        (
            {"callbacks": "early_stopping"},
            r"callbacks='early_stopping' .*write e\.g\. callbacks=\[EarlyStopping\(\)\]",
        ),
        (
            {"callbacks": [Keeping(), Keeping()]},
            r"callbacks=Keeping: 2 callbacks would keep .*property state_key",
        ),
        ({"client_callbacks": [EarlyStopping()]}, r"write callbacks=\[EarlyStopping\(\.\.\.\)\]"),
        (
            {"client_callbacks": pl.Callback},
            r"callbacks=Callback is a class; write client_callbacks=\[Callback\(\)",
        ),
        ({"evaluations": [Geometry]}, r"write evaluations=\[Geometry\(EvaluationOptions\(\)\)\]"),
        ({"evaluations": ["knn"]}, r"evaluations='knn' is not possible"),
        (
            {"evaluation": Geometry(EvaluationOptions())},
            r"evaluation=Geometry\(\.\.\.\) .*write evaluations=\[",
        ),
        (
            {"evaluation": "knn"},
            r"evaluation='knn' is not possible; write evaluation=EvaluationOptions",
        ),
        ({"logger": "csv"}, r"logger='csv' is not possible; write e\.g\. logger=True"),
        ({"logger": [CSVLogger]}, r"logger=CSVLogger is a class"),
        ({"engine": "rai"}, r"engine='rai' is not known.*ray"),
        ({"engine": 3}, r"engine=3 is not possible; write engine=EngineOptions\("),
        ({"regularizer": "fedpox"}, r"regularizer='fedpox' is not known; did you mean fedprox"),
        (
            {"regularizer": FedProx},
            r"regularizer=FedProx is not possible; write regularizer=FedProx\(\)",
        ),
        ({"aggregate": "medain"}, r"aggregate='medain' is not known; did you mean median"),
        ({"aggregate": Median}, r"aggregate=Median is a class of a rule; write rule=Median"),
        ({"privacy": 1.0}, r"privacy=1\.0 is not possible; write privacy=PrivacyOptions"),
        ({"aggregate": "krum"}, r"min_clients=1; write min_clients=5"),
    ],
)
def test_an_argument_that_is_not_possible_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        FederatedTrainer(**settings)


def test_arguments_are_taken_as_pl_trainer_takes_them() -> None:
    usual = FederatedTrainer(callbacks=None, client_callbacks=None, evaluations=None, logger=None)
    assert any(isinstance(one, Dashboard) for one in usual.callbacks)
    assert (usual.client_callbacks, usual.evaluations) == ([], [])
    stopping, timer = EarlyStopping(), pl.callbacks.Timer()
    single = FederatedTrainer(callbacks=stopping, client_callbacks=timer, logger=CSVLogger("logs"))
    assert stopping in single.callbacks
    assert single.client_callbacks == [timer]
    numbers = FederatedTrainer(
        max_rounds=np.int64(3), clients_per_round=np.int64(2), seed=np.int32(7), precision=32
    )
    assert [
        type(value) for value in (numbers.max_rounds, numbers.clients_per_round, numbers.seed)
    ] == [int] * 3
    assert numbers.precision == "32-true"
    assert FederatedTrainer(clients_per_round=np.float32(0.5)).clients_per_round == 0.5
    assert (
        FederatedTrainer(max_time=timedelta(hours=1), devices=1, accelerator="cpu").device.type
        == "cpu"
    )
    assert FederatedTrainer(evaluation=False).evaluation is None
    assert FederatedTrainer(evaluation=True).evaluation == EvaluationOptions()
    assert FederatedTrainer(privacy=None).privacy == PrivacyOptions()


def test_words_stand_for_objects_with_their_usual_settings() -> None:
    words = FederatedTrainer(engine="ray", regularizer="fedprox", aggregate="median")
    assert words.engine == EngineOptions(name="ray")
    assert isinstance(words.regularizer, FedProx)
    assert words.aggregate == AggregateOptions(rule="median")
    assert type(FederatedTrainer(regularizer=None).regularizer) is Regularizer
    assert FederatedTrainer(engine=SerialEngine).engine is SerialEngine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((data(), model()), r"given the images first; write fit\(model, data\)"),
        (((IMAGES, LABELS), model()), r"given the images first; write fit\(model, data\)"),
        ((SimCLR, data()), r"given the class SimCLR; write fit\(SimCLR\(resnet18\(\)\), data\)"),
        (
            (resnet10(width=4), data()),
            r"given a ResNet, which is not an SSLMethod; write e\.g\. fit\(SimCLR\(net",
        ),
        (
            (SSLMethod(resnet10(width=4)), data()),
            r"SSLMethod has no loss of its own; write def loss\(self, batch, z\)",
        ),
        ((model(), FederatedDataModule), r"given FederatedDataModule as images"),
        (
            (model(), DataLoader(TensorDataset(PIXELS))),
            r"given DataLoader as images; write fit\(model, FederatedData",
        ),
        ((model(), pl.LightningDataModule()), r"given LightningDataModule as images"),
        ((model(), None), r"source is NoneType; give a name"),
        (
            (model(), data(IMAGES[..., 0])),
            r"1 channel \(1 x 16 x 16\), .*takes 3 channels\); .*resnet18\(channels=1\)",
        ),
        (
            (model(resnet10(width=4, channels=1)), data()),
            r"3 channels .*takes 1 channels.* resnet18\(channels=3\)",
        ),
    ],
)
def test_wrong_arguments_of_fit_are_refused_before_the_first_round(
    tmp_path: Path, given: tuple[Any, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        trainer(tmp_path / "run").fit(*given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "images",
    [
        (np.repeat(IMAGES, 5, axis=0), np.repeat(LABELS, 5)),
        TensorDataset(PIXELS.repeat(5, 1, 1, 1), torch.from_numpy(LABELS).repeat(5)),
        [TensorDataset(PIXELS[:12]), TensorDataset(PIXELS[12:])],
    ],
)
def test_fit_takes_images_as_they_are(tmp_path: Path, images: Any) -> None:
    one = trainer(tmp_path)
    one.fit(model(), images)
    assert len(one.history) == 1


def plain_network(channels: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_plain_network_is_a_backbone(tmp_path: Path) -> None:
    watching = Watching()
    one = trainer(tmp_path, callbacks=[watching])
    one.fit(model(plain_network()), data())
    assert one.model.feature_dim == 8
    assert model(plain_network(channels=1)).feature_dim == 8
    usual = torchvision.models.resnet18(weights=None)
    usual.fc = nn.Identity()  # type: ignore[assignment]
    usual.layer4.eval()
    assert model(usual).feature_dim == 512
    assert usual.training
    assert not usual.layer4.training  # The forward pass leaves everything as it was.


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (resnet18, r"the backbone is resnet18, not a torch module; write e\.g\. resnet18\(\)"),
        ("resnet18", r"the backbone is 'resnet18', not a torch module"),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3)),
            r"Sequential maps images to \(2, 8, 30, 30\); it must be \(n, d\)",
        ),
        (nn.Linear(7, 8), r"has no feature_dim, and a forward pass .*set backbone\.feature_dim"),
    ],
)
def test_a_backbone_that_is_none_is_refused_when_the_method_is_made(
    backbone: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        SimCLR(backbone)


def test_a_backbone_for_images_of_another_size_is_refused(tmp_path: Path) -> None:
    flat = nn.Sequential(nn.Conv2d(3, 2, 3, stride=4), nn.Flatten())
    with pytest.raises(
        UserError, match=r"features of shape \(32,\) for these images, and its feature_dim is 128"
    ):
        trainer(tmp_path / "run").fit(model(flat), data())
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))
    with pytest.raises(
        UserError,
        match=r"\(3 x 16 x 16\), and the backbone Sequential cannot take them \(RuntimeError",
    ):
        trainer(tmp_path / "run").fit(model(fixed), data())
    assert not (tmp_path / "run").exists()


class Adding(RoundCallback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        record.row["mine"] = self.value


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), np.float32(2.0), np.array(2.0), [np.int64(2)]]
)
def test_a_number_of_torch_or_numpy_in_the_row_is_a_number(tmp_path: Path, value: Any) -> None:
    seen: list[Any] = []

    class Seeing(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
            seen.append(metrics.get("mine"))

    one = trainer(tmp_path / "run", callbacks=Adding(value), logger=Seeing(tmp_path))
    one.fit(model(), data())
    expected = [2] if isinstance(value, list) else 2.0
    assert one.history[0]["mine"] == expected
    assert type(one.history[0]["mine"]) is type(expected)
    assert (seen[-1] == 2.0) == (expected == 2.0)


def test_a_value_in_the_row_that_is_not_a_number_is_refused_with_its_key_and_not_saved(
    tmp_path: Path,
) -> None:
    message = (
        r"record\.row, as Adding left it, has 'mine': a Tensor of shape \(3,\).* float\(value\)"
    )
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, callbacks=Adding(torch.zeros(3))).fit(model(), data())
    assert not (tmp_path / "checkpoints").exists()
    one = trainer(tmp_path, callbacks=Adding(1.0))
    one.fit(model(), data())  # It resumes as if nothing had happened.
    assert one.history[0]["mine"] == 1.0


class Stateful(RoundCallback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def test_a_state_that_does_not_fit_in_json_is_refused_with_the_callback_and_the_key(
    tmp_path: Path,
) -> None:
    for state, message in (
        (
            {"fine": 1, "mean": torch.zeros(2)},
            r"state_dict\(\) of the callback Stateful has 'mean': a Tensor of shape",
        ),
        ({"seen": {1, 2}}, r"the callback Stateful has 'seen': a set"),
        (None, r"the callback Stateful returns None; return a dict"),
    ):
        with pytest.raises(UserError, match=message):
            trainer(tmp_path, callbacks=Stateful(state)).fit(model(), data())
        assert (
            not list((tmp_path / "checkpoints").glob("*"))
            if (tmp_path / "checkpoints").exists()
            else True
        )
    one = trainer(tmp_path, callbacks=Stateful({"best": torch.tensor(3)}))
    one.fit(model(), data())
    assert one.state.callbacks["Stateful"] == {"best": 3}


class Told(RoundCallback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []

    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        self.exceptions.append(exception)


@pytest.mark.parametrize("hook", ["setup", "load_state_dict", "on_fit_start", "on_exception"])
def test_a_callback_that_raises_does_not_keep_the_exception_from_others(
    tmp_path: Path, hook: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    failing, before = Adding(1.0), Told()
    setattr(failing, hook, fail)
    stopping = Adding(torch.zeros(2)) if hook == "on_exception" else Adding(1.0)
    one = trainer(tmp_path, callbacks=[before, failing, stopping], logger=True)
    with pytest.raises(RuntimeError, match="mine"):
        one.fit(model(), data())
    assert len(before.exceptions) == 1
    delattr(failing, hook)
    failing.value = stopping.value = 1.0
    one.fit(model(), data())
    assert len(one.history) == 1


def test_early_stopping_reports_a_metric_that_never_appeared(tmp_path: Path) -> None:
    watching = Watching()
    trainer(tmp_path, callbacks=[EarlyStopping("knn_top2"), watching]).fit(model(), data())
    assert any(
        "has waited for knn_top2, which no round had; there is loss" in note
        for note in watching.notes
    )
    with pytest.raises(UserError, match=r"mode='maximum' is not possible"):
        EarlyStopping(mode="maximum")


class FedXSimCLR(FedXMixin, SimCLR): ...


def test_options_of_a_method_are_objects() -> None:
    with pytest.raises(
        UserError, match=r"optim=\{'lr': 0\.1\} is not possible; write optim=OptimOptions\(\.\.\.\)"
    ):
        SimCLR(resnet10(width=4), optim={"lr": 0.1})  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"fedx=\{\} is not possible; write fedx=FedXOptions\(\.\.\.\)"
    ):
        FedXSimCLR(resnet10(width=4), fedx={})
    with pytest.raises(UserError, match=r"hidden_dim=2\.5 is not possible"):
        SimCLR(resnet10(width=4), hidden_dim=2.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"width='16' is not possible; write a whole number"):
        resnet18("16")  # type: ignore[arg-type]
    assert SimCLR(resnet10(width=4), optim=OptimOptions(lr=0.1)).optim.lr == 0.1


class Telling(SimCLR):
    value: Any = None

    def round_metrics(self) -> dict[str, Any]:
        return {"metric": self.value}


class Bare(SimCLR):
    def loss(self, batch: Any, z: Any) -> Any:
        return (z.first - z.second).pow(2).mean()


class Measuring(Evaluation):
    needs_labels = False
    found: Any = None

    def measure(self, *_: Any, **__: Any) -> Any:
        return self.found


def test_what_methods_and_evaluations_return_is_numbers(tmp_path: Path) -> None:
    telling = Telling(resnet10(width=4), hidden_dim=8, embed_dim=4)
    telling.value = torch.tensor(2.0)
    measuring = Measuring(EvaluationOptions())
    measuring.found = {"mine": torch.tensor(3.0)}
    one = trainer(tmp_path / "one", evaluation=True, evaluations=measuring)
    one.fit(telling, data())
    assert (one.history[0]["metric"], one.history[0]["mine"]) == (2.0, 3.0)
    telling.value = torch.ones(3)
    with pytest.raises(UserError, match=r"round_metrics\(\) has 'metric': .*not one number"):
        trainer(tmp_path / "two").fit(telling, data())
    measuring.found = 3
    with pytest.raises(UserError, match=r"Measuring\.measure returns 3; return a dict"):
        trainer(tmp_path / "three", evaluation=True, evaluations=measuring).fit(model(), data())
    with pytest.raises(UserError, match=r"Bare\.loss returns a Tensor; return Loss\(bare=\.\.\.\)"):
        trainer(tmp_path / "four").fit(Bare(resnet10(width=4)), data())


def test_a_folder_of_another_network_of_the_same_class_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit(model(plain_network()), data())
    wider = nn.Sequential(nn.Conv2d(3, 9, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    message = r"layers of the backbone changed since; write default_root_dir"
    with pytest.raises(UserError, match=message):
        trainer(tmp_path).fit(model(wider), data())


def test_unsupported_precisions_and_client_callbacks_are_refused_by_the_constructor() -> None:
    assert [FederatedTrainer(precision=short).precision for short in (32, "32", "bf16")] == [
        "32-true",
        "32-true",
        "bf16-mixed",
    ]
    for wrong in ("64-true", "16-true", "half", True):
        with pytest.raises(UserError, match=r"precision=.* write auto or 32-true"):
            FederatedTrainer(precision=wrong)
    for callback in (pl.callbacks.LearningRateMonitor(), pl.callbacks.ModelCheckpoint()):
        with pytest.raises(
            UserError, match=rf"client_callbacks={type(callback).__name__}.* leave it out"
        ):
            FederatedTrainer(client_callbacks=callback)


def test_text_in_the_row_is_for_the_table_and_not_for_tensorboard(tmp_path: Path) -> None:
    one = trainer(tmp_path, callbacks=Adding("good"), logger=True)
    one.fit(model(), data())
    assert one.history[0]["mine"] == "good"
    with pytest.raises(
        UserError, match=r"engine=.* makes None; give a subclass of fedx_pl\.Engine"
    ):
        trainer(tmp_path / "engine", engine=lambda trainer: None).fit(model(), data())
