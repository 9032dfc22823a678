"""One generic tester over every method, plain and with FedX, ours and from outside the package."""

import copy

import pytest
import torch
from barlow_twins import BarlowTwins, FedXBarlowTwins
from helpers import data_for, make_model, start, train
from simsiam import FedXSimSiam, SimSiam
from torch import nn

from fedx_pl import Embeddings, FedXMixin, FedXOptions, Loss, SSLMethod, Views
from fedx_pl.errors import UserError
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.base import State
from fedx_pl.mixins import wrap


def with_queue(method: type[SSLMethod]) -> type[SSLMethod]:
    """FedX with relations to a queue by default."""

    class Queued(FedXMixin, method):  # type: ignore[misc, valid-type]
        def __init__(
            self, *args: object, fedx: FedXOptions | None = None, **kwargs: object
        ) -> None:
            super().__init__(
                *args, fedx=fedx or FedXOptions(relation="queue", queue_size=12), **kwargs
            )

    return Queued


CLASSES = {
    **BUILT_IN,
    **{f"{name}-fedx": wrap(FedXMixin, method) for name, method in BUILT_IN.items()},
    **{f"{name}-fedx-queue": with_queue(method) for name, method in BUILT_IN.items()},
    "simsiam": SimSiam,
    "simsiam-fedx": FedXSimSiam,
    "barlow": BarlowTwins,
    "barlow-fedx": FedXBarlowTwins,
}
every_method = pytest.mark.parametrize("name", CLASSES)


def one_step(model: SSLMethod) -> Loss:
    """Forward and backward on one batch, as the base does it; past ProtoCL's warm-up."""
    data = data_for(model)
    start(model, data, epochs_before=5)
    model.on_local_epoch(5)
    batch = next(data.epoch(0))
    loss = model.loss(batch, model.embed_views(batch))
    loss.total.backward()
    return loss


@every_method
def test_gradients_reach_every_trainable_parameter_and_no_other(name: str) -> None:
    model = make_model(CLASSES[name])
    one_step(model)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"no gradient for {parameter_name}"
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().sum() > 0, f"zero gradient for {parameter_name}"
        else:
            assert parameter.grad is None, f"gradient for frozen {parameter_name}"


@every_method
def test_targets_are_frozen_and_private(name: str) -> None:
    model = make_model(CLASSES[name])
    for pair in model.ema_pairs():
        assert not any(parameter.requires_grad for parameter in pair.target.parameters())
        owner = next(n for n, module in model.named_children() if module is pair.target)
        assert owner in model.private_names()


@every_method
def test_the_global_model_is_no_part_of_the_module(name: str) -> None:
    model = make_model(CLASSES[name])
    names, parameters = list(model.state_dict()), len(list(model.parameters()))
    one_step(model)
    assert list(model.state_dict()) == names
    assert len(list(model.parameters())) == parameters
    if isinstance(model, FedXMixin):
        teacher = model.global_model.network
        assert teacher is not None
        assert not teacher.training
        assert all(
            parameter.grad is None and not parameter.requires_grad
            for parameter in teacher.parameters()
        )


@every_method
def test_shared_and_private_state_round_trip(name: str) -> None:
    """A client that moves to another model instance trains exactly as if it had stayed."""
    model, other = make_model(CLASSES[name], seed=1), make_model(CLASSES[name], seed=2)
    first = train(model, data_for(model))
    shared, private = first.state.tensors(), first.memory.tensors()
    assert shared.keys() & private.keys() == set()
    assert shared.keys() | {
        n for n in model.state_dict() if n.split(".")[0] in model.private_names()
    } == set(model.state_dict())
    stayed = train(model, data_for(model, seed=1), state=shared, memory=first.memory, round=2)
    returned = train(other, data_for(model, seed=1), state=shared, memory=first.memory, round=2)
    for mine, others in ((returned.state, stayed.state), (returned.memory, stayed.memory)):
        found, expected = mine.tensors(), others.tensors()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, msg=key)


@every_method
def test_states_are_copies(name: str) -> None:
    model = make_model(CLASSES[name])
    before = {key: tensor.clone() for key, tensor in model.shared_state().items()}
    held = model.shared_state() | model.private_state()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    for key in before:
        torch.testing.assert_close(held[key], before[key], rtol=0, atol=0)


