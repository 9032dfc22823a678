"""`federate` does what the command line does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedx_pl
from fedx_pl import federate
from fedx_pl.errors import UserError


def test_federate_trains_reads_again_and_hands_out_the_encoder(tiny: list[str], tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"experiment=cifar10-bylo is not DATA-METHOD .*experiment=cifar10-byol-fedx"):
        federate("cifar10-bylo", quiet=True)


def test_unknown_names_of_the_package_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'federated'"):
        fedx_pl.federated  # noqa: B018


def test_the_package_imports_nothing_that_only_some_commands_need() -> None:
    heavy = ("pandas", "pyarrow", "onnx", "flwr", "ray", "tensorboard", "omegaconf")
    code = f"import sys, fedx_pl; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
