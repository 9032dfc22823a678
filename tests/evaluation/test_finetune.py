import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedx_pl.data.augment import Augment, AugmentOptions
from fedx_pl.data.batches import ImageStore
from fedx_pl.data.images import Split
from fedx_pl.errors import UserError
from fedx_pl.evaluation.finetune import SemiOptions, fine_tune, labeled_subset, scores

STILL = AugmentOptions(crop="none", flip=0, brightness=0, contrast=0, saturation=0, hue=0)


class Small(nn.Module):
    """A convolution and a BatchNorm that cannot be trained on one image."""

    feature_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).mean((2, 3)))


def backbone() -> Small:
    torch.manual_seed(5)
    return Small()


def colors(count: int, seed: int = 0) -> Split:
    """Four classes of noisy single-colored 8 x 8 images."""
    rng = np.random.default_rng(seed)
    palette = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40]])
    labels = np.arange(count) % 4
    noise = rng.normal(0, 20, (count, 8, 8, 3))
    return Split(np.clip(palette[labels][:, None, None] + noise, 0, 255).astype(np.uint8), labels)


def tuned(
    count: int,
    options: SemiOptions,
    seed: int = 0,
    augment: AugmentOptions = STILL,
    model: nn.Module | None = None,
    **more: object,
) -> nn.Module:
    data = colors(count)
    store = ImageStore(data.images, torch.device("cpu"), 10**9)
    how = Augment(augment, (0.5,) * 3, (0.25,) * 3)
    rows = np.arange(count)
    model = model or backbone()
    return fine_tune(
        model, store, rows, data.labels, how, classes=4, options=options, seed=seed, **more
    )


# --- the choice of labels


@pytest.mark.parametrize(("fraction", "total"), [(0.01, 25), (0.05, 125), (0.1, 250), (1.0, 2500)])
def test_the_share_is_kept_and_spread_evenly(fraction, total):
    labels = np.arange(2500) % 10
    chosen = labeled_subset(labels, fraction, seed=0)
    assert len(chosen) == len(set(chosen.tolist())) == total
    counts = np.bincount(labels[chosen])
    assert counts.max() - counts.min() <= 1


def test_classes_keep_their_proportions_and_none_is_left_out():
    """10 % of 100, 29 and 3 images: 10, 2.9 and 0.3.

    Rounded down, and at least one: 10, 2, 1, which is all of 13.
    """
    labels = np.repeat([0, 1, 2], [100, 29, 3])
    assert np.bincount(labels[labeled_subset(labels, 0.1, seed=3)]).tolist() == [10, 2, 1]
    assert np.bincount(labels[labeled_subset(labels, 1 / 3, seed=3)]).tolist() == [33, 10, 1]


def test_a_share_that_floats_cannot_hold_is_not_rounded_down():
    """0.29 * 100 is 28.999999999999996."""
    labels = np.repeat([0, 1], [100, 100])
    assert np.bincount(labels[labeled_subset(labels, 0.29, seed=0)]).tolist() == [29, 29]


def test_unlabeled_images_and_missing_classes_are_no_trouble():
    labels = np.array([-1, 5, -1, 5, 7, -1])
    assert labeled_subset(labels, 1.0, seed=0).tolist() == [1, 3, 4]
    assert sorted(labels[labeled_subset(labels, 0.01, seed=0)]) == [5, 7]
    assert len(labeled_subset(np.full(4, -1), 0.5, seed=0)) == 0


def test_the_choice_depends_on_the_seed_and_a_larger_share_adds_to_a_smaller_one():
    labels = np.arange(1000) % 10
    small, large = labeled_subset(labels, 0.05, seed=1), labeled_subset(labels, 0.1, seed=1)
    assert set(small) < set(large)
    assert np.array_equal(small, labeled_subset(labels, 0.05, seed=1))
    assert not np.array_equal(small, labeled_subset(labels, 0.05, seed=2))


