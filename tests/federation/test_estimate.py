"""The time estimate runs nothing of the user's but forward and backward, and leaves no trace."""

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers import made
from safetensors.torch import load_file
from torch import nn

from fedx_pl import Embeddings, FedXMixin, Loss, SSLMethod, Views
from fedx_pl.cli.main import main
from fedx_pl.config.build import Run
from fedx_pl.config.compose import compose
from fedx_pl.federation import estimate
from fedx_pl.federation.round import RoundContext, Update
from fedx_pl.methods import BUILT_IN, SimCLR

FORMS = {"plain": [], "fedx": ["fedx=true"], "queue": ["fedx=true", "fedx.relation=queue"]}


@pytest.fixture(autouse=True)
def short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three steps are enough, since the number does not matter."""
    monkeypatch.setattr(estimate, "BUDGET_SECONDS", 0.05)


def state_of(model: SSLMethod) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def two_rounds(run: Run) -> list[Update]:
    """What a client gives back in its first two rounds."""
    trainer, local = run.trainer, run.trainer.local_trainer()
    state, memory, updates = trainer.first_state(), None, []
    for round_number in (1, 2):
        context = RoundContext(
            round=round_number,
            rounds=trainer.max_rounds,
            epochs=1,
            seed=trainer.seed,
            global_state=state,
            batchnorm=trainer.batchnorm,
        )
        updates.append(
            local.run(context, client=0, data=trainer.client_data(0, round_number), memory=memory)
        )
        state, memory = updates[-1].state, updates[-1].memory
    return updates


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", BUILT_IN)
def test_training_after_an_estimate_is_equal_to_training_without_to_the_bit(
    quick: list[str], method: str, form: str
) -> None:
    results = []
    for estimated in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        run = made(compose([*quick, f"method={method}", *FORMS[form]]))
        before = state_of(run.model)
        if estimated:
            assert run.trainer.estimate_seconds() > 0
        after = run.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(p.grad is None for p in run.model.parameters())
        results.append((torch.rand(1).item(), random.random(), np.random.rand(), two_rounds(run)))
    (*drawn, plain), (*drawn_after, after_estimate) = results
    assert drawn == drawn_after
    for one, other in zip(plain, after_estimate, strict=True):
        assert torch.equal(one.losses, other.losses)
        assert one.metrics == other.metrics
        for mine, others in ((one.state, other.state), (one.memory, other.memory)):
            state, same = mine.tensors(), others.tensors()
            assert state.keys() == same.keys()
            assert all(torch.equal(state[name], same[name]) for name in state)


def test_a_whole_run_after_an_estimate_is_equal_to_one_without(
    quick: list[str], tmp_path: Path
) -> None:
    ends = []
    for name in ("estimated", "plain"):
        run = made(compose([*quick, "method=byol", "fedx=true", f"run.dir={tmp_path / name}"]))
        if name == "estimated":
            run.trainer.estimate_seconds()
        run.fit()
        ends.append(load_file(tmp_path / name / "checkpoints/round_00002/global.safetensors"))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


HOOKS = (
    "configure_callbacks",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_round_start",
    "on_local_epoch",
    "on_round_end",
    "receive",
    "round_metrics",
)
CALLED: list[str] = []


class Told(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        CALLED.append("callback")


class Counting(SimCLR):
    """Writes down which of its hooks are called."""

    def configure_callbacks(self) -> list[pl.Callback]:
        CALLED.append("configure_callbacks")
        return [Told()]


def _counted(name: str) -> Any:
    def hook(self: SSLMethod, *arguments: Any, **options: Any) -> Any:
        CALLED.append(name)
        return getattr(super(Counting, self), name)(*arguments, **options)

    return hook


for _name in HOOKS[1:]:
    setattr(Counting, _name, _counted(_name))


@pytest.mark.parametrize("form", FORMS)
def test_no_hook_and_no_callback_of_a_method_is_called(quick: list[str], form: str) -> None:
    run = made(compose([*quick, f"method={__name__}:Counting", *FORMS[form]]))
    CALLED.clear()
    assert run.trainer.estimate_seconds() > 0
    assert CALLED == []
    two_rounds(run)  # They are there: training calls them.
    assert {"callback", *HOOKS} <= set(CALLED)


class Restless(SimCLR):
    """Changes all kinds of its state in the loss."""

    def __init__(self, backbone: nn.Module, **base: Any) -> None:
        super().__init__(backbone, **base)
        self.calls, self.history, self.recent = 0, [0.5], deque([1], maxlen=2)
        self.seen, self.table = {1}, {"mean": torch.zeros(2)}
        self.array, self.generator = np.zeros(3), torch.Generator().manual_seed(5)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("center", torch.zeros(2))

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        self.calls += 1
        self.history.append(1.0)
        self.recent.append(2)
        self.seen.add(len(self.seen))
        self.table["mean"] += 1
        self.table["new"] = torch.ones(1)
        self.array += 1
        self.hidden += 1
        self.center = self.center + torch.rand(2, generator=self.generator)
        self.late = True
        next(self.backbone.parameters()).data.mul_(1.5)
        return super().loss(batch, z)


def test_whatever_a_loss_changes_is_restored(quick: list[str]) -> None:
    run = made(compose([*quick, f"method={__name__}:Restless"]))
    model = run.model
    assert isinstance(model, Restless)
    before = state_of(model)
    assert run.trainer.estimate_seconds() > 0
    assert model.calls == 0
    assert (model.history, list(model.recent), model.recent.maxlen, model.seen) == (
        [0.5],
        [1],
        2,
        {1},
    )
    assert model.table.keys() == {"mean"}
    assert model.table["mean"].sum() == model.hidden.sum() == model.array.sum() == 0
    assert torch.equal(model.generator.get_state(), torch.Generator().manual_seed(5).get_state())
    assert not hasattr(model, "late")
    assert not hasattr(model, "local")
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


DINO = """
from typing import Any

