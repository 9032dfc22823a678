"""`federate` does what the command line does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import THREADS
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger

import fedx_pl
from fedx_pl import FederatedDataModule, RoundCallback, SimCLR, federate, resnet10
from fedx_pl.errors import UserError


def test_federate_trains_reads_again_and_hands_out_the_encoder(
    tiny: list[str], tmp_path: Path
) -> None:
    words = [word for word in tiny if not word.startswith("federation.rounds")]
    options = {"run.dir": str(tmp_path / "run"), "optim": {"lr": 0.02}, "quiet": True}
    found = federate("cifar10-byol-fedx", *words, rounds=1, **options)
    assert list(found.history.index) == [0, 1]
    assert found.history.loc[1, "linear_top1"] == found.trainer.history[0]["linear_top1"]
    assert found.encoder(torch.rand(2, 3, 32, 32)).shape == (2, 32)
    assert found.plot().axes
    again = federate("cifar10-byol-fedx", *words, rounds=1, **options)
    assert again.trainer.history == found.trainer.history
    assert (found.folder / "encoder.safetensors").exists()


def test_an_experiment_is_named_as_the_makefile_names_it() -> None:
    with pytest.raises(
        UserError,
        match=r"experiment=cifar10-bylo is not DATA-METHOD .*experiment=cifar10-byol-fedx",
    ):
        federate("cifar10-bylo", quiet=True)


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'federated'"):
        fedx_pl.federated  # noqa: B018


def test_the_package_imports_nothing_that_only_some_commands_need() -> None:
    heavy = ("pandas", "pyarrow", "onnx", "flwr", "ray", "tensorboard", "omegaconf")
    code = f"import sys, fedx_pl; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


IMAGES = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
PAIR = (IMAGES, np.arange(24) % 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": FederatedDataModule(PAIR)},
            r"data is a FederatedDataModule, which has settings of its own; write",
        ),
        (
            {"method": SimCLR(resnet10(width=4))},
            r"method is a SimCLR that is made already.* write method=SimCLR",
        ),
        ({"method": 3}, r'method=3 is not possible; write method="byol"'),
        ({"data": PAIR, "data.limit": 5}, r"data\.limit=5 does nothing beside images of your own"),
        (
            {"data": PAIR, "callbacks": Callback()},
            r"callbacks=Callback\(\.\.\.\) is not possible.*RoundCallback",
        ),
        ({"callbacks": [RoundCallback]}, r"callbacks=RoundCallback is not possible"),
        (
            {"callbacks": "early_stoping"},
            r"callbacks=\[early_stoping\] is not known.* early_stopping",
        ),
        ({"logger": CSVLogger}, r"logger=CSVLogger is not possible"),
        ({"data": (IMAGES / 255, None)}, r"the images are float64"),
        ({"data": 3}, r"the images are given as a int; give a pair"),
    ],
)
def test_federate_says_what_would_do_nothing_or_fail(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        federate(quiet=True, **settings)


def test_federate_takes_one_callback_and_a_logger(tmp_path: Path) -> None:
    class Count(RoundCallback):
        rounds = 0

        def on_round_saved(self, *_: Any) -> None:
            self.rounds += 1

    count, logger = Count(), CSVLogger(tmp_path, name="log", version="")
    words = [
        "backbone.name=resnet10",
        "backbone.width=4",
        "optim.batch_size=8",
        "evaluation.linear.epochs=2",
    ]
    usual: dict[str, Any] = {
        "rounds": 1,
        "epochs": 1,
        "clients": 2,
        "run.threads": THREADS,
        "quiet": True,
    }
    logged = federate(
        "",
        *words,
        data=(PAIR, PAIR),
        callbacks=count,
        logger=logger,
        **usual,
        **{"run.root": tmp_path},
    )
    assert count.rounds == 1
    assert "knn_top1" in logged.history  # There are images to evaluate on.
    assert (tmp_path / "log" / "metrics.csv").exists()
    assert not (logged.folder / "tensorboard").exists()
    silent = federate(
        "",
        *words,
        data=PAIR,
        logger=False,
        callbacks=None,
        **usual,
        **{"run.dir": tmp_path / "run"},
    )
    assert not (silent.folder / "tensorboard").exists()
