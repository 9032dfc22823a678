"""MOON-unsup and FedCA: the paper's rivals of FedX, as mixins."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from helpers import Watching, data_for, fitted, make_data, make_model, start, train
from safetensors.torch import load_file

from fedx_pl import FedCAMixin, FedXMixin, MoonMixin, SSLMethod, losses
from fedx_pl.cli.main import main
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.checkpoint import Checkpoints, RunState
from fedx_pl.federation.round import GlobalState
from fedx_pl.methods import BUILT_IN, SimCLR
from fedx_pl.mixins import FedCAOptions, MoonOptions, wrap


def test_model_contrast_against_numbers_by_hand() -> None:
    """The cosine is 1 to the global model and 0 to the previous one; tau is .5.

    The term is -log(e^2 / (e^2 + 1)); reversed, it is -log(1 / (e^2 + 1)).
    """
    a, b = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    assert losses.model_contrast(a, a, b, 0.5).item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert losses.model_contrast(a, b, a, 0.5).item() == pytest.approx(math.log(1 + math.exp(2)))
    both = losses.model_contrast(
        torch.cat([a, a]), torch.cat([a, b]), torch.cat([b, a]), 0.5
    ).item()
    assert both == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2)


def moon(**options: float) -> SSLMethod:
    return make_model(wrap(MoonMixin, SimCLR), moon=MoonOptions(**options))


def test_moon_has_no_gradient_in_a_clients_first_round() -> None:
    """The previous model is the global one: the term is log 2 whatever the local model does."""
    update = train(moon(mu=5.0), make_data(), epochs=2)
    plain = train(make_model(SimCLR), make_data(), epochs=2)
    term = update.losses[:, update.loss_names.index("model_contrast")]
    torch.testing.assert_close(term, torch.full_like(term, 5 * math.log(2)))
    torch.testing.assert_close(update.state.tensors(), plain.state.tensors(), rtol=1e-4, atol=1e-5)


def test_moon_contrasts_the_global_with_the_previous_model() -> None:
    model, data = moon(mu=2.0, tau=0.5), make_data()
    first = train(model, data)
    weights = first.state.weights
    other = {
        name: t + 0.05 * torch.randn_like(t) if t.is_floating_point() else t
        for name, t in weights.items()
    }
    other = {name: t.abs() if name.endswith("running_var") else t for name, t in other.items()}
    model.receive(other, first.memory.private)
    start(model, data, round=2)
    batch = next(data.epoch(0))
    z = model.embed_views(batch)
    frozen = []
    for state in (other, weights):
        twin = make_model(SimCLR)
        twin.load_shared({name: state[name] for name in twin.shared_state()})
        frozen.append(twin.eval().embed(batch.first).detach())
    to_global, to_previous = (nnf.cosine_similarity(z.first, f) / 0.5 for f in frozen)
    expected = -torch.log(to_global.exp() / (to_global.exp() + to_previous.exp())).mean()
    assert model.loss(batch, z)["model_contrast"].item() == pytest.approx(
        2 * expected.item(), rel=1e-4
    )


def test_the_previous_model_is_what_the_client_trained_last_and_stays_private() -> None:
    model = moon()
    update = train(model, make_data())
    previous = {
        name: t for name, t in update.memory.private.items() if name.startswith("moon_previous.")
    }
    torch.testing.assert_close(
        previous["moon_previous.0.conv1.weight"], update.state.weights["backbone.conv1.weight"]
    )
    assert not any(name.startswith("moon_previous") for name in update.state.tensors())


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_previous_model_survives_an_absence(name: str) -> None:
    """BYOL forgets its target then, but not what belongs to the mixin."""
    model = make_model(wrap(MoonMixin, BUILT_IN[name]))
    update = train(model, make_data())
    other = {n: t + 0.1 if t.is_floating_point() else t for n, t in update.state.weights.items()}
    model.receive(other, update.memory.private, absent=2)
    kept = model.private_state()["moon_previous.0.conv1.weight"]
    torch.testing.assert_close(kept, update.state.weights["backbone.conv1.weight"])


def base_model() -> SSLMethod:
    """A model in eval mode whose BatchNorm has running statistics, as after training."""
    model = make_model(SimCLR, seed=5).train()
    with torch.no_grad():
        model.embed(next(make_data(seed=3).epoch(0)).first)
    return model.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The files of a finished run that FedCA reads."""
    (tmp_path / "run").mkdir()
    weights = GlobalState(weights=base_model().shared_state())
    Checkpoints(tmp_path / "run").commit(RunState(round=3), weights)
    (tmp_path / "run" / "encoder.safetensors").touch()
    return tmp_path / "run"


