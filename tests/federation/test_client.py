"""One client's round: batches, seeds, counters and what it keeps."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers import data_for, make_data, make_model, train
from pytorch_lightning.trainer.connectors import callback_connector

from fedx_pl.errors import UserError
from fedx_pl.federation.client import INITIAL_SCALE, LocalTrainer, _StayOnDevice
from fedx_pl.federation.device import resolve_device, resolve_precision
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext
from fedx_pl.methods import BYOL, SimCLR
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.mixins import FedXMixin, wrap


def test_the_result_depends_only_on_its_arguments() -> None:
    """Other clients trained before on the same instance leave no trace."""
    fresh, used = make_model(BYOL), make_model(BYOL)
    state = fresh.shared_state()
    for client in (3, 5):
        train(used, data_for(used, seed=client), state=state, client=client)
    alone = train(fresh, data_for(fresh, seed=9), state=state, client=7)
    after = train(used, data_for(used, seed=9), state=state, client=7)
    expected, found = alone.state.tensors(), after.state.tensors()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_an_optimizer_is_freed_after_its_fit() -> None:
    """Its momentum is as large as the model.

    Python's collector may come late, and a GPU does not wait for it.
    """
    seen = []

    class Watched(SimCLR):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = super().configure_optimizers()
            seen.append(weakref.ref(optimizer))
            return optimizer

    model = make_model(Watched)
    gc.disable()
    try:
        train(model, data_for(model))
        assert [reference() for reference in seen] == [None]
    finally:
        gc.enable()


def test_a_gpu_always_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning selects the GPU by this number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, index in (("auto", 0), ("cuda", 0), ("cuda:1", 1)):
        assert resolve_device(name) == torch.device("cuda", index)
        assert _StayOnDevice(resolve_device(name)).root_device.index == index
    assert resolve_device("cpu") == torch.device("cpu")


def test_counters_continue_over_rounds() -> None:
    model = make_model(SimCLR)
    first = train(model, data_for(model), epochs=2)
    assert (first.memory.steps, first.memory.epochs, first.memory.last_round) == (10, 2, 1)
    second = train(
        model, data_for(model), state=first.state.weights, memory=first.memory, round=4, epochs=2
    )
    assert (second.memory.steps, second.memory.epochs, second.memory.last_round) == (20, 4, 4)


def test_each_epoch_and_each_view_is_drawn_independently() -> None:
    data = make_data()
    first, again, second = (list(data.epoch(number)) for number in (0, 0, 1))
    assert all(torch.equal(a.first, b.first) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].rows, second[0].rows)
    assert not torch.equal(first[0].first, first[0].second)
    assert sorted(torch.cat([batch.rows for batch in first]).tolist()) == list(range(40))


def test_the_relation_batch_is_independent_of_the_batch_and_cycles() -> None:
    """40 images in batches of 8 with relation batches of 30.

    One per lap of its own order, five laps.
    """
    data = make_data(relation_size=30)
    batches = list(data.epoch(0))
    assert [len(batch.relation) for batch in batches] == [30] * 5
    assert not torch.equal(batches[0].relation, batches[1].relation)
    plain = list(make_data(relation_size=0).epoch(0))
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(batches, plain, strict=True))
    assert plain[0].relation is None


@pytest.mark.parametrize(
    ("images", "steps", "size"),
    [(40, 5, 8), (47, 5, 8), (8, 1, 8), (7, 1, 7), (1, 1, 2), (15, 1, 8)],
)
def test_batches_have_one_shape_and_small_clients_one_batch(
    images: int, steps: int, size: int
) -> None:
    data = make_data(images=images)
    batches = list(data.epoch(0))
    assert len(data) == len(batches) == steps
    assert {len(batch.first) for batch in batches} == {size}


def test_images_that_do_not_fit_are_read_as_needed() -> None:
    resident = make_data()
    mapped = make_data(resident_bytes=0)
    for a, b in zip(resident.epoch(0), mapped.epoch(0), strict=True):
        torch.testing.assert_close(a.first, b.first, rtol=0, atol=0)


def test_grayscale_28x28_trains() -> None:
    model = make_model(SimCLR, channels=1)
    update = train(model, make_data(channels=1, side=28))
    assert update.losses.isfinite().all()


def test_local_batchnorm_keeps_a_client_s_own_statistics() -> None:
    model = make_model(SimCLR)
    mine = train(model, data_for(model), batchnorm="local")
    kept = "backbone.bn1.running_mean"
    assert kept in mine.memory.batchnorm
    other = {
        name: torch.zeros_like(t) if "running_mean" in name else t
        for name, t in mine.state.weights.items()
    }
    before = mine.memory.batchnorm[kept].clone()
    seen = []
    model.on_round_start = lambda: seen.append(model.backbone.bn1.running_mean.clone())
    train(model, data_for(model), state=other, memory=mine.memory, round=2, batchnorm="local")
    torch.testing.assert_close(seen[0], before, rtol=0, atol=0)
    train(
        model,
        data_for(model),
        state=other,
        memory=ClientMemory(last_round=1),
        round=2,
        batchnorm="average",
    )
    assert seen[1].abs().sum() == 0


def test_tick_is_called_after_every_step() -> None:
    model, ticks = make_model(SimCLR), []
    context = RoundContext(
        round=1,
        rounds=10,
        epochs=2,
        seed=0,
        global_state=GlobalState(weights=model.shared_state()),
        batchnorm="average",
    )
    LocalTrainer(
        model, device=torch.device("cpu"), precision="32-true", tick=lambda: ticks.append(1)
    ).run(context, client=0, data=data_for(model), memory=None)
    assert len(ticks) == 2 * 5


class Installed(pl.Callback):
    """A callback with state, of which Lightning refuses a second one in a fit."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 1}


