"""A frozen copy equals its source in eval mode, folded or not, and follows it in place."""

import pytest
import torch
from torch import Tensor, nn

from fedx_pl import backbones
from fedx_pl.backbones import BackboneOptions
from fedx_pl.methods.base import mlp
from fedx_pl.mixins.teacher import Frozen, foldable_pairs


def network(seed: int = 0, width: int = 4) -> nn.Module:
    """A thin ResNet and a head; no BatchNorm has its initial statistics or parameters."""
    torch.manual_seed(seed)
    backbone = backbones.build(BackboneOptions("resnet10", width), channels=3, image_size=16)
    whole = nn.Sequential(backbone, mlp(8 * width, 16, 8, batchnorm=True)).to(
        memory_format=torch.channels_last
    )
    for module in whole.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        whole(torch.randn(16, 3, 16, 16) * 3 + 1)
    return whole


def expected(source: nn.Module, x: Tensor) -> Tensor:
    source.eval()
    with torch.no_grad():
        return source(x)


def test_every_batchnorm_is_folded_and_nothing_changes() -> None:
    source, frozen, x = network(), Frozen(), torch.randn(5, 3, 16, 16)
    frozen.refresh(source)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in frozen.network.modules())
    torch.testing.assert_close(frozen(x), expected(source, x), rtol=1e-4, atol=1e-5)


def test_a_refresh_takes_over_weights_and_statistics_in_place() -> None:
    frozen, other, x = Frozen(), network(seed=1), torch.randn(5, 3, 16, 16)
    frozen.refresh(network())
    before, weights = frozen.network, [p.data_ptr() for p in frozen.network.parameters()]
    frozen.refresh(other)
    assert frozen.network is before
    assert [p.data_ptr() for p in frozen.network.parameters()] == weights
    torch.testing.assert_close(frozen(x), expected(other, x), rtol=1e-4, atol=1e-5)


def test_it_keeps_nothing_of_the_source_alive_or_in_step() -> None:
    source, frozen, x = network(), Frozen(), torch.randn(5, 3, 16, 16)
    frozen.refresh(source)
    before = frozen(x)
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.zero_()
    torch.testing.assert_close(frozen(x), before, rtol=0, atol=0)
    assert not any(p.requires_grad for p in frozen.network.parameters())
    assert not frozen(x).requires_grad


class LayerAndNorm(nn.Module):
    """Layers that would be folded if ``forward`` allowed it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def test_a_layer_whose_output_is_used_twice_is_not_folded() -> None:
    class Twice(LayerAndNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.norm(y) + y

    check_without_folding(Twice())


def test_a_network_that_cannot_be_traced_runs_unfolded() -> None:
    class Branching(LayerAndNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layer(x))
            return y if y.sum() > 0 else -y

    check_without_folding(Branching())


def check_without_folding(source: nn.Module, *shape: int) -> None:
    """Checks equality with the source in eval mode, before and after a refresh."""
    frozen, x = Frozen(), torch.randn(8, *(shape or (4,)))
    for _ in range(2):
        source.train()(torch.randn(8, *(shape or (4,))) * 2 + 1)
        frozen.refresh(source)
        torch.testing.assert_close(frozen(x), expected(source, x))
    assert any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in frozen.network.modules()
    )


def test_what_a_trace_cannot_show_is_found_on_the_first_batch() -> None:
    """Three networks whose BatchNorm cannot be folded.

    They have tied weights, a BatchNorm over an axis other than the layer's output, or a
    normalized weight, which is not a parameter.
    """

    class Tied(LayerAndNorm):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 4)
            self.other.weight = self.layer.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) + self.other(x)

    check_without_folding(Tied())
    check_without_folding(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 4, 4)
    check_without_folding(
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    )


def test_a_network_that_changes_with_its_mode_is_traced_as_it_runs() -> None:
    class Modal(LayerAndNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.norm(y) if self.training else self.norm(y) + y

    check_without_folding(Modal())


def test_a_batchnorm_that_is_never_used_does_not_block_the_others() -> None:
    """Its counter stays 0; the others still use their statistics."""

    class Spare(LayerAndNorm):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x))

    check_without_folding(Spare())


def test_two_refreshes_before_the_first_forward_use_the_second() -> None:
    frozen, other, x = Frozen(), network(seed=1), torch.randn(5, 3, 16, 16)
    frozen.refresh(network())
    frozen.refresh(other)
    torch.testing.assert_close(frozen(x), expected(other, x), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in frozen.network.modules())


def test_folding_holds_under_half_precision() -> None:
    source, frozen, x = network(), Frozen(), torch.randn(5, 3, 16, 16)
    frozen.refresh(source)
    with torch.autocast("cpu", torch.bfloat16):
        half = frozen(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected(source, x), rtol=0.1, atol=0.2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_and_without_bias_and_affine_parameters(affine: bool, bias: bool) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=bias), nn.BatchNorm2d(6, affine=affine), nn.ReLU()
    )
    source(torch.randn(9, 3, 8, 8) * 2 + 1)
    frozen, x = Frozen(), torch.randn(4, 3, 8, 8)
    frozen.refresh(source)
    assert foldable_pairs(source) == [("0", "1")]
    torch.testing.assert_close(frozen(x), expected(source, x), rtol=1e-4, atol=1e-5)


def test_without_running_statistics_those_of_the_batch_are_used() -> None:
    source = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    frozen = Frozen()
    frozen.refresh(source)
    y = frozen(torch.randn(50, 3, 8, 8) * 5 + 3)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(6), rtol=0, atol=1e-5)
    source(torch.randn(50, 3, 8, 8))
    frozen.refresh(source)
    x = torch.randn(50, 3, 8, 8) * 5 + 3
    torch.testing.assert_close(frozen(x), expected(source, x), rtol=1e-4, atol=1e-5)
