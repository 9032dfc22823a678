"""What an error tells people to type: names that are near, and how to install an extra."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from fedx_pl.errors import did_you_mean, install_hint, nearest

METHODS = ("simclr", "moco", "byol", "protocl", "fedu")
KEYS = (
    "name",
    "fork",
    "federation",
    "federation.rounds",
    "run.dir",
    "privacy.max_epsilon",
    "optim.lr",
)


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("bioll", METHODS, "byol"),
        ("SimCLR", METHODS, "simclr"),
        ("mocov2", METHODS, "moco"),
        ("eval", ("train", "evaluate"), "evaluate"),
        ("svnh", ("svhn", "fmnist"), "svhn"),
        ("rounds", KEYS, "federation.rounds"),
        ("rond", KEYS, "federation.rounds"),
        ("federation.rond", KEYS, "federation.rounds"),
        ("optimizer.lr", KEYS, "optim.lr"),
        # Words that share letters by chance.
        ("gpu", ("cpu", "mini", "paper"), ""),
        ("fedx", METHODS, ""),
        ("logger", KEYS, ""),
        ("max_epochs", KEYS, ""),
        ("vit_tiny", ("resnet18", "wide_resnet101_2"), ""),
        ("densenet121", ("resnet152",), ""),
        ("anything", (), ""),
    ],
)
def test_a_name_is_suggested_only_if_it_is_near(
    word: str, known: tuple[str, ...], expected: str
) -> None:
    assert nearest(word, known) == expected
    assert did_you_mean(word, known, "x=") == (f"; did you mean x={expected}?" if expected else "")


def install(folder: Path, origin: dict[str, object] | None) -> None:
    """The metadata that pip leaves behind."""
    about = folder / "fedx_pl-0.1.0.dist-info"
    about.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.4",
        "Name: fedx-pl",
        "Version: 0.1.0",
        "Requires-Dist: torch>=2.10",
    ]
    lines += [
        'Requires-Dist: flwr<1.42,>=1.41; extra == "flower"',
        "Requires-Dist: onnx>=1.17; extra == 'onnx'",
    ]
    (about / "METADATA").write_text(
        "\n".join([*lines, 'Requires-Dist: onnxscript>=0.3; extra == "onnx"', ""])
    )
    if origin is not None:
        (about / "direct_url.json").write_text(json.dumps(origin))


def test_a_checkout_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    (checkout / "setup.cfg").touch()
    install(tmp_path / "site", {"url": checkout.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    expected = [sys.executable, "-m", "pip", "install", "-e", f"{checkout}[flower]"]
    assert shlex.split(install_hint("flower")) == expected


@pytest.mark.parametrize("origin", [None, {"url": "file:///a/fedx_pl.whl", "archive_info": {}}])
def test_for_a_wheel_the_requirements_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None
) -> None:
    install(tmp_path / "site", origin)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    pip = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(install_hint("flower")) == [*pip, "flwr<1.42,>=1.41"]
    assert shlex.split(install_hint("onnx")) == [*pip, "onnx>=1.17", "onnxscript>=0.3"]


def test_no_message_of_the_source_goes_another_way() -> None:
    source = Path(__file__).parents[1] / "src" / "fedx_pl"
    assert [file.name for file in source.rglob("*.py") if "pip install" in file.read_text()] == [
        "errors.py"
    ]