@every_method
def test_training_changes_the_network_and_lowers_nothing_to_nan(name: str) -> None:
    model = make_model(CLASSES[name])
    before = model.shared_state()
    update = train(model, data_for(model), epochs=2)
    assert update.losses.shape == (2 * 5, len(update.loss_names))
    assert update.losses.isfinite().all()
    assert any(
        not torch.equal(update.state.weights[key], before[key])
        for key in before
        if key.startswith("backbone.conv1")
    )


@every_method
def test_the_terms_add_up_to_the_loss(name: str) -> None:
    model = make_model(CLASSES[name])
    update = train(model, data_for(model))
    torch.testing.assert_close(update.losses[:, 0], update.losses[:, 1:].sum(dim=1))


@every_method
def test_bf16_autocast_runs_and_keeps_float32_weights(name: str) -> None:
    model = make_model(CLASSES[name])
    update = train(model, data_for(model), precision="bf16-mixed")
    assert update.losses.isfinite().all()
    assert {tensor.dtype for tensor in update.state.tensors().values()} <= {
        torch.float32,
        torch.int64,
    }


@every_method
@pytest.mark.parametrize("images", [1, 2, 5])
def test_a_client_smaller_than_a_batch_trains_on_what_it_has(name: str, images: int) -> None:
    model = make_model(CLASSES[name])
    update = train(model, data_for(model, images=images), epochs=2)
    assert len(update.losses) == 2
    assert update.losses.isfinite().all()


@every_method
def test_one_client_round_equals_a_hand_written_loop_to_the_bit(name: str) -> None:
    update, by_hand = by_trainer_and_by_hand(name, fused=True)
    for key, tensor in by_hand.items():
        torch.testing.assert_close(update[key], tensor, rtol=0, atol=0, msg=key)


def test_a_network_may_get_its_first_gradient_later_than_the_others() -> None:
    class Late(SSLMethod):
        def __init__(self, backbone: nn.Module, **base: object) -> None:
            super().__init__(backbone, **base)
            self.late, self.calls = nn.Linear(self.embed_dim, 1), 0

        def loss(self, batch: Views, z: Embeddings) -> Loss:
            self.calls += 1
            return Loss(
                x=z.first.pow(2).mean() if self.calls == 1 else self.late(z.first).pow(2).mean()
            )

    model = make_model(Late)
    before = model.late.weight.detach().clone()
    train(model, data_for(model))
    assert not torch.equal(model.late.weight, before)


@pytest.mark.parametrize("name", ["simclr", "byol"])
def test_the_fused_optimizer_and_ema_change_nothing_but_rounding(name: str) -> None:
    update, by_hand = by_trainer_and_by_hand(name, fused=False)
    for key, tensor in by_hand.items():
        torch.testing.assert_close(update[key], tensor, rtol=1e-3, atol=1e-4, msg=key)


def by_trainer_and_by_hand(name: str, *, fused: bool) -> tuple[State, State]:
    """Shared state after two local epochs, through the real Trainer and through a bare loop."""
    model, reference = make_model(CLASSES[name]), make_model(CLASSES[name])
    data = data_for(model)
    update = train(model, data, epochs=2)

    torch.manual_seed(model.local.seed)
    reference.receive(reference.shared_state(), None)
    reference.start_round(model.local)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, 0.01, 0.9, weight_decay=1e-5, fused=fused)
    for epoch in range(2):
        reference.on_local_epoch(epoch)
        for batch in data.epoch(epoch):
            optimizer.zero_grad()
            z = reference.embed_views(batch)
            loss = reference.loss(batch, z)
            loss.total.backward()
            optimizer.step()
            for online, target, momentum in reference.ema_pairs():
                with torch.no_grad():
                    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                        slow.lerp_(fast, 1 - momentum)
    reference.on_round_end()
    return update.state.tensors(), reference.shared_state()


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("-fedx")])
def test_absent_global_terms_leave_the_method_as_it_is(name: str) -> None:
    """FedX with the weight of its own three terms at 0 trains the method's own loss."""
    plain = CLASSES[name.removesuffix("-fedx")]
    off = FedXOptions(local_relation=0, global_contrast=0, global_relation=0)
    torch.manual_seed(0)
    model = make_model(CLASSES[name], fedx=off)
    assert not model.relation_batch
    other = make_model(plain)
    mine = model.state_dict()
    other.load_state_dict({key: mine[key] for key in other.state_dict()})
    data = data_for(model)
    for m in (model, other):
        start(m, data)
    batch = next(data.epoch(0))
    # FedX always embeds both views, MoCo alone only the query: their BatchNorms see other batches.
    views = other.__class__.online_views == 2
    mine_total = model.loss(batch, model.embed_views(batch)).total
    other_total = other.loss(batch, other.embed_views(batch)).total
    if views:
        torch.testing.assert_close(mine_total, other_total, rtol=0, atol=0)
    else:
        assert mine_total.isfinite()


