"""Encoders: ResNets of any width, with a stem for small or for large images."""

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedx_pl.backbone_options import BackboneOptions, require_possible
from fedx_pl.errors import UserError, first_line

# Blocks per stage. resnet10 is not a torchvision model: it has one block per stage, for CPUs.
_STAGES: dict[str, tuple[type[BasicBlock | Bottleneck], list[int]]] = {
    "resnet10": (BasicBlock, [1, 1, 1, 1]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
}
_LARGE = 96  # Side from which the stem that shrinks images four-fold pays.


def build(options: BackboneOptions, *, channels: int, image_size: int) -> nn.Module:
    """Makes an encoder that maps (n, channels, h, w) to (n, ``feature_dim``).

    The names of its parameters match those of torchvision's ResNet.

    Args:
        options: name, width and stem.
        channels: 1 for grayscale, 3 for color.
        image_size: side of the images, which decides an ``auto`` stem.
    """
    require_possible(options)
    stages = _STAGES.get(options.name)
    net = _resnet(*stages, options.width) if stages else _torchvision_resnet(options.name)
    stem = options.stem
    if stem == "auto":
        stem = "cifar" if image_size < _LARGE else "imagenet"
    kernel, stride = {"cifar": (3, 1), "half": (3, 2), "imagenet": (7, 2)}[stem]
    net.conv1 = nn.Conv2d(
        channels, net.conv1.out_channels, kernel, stride, padding=kernel // 2, bias=False
    )
    if stem != "imagenet":
        net.maxpool = nn.Identity()
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.feature_dim = net.fc.in_features
    net.fc = nn.Identity()
    net.options = replace(options, stem=stem)  # how to make it again
    network: nn.Module = net
    return network


def with_feature_dim(network: nn.Module, *, channels: int = 0, image_size: int = 32) -> nn.Module:
    """A user's network as a backbone; a forward pass finds ``feature_dim`` if it has none.

    Args:
        network: maps (n, channels, h, w) to (n, d).
        channels: channels of an image; 0: as many as the first convolution takes, or 3.
        image_size: side of an image.

    Raises:
        UserError: it is not a network, the forward pass fails, or its output has another shape.
    """
    if not isinstance(network, nn.Module):
        name = getattr(network, "__name__", repr(network))
        raise UserError(f"the backbone is {name}, not a torch module; write e.g. resnet18()")
    if hasattr(network, "feature_dim"):
        return network
    name = type(network).__name__
    shape = (2, channels or first_channels(network) or 3, image_size, image_size)
    try:
        features = passed(network, torch.zeros(shape))
    except Exception as error:  # Whatever a user's network raises.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"the backbone {name} has no feature_dim, and a forward pass of images {shape} fails "
            f"({reason}); set backbone.feature_dim to the number of its features"
        ) from error
    if not isinstance(features, torch.Tensor) or features.dim() != 2:
        given = (
            tuple(features.shape)
            if isinstance(features, torch.Tensor)
            else f"a {type(features).__name__}"
        )
        raise UserError(
            f"the backbone {name} maps images to {given}; it must be (n, d), e.g. with a global "
            f"pooling and without the classifier"
        )
    network.feature_dim = features.shape[1]  # type: ignore[assignment]
    return network


def first_channels(network: nn.Module) -> int | None:
    """The number of channels that the first convolution takes; None if there is none."""
    convolutions = (module for module in network.modules() if isinstance(module, nn.Conv2d))
    return next((convolution.in_channels for convolution in convolutions), None)


def passed(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The output of a network for (n, C, h, w) in eval mode; the network is not changed."""
    training = {module: module.training for module in network.modules()}
    place = next((parameter.device for parameter in network.parameters()), images.device)
    try:
        with torch.no_grad(), eager(network):
            output: torch.Tensor = network.eval()(images.to(place))
            return output
    finally:
        for module, mode in training.items():
            module.training = mode


def resnet10(width: int = 64, *, stem: str = "cifar", channels: int = 3) -> nn.Module:
    """A ResNet with one block per stage, for CPUs; see `resnet18`."""
    return build(BackboneOptions("resnet10", width, stem), channels=channels, image_size=32)


def resnet18(width: int = 64, *, stem: str = "cifar", channels: int = 3) -> nn.Module:
    """A ResNet-18 that maps (n, channels, h, w) to (n, ``feature_dim``).

    Args:
        width: channels of the first stage; 64 is the full network, 16 a thin one.
        stem: ``cifar`` (3x3) for small images, ``half`` (3x3, stride 2), or ``imagenet`` (7x7,
            pooled) for large ones.
        channels: 1 for grayscale, 3 for color.
    """
    return build(BackboneOptions("resnet18", width, stem), channels=channels, image_size=32)


def eager(network: nn.Module) -> AbstractContextManager[None]:
    """A context in which a network that was compiled for training runs uncompiled.

    Eval mode and other batch sizes would be compiled again, which takes longer than it saves.
    """
    compiled = any(module._compiled_call_impl is not None for module in network.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _resnet(block: type[BasicBlock | Bottleneck], stages: list[int], width: int) -> ResNet:
    """A ResNet of torchvision with ``width`` instead of 64 channels in the first stage."""
    net = ResNet(block, stages)
    if width == 64:
        return net
    net.inplanes = width
    net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    net.bn1 = nn.BatchNorm2d(width)
    for i, blocks in enumerate(stages):
        stage = net._make_layer(block, width * 2**i, blocks, stride=1 if i == 0 else 2)
        for module in stage.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        setattr(net, f"layer{i + 1}", stage)
    net.fc = nn.Linear(width * 8 * block.expansion, 1)
    for module in net.modules():
        if getattr(module, "downsample", None) is not None:
            module.downsample = _safe_for_few_channels(module.downsample)
    return net


def _safe_for_few_channels(downsample: nn.Sequential) -> nn.Sequential:
    """The same function, under the same names, without a strided 1x1 convolution of few channels.

    torch 2.15's CPU kernel for the backward pass of such a convolution writes past its buffer if
    it has fewer channels than a vector register has floats, 8 with AVX2 and 16 with AVX-512. The
    pixels that it would skip are left out before it. glibc's heap checker then found nothing:
    widths 1, 4, 7, 8, 15 at 56 and 64 pixels, 4 and 8 at 96, 128 and 224.
    """
    convolution, norm = downsample
    assert isinstance(convolution, nn.Conv2d)
    if convolution.stride == (1, 1) or convolution.in_channels >= 16:
        return downsample
    every_other = nn.MaxPool2d(1, stride=convolution.stride)
    convolution.stride = (1, 1)
    return nn.Sequential(OrderedDict([("pixels", every_other), ("0", convolution), ("1", norm)]))


def _torchvision_resnet(name: str) -> ResNet:
    net = torchvision.models.get_model(name, weights=None)
    assert isinstance(net, ResNet)
    return net
