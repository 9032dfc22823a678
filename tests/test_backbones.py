import subprocess
import sys
from typing import Any

import pytest
import torch
import torchvision
from helpers import PATIENCE, made

from fedx_pl.backbones import BackboneOptions, build
from fedx_pl.config.compose import compose
from fedx_pl.data import sources
from fedx_pl.errors import UserError


@pytest.mark.parametrize(
    ("name", "width", "channels", "side", "features", "map_side"),
    [
        ("resnet18", 64, 3, 32, 512, 32),
        ("resnet50", 64, 3, 32, 2048, 32),
        ("resnet10", 16, 1, 28, 128, 28),
        ("resnet18", 16, 3, 32, 128, 32),
        ("resnet50", 16, 3, 64, 512, 64),
        ("resnet18", 16, 3, 128, 128, 32),  # the large stem shrinks four-fold
        ("wide_resnet50_2", 64, 3, 128, 2048, 32),
    ],
)
def test_shapes(
    name: str, width: int, channels: int, side: int, features: int, map_side: int
) -> None:
    net = build(BackboneOptions(name, width), channels=channels, image_size=side).eval()
    maps: list[torch.Tensor] = []
    net.layer1.register_forward_hook(lambda module, inputs, output: maps.append(inputs[0]))
    with torch.no_grad():
        assert net(torch.randn(2, channels, side, side)).shape == (2, features)
    assert net.feature_dim == features
    assert maps[0].shape[-1] == map_side


def test_the_full_network_is_torchvision_s_with_another_stem() -> None:
    ours = build(BackboneOptions("resnet18"), channels=3, image_size=32).state_dict()
    theirs = {
        name: t
        for name, t in torchvision.models.resnet18().state_dict().items()
        if not name.startswith("fc.")
    }
    assert ours.keys() == theirs.keys()
    assert {n for n in ours if ours[n].shape != theirs[n].shape} == {"conv1.weight"}


@pytest.mark.parametrize(("stem", "map_side"), [("cifar", 32), ("half", 16), ("imagenet", 8)])
def test_the_stem_can_be_chosen(stem: str, map_side: int) -> None:
    net = build(BackboneOptions("resnet10", 16, stem), channels=3, image_size=32).eval()
    maps: list[torch.Tensor] = []
    net.layer1.register_forward_hook(lambda module, inputs, output: maps.append(inputs[0]))
    with torch.no_grad():
        net(torch.randn(2, 3, 32, 32))
    assert maps[0].shape[-1] == map_side


def test_every_convolution_is_initialized_as_in_torchvision() -> None:
    """Kaiming, fan out: a 3x3 convolution to c channels has a deviation of sqrt(2 / 9c)."""
    torch.manual_seed(0)
    for width in (32, 64):
        net = build(BackboneOptions("resnet18", width), channels=3, image_size=32)
        for weight in (net.conv1.weight, net.layer3[1].conv2.weight):
            assert weight.std().item() == pytest.approx((2 / (9 * weight.shape[0])) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet19"}, "name='resnet19' is not known; write name=resnet1[08], or one of"),
        ({"name": "vit_tiny"}, "name='vit_tiny' is not known; write one of resnet10, resnet18, "),
        ({"stem": "small"}, "stem='small' .*write auto or cifar or half or imagenet"),
        ({"width": 0}, "width=0 .*write a whole number from 1 to 65536, e.g. width=64"),
        ({"name": "wide_resnet50_2", "width": 16}, "width=16 works with"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(BackboneOptions(**options), channels=3, image_size=32)


def test_a_mistake_is_named_before_data_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "load", lambda *_, **__: pytest.fail("data were loaded"))
    with pytest.raises(UserError, match=r"backbone\.name=vit_tiny is not known"):
        made(compose(["data=cifar10", "backbone.name=vit_tiny"]))


def test_a_thin_network_is_the_same_function_under_the_same_names() -> None:
    """Its shortcuts subsample before the 1x1 convolution instead of within it."""
    net = build(BackboneOptions("resnet18", width=4), channels=3, image_size=32).eval()
    usual = torchvision.models.resnet18()
    usual.inplanes = 4
    for i in range(4):
        stage = usual._make_layer(
            torchvision.models.resnet.BasicBlock, 4 * 2**i, 2, stride=1 if i == 0 else 2
        )
        setattr(usual, f"layer{i + 1}", stage)
    usual.conv1, usual.bn1 = net.conv1, net.bn1
    usual.maxpool = usual.fc = torch.nn.Identity()
    usual.load_state_dict(net.state_dict())
    assert usual.layer2[0].downsample[0].stride == (2, 2)
    x = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(net(x), usual.eval()(x))


# The larger the image, the further past its buffer the kernel wrote.
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.slow
def test_thin_networks_leave_the_heap_as_it_was(side: int) -> None:
    """torch 2.15's kernels wrote past their buffers.

    glibc then aborts the process, so each case runs in a separate one.
    """
    script = f"""
import torch
from fedx_pl.backbones import BackboneOptions, build

torch.set_num_threads(1)
for width in (1, 4, 7, 8):
    for name in ("resnet10", "resnet50"):
        net = build(BackboneOptions(name, width), channels=3, image_size={side})
        net = net.to(memory_format=torch.channels_last)
        for step in range(3):
            x = torch.randn(8, 3, {side}, {side}).contiguous(memory_format=torch.channels_last)
            net(x).square().mean().backward()
            others = [torch.empty(size) for size in range(1, 3000, 7)]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_the_encoder_loads_into_torchvision_as_the_readme_says() -> None:
    ours = build(BackboneOptions("resnet18"), channels=3, image_size=32).eval()
    encoder = torchvision.models.resnet18()
    encoder.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    encoder.maxpool = encoder.fc = torch.nn.Identity()
    encoder.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), ours(x))
