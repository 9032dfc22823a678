import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedx_pl.evaluation.features import extract, measurable


def prepare(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float().div(255).contiguous(memory_format=torch.channels_last)


@pytest.fixture
def backbone() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    for parameter in network.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    network[1].running_mean.uniform_(-1, 1, generator=generator)
    return network


@pytest.fixture
def images() -> Tensor:
    return torch.randint(
        0, 256, (23, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_features_are_those_of_eval_mode_whatever_the_batch_size(backbone, images):
    backbone.train()
    features = extract(backbone, images, prepare, batch_size=5)
    backbone.eval()
    with torch.no_grad():
        expected = backbone(prepare(images))
    assert features.shape == (23, 8)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, expected)


def test_modes_and_buffers_are_left_as_they_were(backbone, images):
    backbone.train()
    backbone[1].eval()  # a frozen BatchNorm inside a training network
    modes = [module.training for module in backbone.modules()]
    state = {name: value.clone() for name, value in backbone.state_dict().items()}
    extract(backbone, images, prepare)
    assert [module.training for module in backbone.modules()] == modes
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_modes_are_put_back_when_the_forward_fails(backbone, images):
    backbone.train()
    with pytest.raises(RuntimeError):
        extract(backbone, images[..., :2], prepare)
    assert all(module.training for module in backbone.modules())


def test_a_read_only_memmap_gives_the_same_features(backbone, images, tmp_path, recwarn):
    np.save(tmp_path / "images.npy", images.numpy())
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert torch.equal(
        extract(backbone, mapped, prepare, 10), extract(backbone, images, prepare, 10)
    )
    assert not recwarn.list


def test_features_can_be_trained_on(backbone, images):
    probe = nn.Linear(8, 2)
    probe(extract(backbone, images, prepare)).sum().backward()  # an inference tensor would raise
    assert probe.weight.grad is not None


def test_feature_maps_are_flattened_and_half_precision_widened(images):
    features = extract(nn.AvgPool2d(4), images, lambda batch: prepare(batch).bfloat16())
    assert features.shape == (23, 3 * 2 * 2)
    assert features.dtype == torch.float32


def test_no_images_is_an_error(backbone, images):
    with pytest.raises(ValueError, match="no images"):
        extract(backbone, images[:0], prepare)


def test_measurable_drops_unlabeled_images_with_their_features():
    x, y = (
        torch.arange(4.0, dtype=torch.float64)[:, None],
        torch.tensor([1, -1, 0, -1], dtype=torch.int16),
    )
    train_x, train_y, test_x, test_y = measurable(x, y, x[:3], y[:3], classes=2)
    assert train_x.tolist() == [[0.0], [2.0]]
    assert train_y.tolist() == [1, 0]
    assert len(test_x) == len(test_y) == 2
    assert train_x.dtype == torch.float32
    assert train_y.dtype == torch.int64


def test_measurable_refuses_a_label_beyond_the_classes():
    x, y = torch.zeros(2, 1), torch.tensor([0, 3])
    with pytest.raises(ValueError, match="test label is 3"):
        measurable(x, torch.zeros(2), x, y, classes=3)
