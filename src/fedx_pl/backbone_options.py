"""The available encoders and their options; importing this does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedx_pl.errors import nearest
from fedx_pl.options import OptionError, Options, option
from fedx_pl.parts import Parts

OURS = ("resnet10", "resnet18", "resnet34", "resnet50")  # at any width
TORCHVISION = (
    "resnet101",
    "resnet152",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "resnext50_32x4d",
    "wide_resnet101_2",
    "wide_resnet50_2",
)
BACKBONES: Parts[Callable[..., Any]] = Parts(
    dict.fromkeys([*OURS, *TORCHVISION], "fedx_pl.backbones:build")
)


@dataclass(frozen=True)
class BackboneOptions(Options):
    """The encoder to train."""

    name: str = option("resnet18", "resnet10|resnet18|resnet34|resnet50, or any torchvision ResNet")
    width: int = option(
        64,
        "channels of the first stage; 64 is the full network, 16 a thin one",
        at_least=1,
        at_most=2**16,
    )
    stem: str = option(
        "auto",
        "cifar (3x3) | half (3x3, stride 2: 4 x faster) | imagenet (7x7, pooled) | "
        "auto by image size",
        choices=("auto", "cifar", "half", "imagenet"),
    )


def require_possible(options: BackboneOptions) -> None:
    """Raises an `OptionError` if there is no such encoder."""
    if options.name in OURS:
        return
    if options.name not in BACKBONES:
        guess = nearest(options.name, BACKBONES)
        likely = f"{{name}}={guess}, or " if guess else ""
        advice = f"{likely}one of {', '.join(BACKBONES)}"
        raise OptionError("name", options.name, "is not known", advice, BackboneOptions)
    if options.width != 64:
        problem = f"works with {', '.join(OURS)} only, not with {options.name}"
        raise OptionError("width", options.width, problem, "{width}=64", BackboneOptions)
