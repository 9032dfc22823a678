"""What each method keeps at home, and how it meets the next global model."""

import math

import pytest
import torch
from helpers import data_for, make_model, start, train
from torch import nn

from fedx_pl.data.batches import ClientData
from fedx_pl.methods import BYOL, FedU, MoCo, ProtoCL
from fedx_pl.methods.base import EmaPair, copy_state, update_ema
from fedx_pl.methods.protocl import cluster, k_means


def test_ema_moves_the_target_slowly_towards_the_online_network() -> None:
    """m = .9, target 1, online 2: .9 * 1 + .1 * 2 = 1.1. The inverted direction would give 1.9."""
    online, target = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.constant_(online.weight, 2.0)
    nn.init.constant_(target.weight, 1.0)
    update_ema(EmaPair(online, target, 0.9))
    assert target.weight.item() == pytest.approx(1.1)
    assert online.weight.item() == 2.0


def test_ema_keeps_the_storage_of_the_target() -> None:
    online, target = nn.Linear(2, 2), nn.Linear(2, 2)
    address = target.weight.data_ptr()
    update_ema(EmaPair(online, target, 0.5))
    assert target.weight.data_ptr() == address


# --- BYOL ---


def test_byol_target_is_private_and_survives_a_round() -> None:
    model = make_model(BYOL)
    first = train(model, data_for(model))
    assert all(name.startswith("target.") for name in first.memory.tensors())
    assert not any(name.startswith("target.") for name in first.state.tensors())
    model.receive(first.state.weights, first.memory.private, absent=0)
    kept = model.private_state()
    for name, tensor in first.memory.private.items():
        torch.testing.assert_close(kept[name], tensor, rtol=0, atol=0)


def test_byol_client_that_was_absent_starts_its_target_from_the_global_model() -> None:
    model = make_model(BYOL)
    first = train(model, data_for(model))
    model.receive(first.state.weights, first.memory.private, absent=1)
    torch.testing.assert_close(
        model.target[0].conv1.weight, model.backbone.conv1.weight, rtol=0, atol=0
    )
    assert not torch.equal(
        first.memory.private["target.0.conv1.weight"], model.backbone.conv1.weight
    )


def test_byol_loss_is_symmetric_in_the_views() -> None:
    model = make_model(BYOL)
    data = data_for(model)
    start(model, data)
    batch = next(data.epoch(0))
    swapped = batch._replace(stacked=torch.cat([batch.second, batch.first]))
    loss = model.loss(batch, model.embed_views(batch)).total
    torch.testing.assert_close(
        model.loss(swapped, model.embed_views(swapped)).total, loss, rtol=1e-4, atol=1e-5
    )


# --- MoCo ---


def test_moco_key_network_is_the_query_network_at_round_start() -> None:
    model = make_model(MoCo, queue_size=32)
    first = train(model, data_for(model))
    assert not torch.equal(model.key[0].conv1.weight, model.backbone.conv1.weight)
    model.receive(first.state.weights, first.memory.private)
    torch.testing.assert_close(
        model.key[0].conv1.weight, model.backbone.conv1.weight, rtol=0, atol=0
    )


def test_moco_queue_is_kept_between_rounds_and_never_shared() -> None:
    model = make_model(MoCo, queue_size=32)
    first = train(model, data_for(model))
    assert set(first.memory.tensors()) == {"queue", "queue_next"}
    assert not {"queue", "queue_next"} & first.state.tensors().keys()
    model.receive(first.state.weights, first.memory.private, absent=3)
    torch.testing.assert_close(model.queue, first.memory.private["queue"], rtol=0, atol=0)


def test_moco_queue_wraps_around_at_any_batch_size() -> None:
    model = make_model(MoCo, queue_size=5)
    rows = torch.arange(1.0, 10.0)[:, None].expand(9, 8)
    model.enqueue(rows[:3])
    model.enqueue(rows[3:6])
    assert model.queue[:, 0].tolist() == [6, 2, 3, 4, 5]
    assert model.queue_next.item() == 1
    model.enqueue(rows)  # More than the queue holds: the last five stay.
    assert sorted(model.queue[:, 0].tolist()) == [5, 6, 7, 8, 9]