def test_a_callback_that_lightning_adds_by_itself_is_in_each_fit_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package may add a callback through an entry point.

    Lightning puts it into the list that it is given.
    """
    monkeypatch.setattr(callback_connector, "_load_external_callbacks", lambda _: [Installed()])
    model = make_model(SimCLR)
    trainer = LocalTrainer(model, device=torch.device("cpu"))
    context = RoundContext(
        round=1, rounds=10, epochs=1, seed=0, global_state=GlobalState(weights=model.shared_state())
    )
    for client in (0, 1):
        trainer.run(context, client=client, data=data_for(model, images=8))
        assert sum(isinstance(callback, Installed) for callback in model.trainer.callbacks) == 1


def test_precision_auto_is_full_on_a_cpu() -> None:
    assert resolve_precision("auto", torch.device("cpu")) == "32-true"
    assert resolve_precision("bf16-mixed", torch.device("cpu")) == "bf16-mixed"
    with pytest.raises(UserError, match="16-mixed' needs a GPU"):
        resolve_precision("16-mixed", torch.device("cpu"))


def test_a_client_keeps_its_loss_scale_from_round_to_round() -> None:
    """A fresh GradScaler would skip the first steps of every fit.

    It is the client's own, so that neither the order of clients nor the process they train in
    shows, and a resumed run has it again.
    """
    model = make_model(SimCLR)
    trainer = LocalTrainer(model, device=torch.device("cpu"), precision="16-mixed")
    context = RoundContext(
        round=1,
        rounds=10,
        epochs=1,
        seed=0,
        global_state=GlobalState(weights=model.shared_state()),
        batchnorm="average",
    )
    first = trainer.run(context, client=0, data=data_for(model, images=8), memory=None)
    assert first.memory.loss_scale["scale"] == INITIAL_SCALE
    scale = first.memory.loss_scale | {"scale": torch.tensor(1024.0)}
    context = replace(context, round=2)
    later = trainer.run(
        context,
        client=0,
        data=data_for(model, images=8),
        memory=replace(first.memory, loss_scale=scale),
    )
    assert later.memory.loss_scale["scale"] == 1024.0
    newcomer = trainer.run(context, client=1, data=data_for(model, images=8), memory=None)
    assert newcomer.memory.loss_scale["scale"] == INITIAL_SCALE


def test_lightning_prints_nothing(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """No greetings, and no warnings about F in eval mode or loaders without workers."""
    model = make_model(wrap(FedXMixin, BYOL))
    first = train(model, data_for(model))
    train(model, data_for(model), state=first.state.weights, memory=first.memory, round=2)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert [str(warning.message) for warning in recwarn] == []


class TwoGroups(SimCLR):
    """An optimizer of its own.

    A small rate for the backbone, a large one for the projector, halved after each step.
    """

    backbone_first = True

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.backbone.parameters()), "lr": 0.4},
            {"params": list(self.projector.parameters()), "lr": 0.04},
        ]
        optimizer = torch.optim.AdamW(groups if self.backbone_first else groups[::-1])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@pytest.mark.parametrize("backbone_first", [True, False])
def test_the_reported_learning_rate_is_the_optimizer_s(backbone_first: bool) -> None:
    """The backbone has more parameters: .4, .2 and .1 in three steps, a mean of .7 / 3.

    `optim.lr` is another.
    """
    model = make_model(TwoGroups, optim=OptimOptions(lr=9.0))
    model.backbone_first = backbone_first  # type: ignore[assignment]
    update = train(model, data_for(model, images=24))
    assert len(update.losses) == 3
    assert update.metrics["lr"] == pytest.approx(0.7 / 3)


def test_the_usual_learning_rate_is_reported_to_the_last_bit() -> None:
    model = make_model(SimCLR, optim=OptimOptions(lr=0.1, schedule="cosine"))
    assert train(model, data_for(model), round=3).metrics["lr"] == model.optim.lr_at(3, 10)


class TensorRate(SimCLR):
    """Its learning rate is a tensor, whose value only the device knows."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.25))


def test_a_learning_rate_that_is_a_tensor_is_reported() -> None:
    model = make_model(TensorRate)
    assert train(model, data_for(model, images=16)).metrics["lr"] == 0.25
