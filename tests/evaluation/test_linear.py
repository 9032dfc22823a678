import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedx_pl.errors import UserError
from fedx_pl.evaluation import linear
from fedx_pl.evaluation.linear import fit, linear_probe
from fedx_pl.evaluation.options import PRESETS, LinearOptions
from fedx_pl.evaluation.scores import score


def blobs(
    count: int, classes: int, width: int = 16, noise: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Gaussian classes whose centers do not depend on the seed."""
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return centers[labels] + noise * torch.randn(count, width, generator=generator), labels


def textbook(
    layer: nn.Linear, x: Tensor, y: Tensor, batches: list[Tensor], options: LinearOptions
) -> Tensor:
    """nn.Linear + CrossEntropyLoss + torch.optim.Adam over these batches.

    Weight and bias as (classes, D + 1).
    """
    optimizer = torch.optim.Adam(
        layer.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    for batch in batches:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(layer(x[batch]), y[batch]).backward()
        optimizer.step()
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def start(classes: int, width: int) -> tuple[nn.Linear, Tensor]:
    layer = nn.Linear(width, classes)
    weight = torch.randn(classes, width + 1, generator=torch.Generator().manual_seed(3))
    layer.weight.data.copy_(weight[:, :-1])
    layer.bias.data.copy_(weight[:, -1])
    return layer, weight


# A large weight decay, so that a decoupled or forgotten one shows; 1e-6 would hide in the
# tolerance.
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_each_step_equals_torch_adam(steps):
    x, y = blobs(10 * 16, classes=5)
    options = LinearOptions(lr=0.05, weight_decay=0.1, batch_size=16)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))[: steps * 16]
    layer, weight = start(5, 16)
    fit(weight, x, y, [order], options)
    expected = textbook(layer, x, y, list(order.split(16)), options)
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def test_epochs_with_a_short_last_batch_and_many_shuffled_chunks_equal_torch_adam(monkeypatch):
    monkeypatch.setattr(linear, "_SHUFFLED_ROWS", 40)  # chunks of 32, of 100 rows: 32 + 32 + 32 + 4
    x, y = blobs(100, classes=7)
    options = LinearOptions(lr=0.01, weight_decay=0.01, batch_size=16)
    orders = list(
        torch.stack(
            [torch.randperm(100, generator=torch.Generator().manual_seed(s)) for s in range(5)]
        )
    )
    layer, weight = start(7, 16)
    fit(weight, x, y, orders, options)
    expected = textbook(
        layer, x, y, [batch for order in orders for batch in order.split(16)], options
    )
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


def test_ends_where_a_data_loader_ends():
    """Converged, overlapping classes.

    Other batches and another start give the same accuracy within a point.
    """
    (x, y), (test_x, test_y) = blobs(600, 4), blobs(2000, 4, seed=1)
    options = LinearOptions(epochs=30, lr=1e-2)
    torch.manual_seed(0)
    layer = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(
        layer.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    for _ in range(options.epochs):
        for batch_x, batch_y in DataLoader(TensorDataset(x, y), options.batch_size, shuffle=True):
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(layer(batch_x), batch_y).backward()
            optimizer.step()
    with torch.no_grad():
        reference = 100 * (layer(test_x).argmax(1) == test_y).float().mean().item()
    result = linear_probe(x, y, test_x, test_y, classes=4, options=options, seed=0)
    assert 60 < reference < 95  # neither chance nor trivial, where agreement would say little
    assert result.top1 == pytest.approx(reference, abs=1.0)


def test_starts_as_nn_linear_does():
    """A vanishing step.

    The accuracy is that of weights drawn from U(-1/sqrt(D), 1/sqrt(D)), chance over seeds.
    """
    x, y = blobs(500, 10, noise=0.1)
    options = LinearOptions(epochs=1, lr=1e-12)
    top1 = [
        linear_probe(x, y, x, y, classes=10, options=options, seed=seed).top1 for seed in range(20)
    ]
    assert 2 < sum(top1) / len(top1) < 25
    assert len(set(top1)) > 5


def test_same_seed_same_result_and_the_global_generator_is_left_alone():
    (x, y), (test_x, test_y) = blobs(200, 10), blobs(500, 10, seed=1)
    options = LinearOptions(epochs=2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = linear_probe(x, y, test_x, test_y, classes=10, options=options, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert linear_probe(x, y, test_x, test_y, classes=10, options=options, seed=5) == first
    others = {
        linear_probe(x, y, test_x, test_y, classes=10, options=options, seed=seed)
        for seed in range(6, 16)
    }
    assert len(others) > 1  # Any two of ten may well be the same.


def test_small_steps_run_on_one_thread_and_the_setting_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(linear, "fit", lambda *_, **__: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    x, y = blobs(20, 4)
    try:
        torch.set_num_threads(2)
        linear_probe(x, y, x, y, classes=4, options=LinearOptions(), seed=0)
        monkeypatch.setattr(linear, "_SMALL_STEP", 1)
        linear_probe(x, y, x, y, classes=4, options=LinearOptions(), seed=0)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]
    assert after == 2


def test_top5_counts_the_five_best():
    """Logits 7 .. 0 for classes 0 ..

    7 whatever the features: labels 0, 4 and 5 are first, fifth and sixth.
    """
    logits = torch.arange(7.0, -1, -1).expand(3, 8)
    labels = torch.tensor([0, 4, 5])
    found = score(logits, labels, classes=8)
    assert found.top1 == pytest.approx(100 / 3)
    assert found.top5 == pytest.approx(200 / 3)


def test_top5_is_trivial_with_five_classes():
    (x, y), (test_x, test_y) = blobs(50, 5), blobs(50, 5, seed=1)
    result = linear_probe(x, y, test_x, test_y, classes=5, options=LinearOptions(epochs=1), seed=0)
    assert result.top5 == 100.0
    assert result.top1 < 100.0


def test_fewer_images_than_a_batch():
    x, y = blobs(7, 3, noise=0.1)
    options = LinearOptions(epochs=200, lr=0.05, batch_size=64)
    assert linear_probe(x, y, x, y, classes=3, options=options, seed=0).top1 == 100.0


def test_one_class():
    x = torch.randn(10, 4)
    y = torch.zeros(10)
    found = linear_probe(x, y, x, y, classes=1, options=LinearOptions(), seed=0)
    assert (found.top1, found.top5) == (100.0, 100.0)


def test_a_class_without_train_images_is_not_predicted():
    (x, y), (test_x, test_y) = blobs(300, 4, noise=0.1), blobs(300, 4, noise=0.1, seed=1)
    seen = y != 2
    options = LinearOptions(epochs=30, lr=0.05)
    result = linear_probe(x[seen], y[seen], test_x, test_y, classes=4, options=options, seed=0)
    assert result.top1 == pytest.approx(100 * (test_y != 2).double().mean().item())


def test_unlabeled_images_are_left_out_of_both_sets():
    (x, y), (test_x, test_y) = blobs(100, 4), blobs(100, 4, seed=1)
    options = LinearOptions(epochs=3)
    clean = linear_probe(x, y, test_x, test_y, classes=4, options=options, seed=0)
    nothing, unknown = torch.full((50, 16), 1e3), torch.full((50,), -1)
    mixed = linear_probe(
        torch.cat([nothing, x]),
        torch.cat([unknown, y]),
        torch.cat([test_x, nothing]),
        torch.cat([test_y, unknown]),
        classes=4,
        options=options,
        seed=0,
    )
    assert mixed == clean


def test_non_finite_features_give_nan_and_a_warning():
    x, y = blobs(20, 6)
    broken = x.clone()
    broken[3] = math.nan
    with pytest.warns(UserWarning, match="train features hold NaN"):
        result = linear_probe(broken, y, x, y, classes=6, options=LinearOptions(epochs=2), seed=0)
    assert math.isnan(result.top1)
    assert math.isnan(result.top5)


def test_features_that_overflow_give_nan_and_a_warning():
    x, y = blobs(20, 6, width=1000)
    with pytest.warns(UserWarning, match="linear probe diverged"):
        result = linear_probe(
            3e38 * x.sign(), y, x, y, classes=6, options=LinearOptions(epochs=2), seed=0
        )
    assert math.isnan(result.top1)
    assert math.isnan(result.top5)


def test_every_option_has_help():
    assert all(option.metadata["help"] for option in dataclasses.fields(LinearOptions))


def test_the_default_preset_is_the_fedx_authors_and_fedema_has_its_own_values():
    assert PRESETS["fedx"] == LinearOptions()
    fedema = PRESETS["fedema"]
    values = (fedema.preset, fedema.epochs, fedema.lr, fedema.weight_decay, fedema.batch_size)
    assert values == ("fedema", 200, 3e-3, 0.0, 2048)
    with pytest.raises(
        UserError,
        match=r"^preset=.moco. is not possible; write fedx or fedema",
    ):
        LinearOptions(preset="moco")
