"""Training steps on the `meta` device, where reading a value is an error, in place of a GPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedx_pl import FedXMixin, FedXOptions, SSLMethod, Views
from fedx_pl.data.augment import Augment, AugmentOptions
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.mixins import wrap
from fedx_pl.mixins.relation_queue import RelationQueue

META = torch.device("meta")


class OnlyMeta(TorchDispatchMode):
    """Fails on any operation that uses a tensor of another device.

    On a GPU it would be a copy to the device, or a wait for it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not isinstance(value, Tensor) or value.device == META, (
                f"{func} on {value.device}"
            )
        return result


def on_meta(name: str, relation: str | None) -> tuple[SSLMethod, Views]:
    """A model and a batch on the device."""
    if relation is None:
        model = make_model(BUILT_IN[name])
    else:
        model = make_model(
            wrap(FedXMixin, BUILT_IN[name]), fedx=FedXOptions(relation=relation, queue_size=12)
        )
    if isinstance(model, FedXMixin):
        network = nn.Sequential(model.backbone, model.projector)
        network(torch.randn(4, 3, 16, 16))  # With statistics F is folded,
        model.global_model.refresh(network)
        model.global_model(torch.randn(4, 3, 16, 16))  # and checked once.
        model.global_model.to(META)
        model.relation_queue = RelationQueue(
            torch.empty(12, 8, device=META), torch.empty(12, 8, device=META)
        )
    images = 24 if model.relation_batch else 16
    views = Views(
        torch.empty(images, 3, 16, 16, device=META), torch.empty(8, dtype=torch.long, device=META)
    )
    return model.to(META), views


@pytest.mark.parametrize("relation", [None, "batch", "queue"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_step_stays_on_the_device_and_waits_for_nothing(
    name: str, relation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch, "autocast", lambda *args, **kwargs: nullcontext()
    )  # It does not know this device.
    model, views = on_meta(name, relation)
    with OnlyMeta():
        model.training_step(views, 0).backward()
        model.on_train_batch_end(None, views, 0)
    assert all(
        p.grad is not None and p.grad.device == META for p in model.parameters() if p.requires_grad
    )


def test_the_check_can_fail() -> None:
    class Reads(SSLMethod):
        def loss(self, batch: Views, z: Any) -> Any:
            return {"x": z.first.sum() * z.second.sum().item()}

    class Copies(SSLMethod):
        def loss(self, batch: Views, z: Any) -> Any:
            return {"x": (z.first * torch.ones(len(z.first), 1).to(z.first)).sum()}

    views = Views(
        torch.empty(16, 3, 16, 16, device=META), torch.empty(8, dtype=torch.long, device=META)
    )
    for method in (Reads, Copies):
        model = make_model(method).to(META)
        with OnlyMeta():
            z = model.embed_views(views)
            with pytest.raises((RuntimeError, AssertionError)):
                model.loss(views, z)


@pytest.mark.parametrize(
    "options",
    [
        AugmentOptions(grayscale=0.2, blur=0.5, rotation=15),
        AugmentOptions(crop="resized", grayscale=0.2, blur=0.5),
    ],
)
def test_augmentation_stays_on_the_device(options: AugmentOptions) -> None:
    images = torch.empty(8, 32, 32, 3, dtype=torch.uint8, device=META)
    views = Augment(options, (0.5,) * 3, (0.25,) * 3)(images, torch.Generator())
    assert views.device == META
    assert views.shape == (8, 3, 32, 32)


def test_the_optimizer_is_one_kernel_that_takes_the_loss_scale_on_the_device() -> None:
    """In fp16, GradScaler gives a fused optimizer scale and overflow flag without a host sync."""
    model = make_model(BUILT_IN["simclr"], optim=OptimOptions())
    model.local = type("Local", (), {"round": 1, "rounds": 1})()
    optimizer = model.configure_optimizers()
    assert optimizer.defaults["fused"]
    assert optimizer._step_supports_amp_scaling
