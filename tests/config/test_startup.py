"""Words are checked before torch is imported, which takes seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchvision

from fedx_pl.backbone_options import BACKBONES, OURS, TORCHVISION
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.parameters import declared_parameters, hyper_parameters

# Composes each line of the input, and says what came of it and whether torch was imported.
SCRIPT = """
import sys
import fedx_pl
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
for line in sys.stdin.read().splitlines():
    try:
        print("composed", compose(line.split()).run_name)
    except UserError as error:
        print("error", error)
print(sorted({"torch", "pytorch_lightning", "lightly", "torchvision"} & sys.modules.keys()))
"""


@pytest.mark.skipif(
    any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")),
    reason="with a driver of a GPU, torch is asked whether it can be used",
)
def test_composing_and_answering_a_mistake_import_no_torch() -> None:
    lines = [
        "data=cifar10 method=byol fedx=true federation.rounds=3",
        "method=protocl aggregate=krum federation.min_clients=5 regularizer=scaffold moon=true",
        "data=folder data.root=x partition=folders engine=ray backbone.name=wide_resnet50_2",
        "federation.ronds=3",
        "method=byol method.momentun=0.9",
        "method=bylo",
        "data=cifar11",
        "backbone.name=resnet19",
        "aggregate=medain",
        "engine=rya",
        "regularizer=fedporx",
        "optim.lr=fast",
        "optim.lr=0",
        "fedx.divergence=kl",
        "nonsense",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COVERAGE_PROCESS_START": ""},
    )
    *answers, imported = done.stdout.splitlines()
    assert [answer.split()[0] for answer in answers] == ["composed"] * 3 + ["error"] * 12
    assert "did you mean method.momentum?" in answers[4]
    assert imported == "[]"


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_keys_of_a_method_are_read_from_its_source(name: str) -> None:
    found, expected = declared_parameters(BUILT_IN.paths[name]), hyper_parameters(BUILT_IN[name])
    assert found == expected
    assert list(found) == list(expected)


def test_the_listed_backbones_are_those_of_torchvision() -> None:
    there = torchvision.models.list_models(module=torchvision.models)
    assert {*TORCHVISION, *OURS} - {"resnet10"} == {name for name in there if "resne" in name}
    assert list(BACKBONES) == [*OURS, *TORCHVISION]