def test_a_damaged_base_and_a_copy_beside_it_are_not_taken(base: Path) -> None:
    fedca = wrap(FedCAMixin, SimCLR)
    newest = base / "checkpoints" / "round_00003"
    copy = base / "checkpoints" / "round_00003_backup"
    copy.mkdir()
    (copy / "global.safetensors").write_text("no weights")
    make_model(fedca, fedca=FedCAOptions(base=str(base)))
    content = bytearray((newest / "global.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "global.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"base=.* is not the folder of a finished run"):
        make_model(fedca, fedca=FedCAOptions(base=str(base)))


def test_a_copied_round_or_a_link_in_the_base_is_refused(base: Path, tmp_path: Path) -> None:
    fedca = wrap(FedCAMixin, SimCLR)
    newest = max((base / "checkpoints").iterdir())
    shutil.copytree(newest, copy := newest.with_name("round_00099"))
    with pytest.raises(
        UserError, match=r"not the folder of a finished run \(round_00099 is another round\)"
    ):
        make_model(fedca, fedca=FedCAOptions(base=str(base)))
    shutil.rmtree(copy)
    (base / "checkpoints" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"is a link to"):
        make_model(fedca, fedca=FedCAOptions(base=str(base)))


def test_fedca_aligns_to_the_base_encoder(base: Path) -> None:
    model = make_model(wrap(FedCAMixin, SimCLR), fedca=FedCAOptions(beta=3.0, base=str(base)))
    data = make_data()
    start(model, data)
    batch = next(data.epoch(0))
    z = model.embed_views(batch)
    expected = (
        (nnf.normalize(z.first) - nnf.normalize(base_model().embed(batch.first)))
        .square()
        .sum(dim=1)
        .mean()
    )
    assert model.loss(batch, z)["alignment"].item() == pytest.approx(3 * expected.item(), rel=1e-4)


def test_the_base_encoder_is_neither_trained_nor_sent(base: Path) -> None:
    model = make_model(wrap(FedCAMixin, SimCLR), fedca=FedCAOptions(base=str(base)))
    plain = make_model(SimCLR)
    assert model.shared_state().keys() == plain.shared_state().keys()
    assert not model.private_state()
    update = train(model, make_data())
    x = next(make_data().epoch(0)).first
    torch.testing.assert_close(
        model._fedca_base(x), base_model().embed(x).detach(), rtol=1e-3, atol=1e-4
    )
    assert not torch.equal(
        update.state.weights["backbone.conv1.weight"], plain.backbone.state_dict()["conv1.weight"]
    )


def test_a_missing_or_other_base_says_what_to_type(base: Path, tmp_path: Path) -> None:
    fedca = wrap(FedCAMixin, SimCLR)
    with pytest.raises(
        UserError, match=r"base is empty.*write base=FOLDER.*fedx-pl train federation.clients=1"
    ):
        make_model(fedca)
    with pytest.raises(UserError, match=r"not the folder of a finished run .*; write base=FOLDER"):
        make_model(fedca, fedca=FedCAOptions(base=str(tmp_path)))
    with pytest.raises(UserError, match=r"another network.*size mismatch"):
        make_model(fedca, fedca=FedCAOptions(base=str(base)), embed_dim=4)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_takes_every_mixin_at_once(name: str, tmp_path: Path) -> None:
    method = BUILT_IN[name]
    Checkpoints(tmp_path).commit(
        RunState(round=1), GlobalState(weights=make_model(method).shared_state())
    )
    (tmp_path / "encoder.safetensors").touch()
    whole = wrap(FedXMixin, wrap(MoonMixin, wrap(FedCAMixin, method)))
    model = make_model(whole, fedca=FedCAOptions(base=str(tmp_path)))
    first = train(model, data_for(model))
    second = train(model, data_for(model), state=first.state.weights, memory=first.memory, round=2)
    assert second.losses.isfinite().all()
    assert {"alignment", "model_contrast", "global_contrast", "global_relation"} <= set(
        second.loss_names
    )
    assert wrap(MoonMixin, whole) is whole


def test_mixins_are_keys_of_the_configuration() -> None:
    config = compose(
        [
            "profile=paper",
            "method=byol",
            "moon=true",
            "moon.mu=5",
            "fedx=true",
            "regularizer=fedprox",
        ]
    )
    assert (config.moon.enabled, config.moon.mu, config.fedx.enabled, config.regularizer.name) == (
        True,
        5,
        True,
        "fedprox",
    )
    assert config.name == "cifar10-byol-fedx-moon-fedprox-paper"
    with pytest.raises(UserError, match=r"moon.tau=0"):
        compose(["moon=true", "moon.tau=0"])


@pytest.mark.parametrize("rival", ["moon", "fedca"])
def test_a_rival_is_trained_from_a_config_and_resumes_after_an_interruption(
    rival: str, quick: list[str], tmp_path: Path
) -> None:
    """Two rounds with an interruption between them give the same weights as two without.

    MOON's second round needs what each client kept from its first.
    """
    words = [*quick, f"{rival}=true"]
    if rival == "fedca":
        assert main(["train", *quick, f"run.dir={tmp_path / 'base'}", "federation.rounds=1"]) == 0
        words.append(f"fedca.base={tmp_path / 'base'}")
    assert main(["train", *words, f"run.dir={tmp_path / 'whole'}"]) == 0

    class Stopping(Watching):
        def row(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                raise KeyboardInterrupt

    stopped = [*words, f"run.dir={tmp_path / 'stopped'}"]
    with pytest.raises(KeyboardInterrupt):
        fitted(compose(stopped), Stopping())
    assert main(["train", *stopped]) == 0
    whole, again = (
        load_file(tmp_path / folder / "encoder.safetensors") for folder in ("whole", "stopped")
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    term = {"moon": "loss_model_contrast", "fedca": "loss_alignment"}[rival]
    rows = json.loads((tmp_path / "whole" / "metrics.json").read_text())["rounds"]
    assert rows[-1][term] > 0


def test_a_mixin_after_the_method_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"MoonMixin must come first: class Wrong\(MoonMixin, SimCLR\)"
    ):

        class Wrong(SimCLR, MoonMixin):
            pass