# --- the fine-tuning


def test_steps_equal_sgd_with_momentum_by_hand():
    """One batch of all images, three epochs.

    v <- 0.9 v + g, w <- w - lr v, for backbone and classifier alike.
    """
    options = SemiOptions(epochs=3, lr=0.05, batch_size=16)
    found = tuned(16, options)
    # The start: such a step moves nothing
    reference = tuned(16, dataclasses.replace(options, lr=1e-30))
    data = colors(16)
    x = (torch.from_numpy(data.images).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    velocity = [torch.zeros_like(p) for p in reference.parameters()]
    for _ in range(3):
        loss = nn.CrossEntropyLoss()(reference(x), torch.from_numpy(data.labels))
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for parameter, v, gradient in zip(
                reference.parameters(), velocity, gradients, strict=True
            ):
                v.mul_(0.9).add_(gradient)
                parameter.sub_(0.05 * v)
    for parameter, expected in zip(found.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


def test_the_whole_network_learns_and_the_given_backbone_stays_as_it_was():
    model = backbone().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    network = tuned(
        40, SemiOptions(epochs=30, lr=0.05, batch_size=8), augment=AugmentOptions(), model=model
    )
    how = Augment(STILL, (0.5,) * 3, (0.25,) * 3)
    assert scores(network, colors(200, seed=1), how.plain).top1 > 95
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert not torch.equal(tensor, network[0].state_dict()[name]), f"{name} was not trained"


def test_the_same_seed_gives_the_same_network_and_the_global_generator_is_left_alone():
    options = SemiOptions(epochs=2, batch_size=8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tuned(20, options, seed=4, augment=AugmentOptions(), model=(model := Small()))
    torch.set_rng_state(state)
    Small()
    expected = torch.get_rng_state()
    again = tuned(20, options, seed=4, augment=AugmentOptions(), model=model)
    assert torch.equal(torch.get_rng_state(), expected)
    other = tuned(20, options, seed=5, augment=AugmentOptions(), model=model)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first[1].weight, other[1].weight)


@pytest.mark.parametrize(("images", "batch"), [(5, 4), (3, 1), (1, 64)])
def test_a_batch_of_one_image_is_trained_on_and_every_step_is_reported(images, batch):
    steps = []
    options = SemiOptions(epochs=2, batch_size=batch)
    network = tuned(images, options, tick=lambda: steps.append(1))
    assert len(steps) == options.steps(images) == 2 * math.ceil(images / batch)
    assert all(torch.isfinite(p).all() for p in network.parameters())


# --- the accuracy


class Fixed(nn.Module):
    """Predicts class 1 for every image."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([0.0, self.value]).expand(len(x), 2)


def test_accuracy_counts_labeled_images_only():
    test = Split(np.zeros((5, 4, 4, 3), np.uint8), np.array([1, 0, 1, -1, 1]))
    assert scores(Fixed(), test, lambda images: images.float()).top1 == 75.0


def test_a_network_that_diverged_has_no_accuracy():
    test = Split(np.zeros((2, 4, 4, 3), np.uint8), np.array([1, 0]))
    with pytest.warns(UserWarning, match="fine-tuning diverged"):
        assert math.isnan(scores(Fixed(math.nan), test, lambda images: images.float()).top1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"fractions": []},
        {"fractions": [0.0]},
        {"fractions": [1.5]},
        {"epochs": 0},
        {"batch_size": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"momentum": 1.0},
    ],
)
def test_impossible_options_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=f"^{next(iter(wrong))}=.* is not possible"):
        SemiOptions(**wrong)


def test_the_defaults_are_the_paper_s_and_every_option_has_help():
    options = SemiOptions()
    assert (options.fractions, options.epochs, options.lr) == ([0.01, 0.05, 0.1], 100, 1e-3)
    assert all(option.metadata["help"] for option in dataclasses.fields(SemiOptions))