import torch
from lightly.models.modules.heads import DINOProjectionHead
from torch import nn

from fedx_pl import Embeddings, Loss, SSLMethod, Views
from fedx_pl.losses import nt_xent


class Dino(SSLMethod):
    def __init__(self, backbone: nn.Module, **base: Any) -> None:
        super().__init__(backbone, **base)
        self.projector = DINOProjectionHead(self.feature_dim, 16, 8, self.embed_dim)

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return Loss(contrastive=nt_xent(z.first, z.second, tau=0.1))
"""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("added", [[], ["fedx=true"], ["moon=true"]], ids=["plain", "fedx", "moon"])
def test_a_method_with_a_head_that_cannot_be_deep_copied_trains(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: list[str]
) -> None:
    (tmp_path / "dino_of_a_test.py").write_text(DINO)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "train",
        *quick,
        "method=dino_of_a_test:Dino",
        "optim.lr=0.001",
        *added,
        f"run.dir={tmp_path / 'run'}",
    ]
    assert main([*words, "--dry-run"]) == 0
    assert main(words) == 0
    assert (tmp_path / "run" / "encoder.safetensors").exists()


class Prepared(SimCLR):
    """Its loss needs what a hook has prepared."""

    def on_round_start(self) -> None:
        super().on_round_start()
        self.weight = 2.0

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        return super().loss(batch, z) * self.weight


def test_a_loss_that_needs_a_hook_is_estimated_by_its_network_and_says_so(quick: list[str]) -> None:
    run = made(compose([*quick, f"method={__name__}:Prepared"]))
    with pytest.warns(
        UserWarning, match=r"Prepared\.loss\(\) does not run outside a round \(AttributeError"
    ):
        assert run.trainer.estimate_seconds() > 0
    assert not hasattr(run.model, "weight")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_frozen_copy_of_a_weight_normalized_network_computes_the_same() -> None:
    from lightly.models.modules.heads import DINOProjectionHead

    from fedx_pl.mixins.teacher import Frozen

    head, frozen = DINOProjectionHead(6, 5, 4, 3), Frozen()
    x = torch.randn(7, 6)
    frozen.refresh(head)
    torch.testing.assert_close(frozen(x), head(x))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(1.5)
    frozen.refresh(head)
    torch.testing.assert_close(frozen(x), head(x))


def test_fedx_is_prepared_without_a_round(quick: list[str]) -> None:
    """F is there for the estimate and gone after it."""
    run = made(compose([*quick, "method=byol", "fedx=true"]))
    assert isinstance(run.model, FedXMixin)
    run.trainer.estimate_seconds()
    assert run.model.global_model.network is None