def test_moco_queue_shrinks_for_small_clients() -> None:
    model = make_model(MoCo, queue_size=64)
    for images, expected in ((200, 64), (40, 32), (10, 5), (1, 1)):
        start(model, data_for(model, images=images))
        assert model.capacity == expected


def test_moco_queries_do_not_pass_through_the_key_network_s_gradient() -> None:
    model = make_model(MoCo, queue_size=32)
    data = data_for(model)
    start(model, data)
    batch = next(data.epoch(0))
    assert not model.keys(batch.second).requires_grad


@pytest.mark.parametrize(("version", "tau", "head"), [(1, 0.07, nn.Linear), (2, 0.2, None)])
def test_moco_versions_differ_in_head_and_temperature(
    version: int, tau: float, head: type | None
) -> None:
    model = make_model(MoCo, version=version, tau=0)
    assert model.tau == tau
    assert make_model(MoCo, version=version).tau == 0.1
    assert isinstance(model.projector, nn.Linear) == (head is nn.Linear)


# --- FedU ---


def fedu_after_a_round(mu: float) -> tuple[FedU, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A trained FedU client, its private state, and a global state whose predictor is all ones."""
    model = make_model(FedU, mu=mu)
    update = train(model, data_for(model))
    ones = {
        n: torch.ones_like(t) if n.startswith("predictor.") else t
        for n, t in update.state.weights.items()
    }
    return model, update.memory.private, ones


def test_fedu_takes_the_global_predictor_when_it_moved_little() -> None:
    model, private, state = fedu_after_a_round(mu=1e9)
    model.receive(state, private)
    assert all((p == 1).all() for p in model.predictor.parameters())


def test_fedu_keeps_its_own_predictor_when_it_moved_far() -> None:
    model, private, state = fedu_after_a_round(mu=1e-9)
    own = {name: tensor.clone() for name, tensor in model.predictor.state_dict().items()}
    model.receive(state, private)
    for name, tensor in model.predictor.state_dict().items():
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=0)


def test_fedu_divergence_is_the_mean_change_over_convolutions() -> None:
    model = make_model(FedU)
    start(model, data_for(model))
    convolutions = [m for m in model.backbone.modules() if isinstance(m, nn.Conv2d)]
    with (
        torch.no_grad()
    ):  # One convolution moves by 2 in each of its n entries: its L2 change is 2 sqrt(n).
        convolutions[0].weight.add_(2.0)
    model.on_round_end()
    expected = 2 * math.sqrt(convolutions[0].weight.numel()) / len(convolutions)
    assert model.round_metrics()["divergence"] == pytest.approx(expected, rel=1e-5)


def test_fedu_absent_client_takes_the_global_predictor() -> None:
    model, private, state = fedu_after_a_round(mu=1e-9)
    model.receive(state, private, absent=2)
    assert all((p == 1).all() for p in model.predictor.parameters())


# --- ProtoCL ---


def test_k_means_finds_well_separated_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[10.0, 0.0], [0.0, 10.0], [-10.0, -10.0]])
    points = centres.repeat_interleave(20, 0) + 0.1 * torch.randn(60, 2, generator=generator)
    for seed in range(20):  # Random starts may share a group: one good start must find all three.
        found, assigned, distance = k_means(points, 3, torch.Generator().manual_seed(seed))
        if len(assigned.unique()) == 3 and all(
            len(set(assigned[i : i + 20].tolist())) == 1 for i in (0, 20, 40)
        ):
            torch.testing.assert_close(found[assigned[0]], centres[0], atol=0.1, rtol=0)
            torch.testing.assert_close(
                distance, (points - found[assigned]).norm(dim=1), atol=1e-3, rtol=0
            )
            return
    pytest.fail("no start found the three groups")


def test_concentration_is_mean_distance_over_log_size_scaled_to_the_temperature() -> None:
    """Two clusters on a line, at distance 1 and 2 from their centers, two images each.

    phi = 1 / log 12 and 2 / log 12. The percentiles 10 and 90 of two values are 1.1 and 1.9 (over
    log 12), their mean is 1.5.
    """
    points = torch.tensor([[99.0], [101.0], [-98.0], [-102.0]])
    for seed in range(20):
        found = cluster(points, 2, 0.2, torch.Generator().manual_seed(seed))
        if (
            found.cluster[0] == found.cluster[1]
            and found.cluster[2] == found.cluster[3] != found.cluster[0]
        ):
            expected = torch.tensor([1.1, 1.9]) / 1.5 * 0.2
            torch.testing.assert_close(found.concentration[found.cluster[[0, 2]]], expected)
            return
    pytest.fail("no start found the two clusters")


def test_singleton_clusters_get_the_largest_concentration() -> None:
    points = torch.cat(
        [torch.randn(30, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([[1e3, 1e3]])]
    )
    for seed in range(50):
        found = cluster(points, 3, 0.2, torch.Generator().manual_seed(seed))
        alone = found.cluster[-1]
        if (found.cluster == alone).sum() == 1:
            assert found.concentration[alone] == found.concentration.max()
            return
    pytest.fail("the outlier was never alone")


def test_identical_images_give_the_plain_temperature() -> None:
    found = cluster(torch.ones(10, 4), 2, 0.2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.concentration, torch.full((2,), 0.2))


def test_protocl_clusters_follow_the_client_s_size_after_the_warm_up() -> None:
    model = make_model(ProtoCL, queue_size=32, warmup_epochs=2)
    start(model, data_for(model, images=100))
    model.on_local_epoch(1)
    assert model.clusterings == []
    model.on_local_epoch(2)
    assert [len(c.prototypes) for c in model.clusterings] == [4, 10, 20]
    assert all(len(c.cluster) == 100 for c in model.clusterings)
    start(model, data_for(model, images=9))
    model.on_local_epoch(2)
    assert model.clusterings == []  # Too small for two clusters of any size.


def test_protocl_clusters_in_eval_mode_without_moving_batchnorm() -> None:
    model = make_model(ProtoCL, queue_size=32, warmup_epochs=0)
    start(model, data_for(model))
    before = model.key[0].bn1.running_mean.clone()
    model.on_local_epoch(0)
    torch.testing.assert_close(model.key[0].bn1.running_mean, before, rtol=0, atol=0)
    assert model.key.training


def test_protocl_prototypes_stay_private() -> None:
    model = make_model(ProtoCL, queue_size=32, warmup_epochs=0)
    update = train(model, data_for(model))
    assert "prototype" in update.loss_names
    assert update.losses[:, update.loss_names.index("prototype")].min() > 0
    names = update.state.tensors() | update.memory.tensors()
    assert not any("prototype" in name or "cluster" in name for name in names)


# --- states ---


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in 1 names"):
        copy_state({"a": torch.zeros(1)}, {})
    with pytest.raises(ValueError, match="a has shape"):
        copy_state({"a": torch.zeros(1)}, {"a": torch.zeros(2)})


def test_a_single_image_is_seen_twice_and_keeps_its_batch_dimension() -> None:
    model = make_model(BYOL)
    data: ClientData = data_for(model, images=1)
    start(model, data)
    batch = next(data.epoch(0))
    assert batch.first.shape == (2, 3, 16, 16)
    assert model.embed_views(batch).first.shape == (2, 8)


def test_a_client_without_its_private_state_does_not_get_another_s() -> None:
    model = make_model(MoCo, queue_size=32)
    with pytest.raises(ValueError, match="differ in 2 names"):
        model.receive(model.shared_state(), {})