class OutsideMethod(SSLMethod):
    """A method as a user would write it in another file."""

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return Loss(distance=(z.first - z.second).square().mean())


class OutsideFedX(FedXMixin, OutsideMethod):
    pass


def test_the_mixin_works_on_a_class_from_outside_with_nothing_else() -> None:
    update = train(model := make_model(OutsideFedX), data_for(model))
    assert update.loss_names == (
        "total",
        "distance",
        "local_relation",
        "global_contrast",
        "global_relation",
    )


def test_the_mixin_in_the_wrong_place_is_refused_when_the_class_is_written() -> None:
    with pytest.raises(TypeError, match=r"FedXMixin must come first: class Wrong\(FedXMixin"):

        class Wrong(OutsideMethod, FedXMixin):
            pass


def test_a_method_without_a_loss_says_so() -> None:
    class Forgot(SSLMethod):
        pass

    with pytest.raises(NotImplementedError, match="Forgot must define loss"):
        one_step(make_model(Forgot))


def test_two_terms_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="both named"):
        Loss(a=torch.ones(())) | Loss(a=torch.ones(()))


class Shaped(SSLMethod):
    """A loss whose term has the shape that the test gives it."""

    shape: tuple[int, ...] = ()

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return Loss(
            plain=z.first.square().mean(), shaped=z.second.square().mean().expand(self.shape)
        )


@pytest.mark.parametrize("fedx", [False, True])
def test_a_term_of_one_element_counts_whatever_its_axes(fedx: bool) -> None:
    updates = []
    for shape in ((), (1,), (1, 1)):
        model = make_model(wrap(FedXMixin, Shaped) if fedx else Shaped)
        model.shape = shape
        updates.append(train(model, data_for(model)))
    for update in updates[1:]:
        assert torch.equal(update.losses, updates[0].losses)
        found, expected = update.state.tensors(), updates[0].state.tensors()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_term_that_is_not_one_number_is_named_with_its_shape() -> None:
    model = make_model(Shaped)
    model.shape = (8,)
    with pytest.raises(
        UserError, match=r"the loss term 'shaped' has shape \(8,\).*Loss\(shaped=term\.mean\(\)\)"
    ):
        train(model, data_for(model))
    with pytest.raises(
        UserError, match=r"'extra' is 0\.5, not a tensor; return z\.first\.new_tensor\(0\.5\)"
    ):
        Loss(extra=0.5).total  # type: ignore[arg-type]  # noqa: B018


def test_one_forward_pass_serves_all_views() -> None:
    model = make_model(CLASSES["simclr-fedx"])
    data, calls = data_for(model), []
    start(model, data)
    model.backbone.register_forward_hook(
        lambda module, inputs, output: calls.append(len(inputs[0]))
    )
    batch = next(data.epoch(0))
    model.loss(batch, model.embed_views(batch))
    assert calls == [3 * 8]


def test_deepcopy_of_a_started_model_trains() -> None:
    model = make_model(CLASSES["byol-fedx"])
    train(model, data_for(model))
    train(copy.deepcopy(model), data_for(model))


def test_moving_the_model_moves_no_state_into_the_optimiser() -> None:
    model = make_model(CLASSES["fedu-fedx"])
    start(model, data_for(model))
    optimised = {
        id(p) for group in model.configure_optimizers().param_groups for p in group["params"]
    }
    frozen = {id(p) for module in (model.target, model.own_predictor) for p in module.parameters()}
    assert isinstance(model.fedx_head, nn.Module)
    assert {id(p) for p in model.fedx_head.parameters()} <= optimised
    assert not frozen & optimised
