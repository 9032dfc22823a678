"""Clipping and noise on small vectors, epsilon against two formulas, and whole federations."""

import math
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import data_for, fitted, made, make_model
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import norm

from fedx_pl.callbacks.angle import Angle
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError, install_hint
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.privacy import PrivacyOptions, composed_epsilon, epsilon, protect
from fedx_pl.federation.round import GlobalState, RoundContext, Update
from fedx_pl.methods import BYOL, SimCLR
from fedx_pl.methods.base import State
from fedx_pl.trainer import FederatedTrainer

needs_accountant = pytest.mark.skipif(
    find_spec("dp_accounting") is None, reason="needs dp-accounting: pip install -e '.[privacy]'"
)


def states(*moved: float) -> tuple[State, State]:
    """(after, before) training: tensors that moved by 3 and 4, or by ``moved``, and a counter."""
    by = torch.tensor(moved or (3.0, 4.0))
    before = {"w": torch.tensor([1.0]), "b": torch.ones(len(by) - 1), "steps": torch.tensor(7)}
    return {"w": before["w"] + by[:1], "b": before["b"] + by[1:], "steps": torch.tensor(9)}, before


def noised(
    options: PrivacyOptions, size: int = 40_000, seed: int | None = 0, name: str = "w"
) -> np.ndarray:
    """The noise alone: the update did not move from 0."""
    zero = {name: torch.zeros(size)}
    return protect(zero, zero, options, seed)[0][name].double().numpy()


# --- clipping -------------------------------------------------------------------------------------


def test_a_long_update_is_shortened_to_the_bound() -> None:
    """(3, 4) has norm 5: with C = 2.5 half of it is left, 1 + 1.5 and 1 + 2.

    The counter is no part of it.
    """
    after, before = states()
    clipped, metrics = protect(after, before, PrivacyOptions(clip=2.5), seed=0)
    assert (clipped["w"].item(), clipped["b"].item(), clipped["steps"].item()) == (2.5, 3.0, 9)
    assert metrics == {"update_norm": 5.0}
    assert after["w"].item() == 4.0  # Not changed in place.


@pytest.mark.parametrize("clip", [0.0, 5.0, 6.0])
def test_an_update_within_the_bound_is_untouched_to_the_bit(clip: float) -> None:
    """0.1 + 0.2 is not 0.3: before + (after - before) would differ in the last digit."""
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.randn(1000, generator=generator)}
    after = {"w": before["w"] + 1e-3 * torch.randn(1000, generator=generator)}
    for state, received in (states(), (after, before)):
        kept, _ = protect(state, received, PrivacyOptions(clip=clip), seed=0)
        assert all(torch.equal(kept[name], state[name]) for name in state)


def test_an_update_without_a_change_does_not_divide_by_zero() -> None:
    _, before = states()
    kept, metrics = protect(before, before, PrivacyOptions(clip=1.0), seed=0)
    assert kept["w"].item() == 1.0
    assert metrics == {"update_norm": 0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_failed_training_shows_without_noise_and_not_with_it(bad: float) -> None:
    """The server drops NaN by name.

    With noise even that would be a release, so the client sends noise alone.
    """
    after, before = states(bad, 4.0)
    assert not protect(after, before, PrivacyOptions(clip=1.0), seed=0)[0]["w"].isfinite()
    options = PrivacyOptions(clip=1.0, noise=1.0)
    assert torch.equal(
        protect(after, before, options, 0)[0]["w"], protect(before, before, options, 0)[0]["w"]
    )


# --- noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, None])
def test_the_noise_is_normal_with_noise_times_clip(seed: int | None) -> None:
    """Noise 3, C 0.5: standard deviation 1.5.

    Of 40,000 values its error is 1.5 / sqrt(80,000) = .0053; 6 of them.

    Normal, not only of that width: 95% lie within 1.96 deviations, give or take 6 * sqrt(.95 * .05
    / 40,000) = .0065.
    """
    values = noised(PrivacyOptions(clip=0.5, noise=3.0), seed=seed)
    assert values.std() == pytest.approx(1.5, abs=0.032)
    assert values.mean() == pytest.approx(0.0, abs=6 * 1.5 / 200)
    assert (np.abs(values) < 1.96 * 1.5).mean() == pytest.approx(0.95, abs=0.0065)


@pytest.mark.parametrize(("clip", "share"), [(2.5, 0.5), (10.0, 1.0)])
def test_noise_comes_on_top_of_the_clipped_update(clip: float, share: float) -> None:
    """The difference between an update and a zero update with the same noise.

    It is half of a long update and all of a short one.
    """
    after, before = states()
    options = PrivacyOptions(clip=clip, noise=1.0)
    (moved, metrics), (still, _) = (
        protect(state, before, options, seed=1) for state in (after, before)
    )
    assert moved["w"].item() - still["w"].item() == pytest.approx(3 * share, abs=1e-5)
    assert moved["b"].item() - still["b"].item() == pytest.approx(4 * share, abs=1e-5)
    assert moved["steps"].item() == 9
    assert metrics == {}  # The norm before clipping would leak.


def test_each_tensor_has_its_own_noise() -> None:
    zero = {"a": torch.zeros(100), "b": torch.zeros(100)}
    both, _ = protect(zero, zero, PrivacyOptions(clip=1.0, noise=1.0), seed=0)
    assert not (both["a"] == both["b"]).any()


def test_secret_noise_has_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is never the same twice.

    The outermost bits the system can give are finite: 52 bits reach 8.21 deviations.
    """
    options = PrivacyOptions(clip=1.0, noise=1.0)
    torch.manual_seed(0)
    np.random.seed(0)
    first = noised(options, 100, seed=None)
    torch.manual_seed(0)
    np.random.seed(0)
    assert not (first == noised(options, 100, seed=None)).any()
    for byte, sign in ((b"\x00", -1), (b"\xff", 1)):
        monkeypatch.setattr(os, "urandom", lambda count, byte=byte: byte * count)
        assert noised(options, 1, seed=None).item() == pytest.approx(
            sign * -norm.ppf(2.0**-53), rel=1e-6
        )


def test_a_variance_stays_positive() -> None:
    """Noise of deviation 1 on variances of 0 makes half of them negative.

    A running mean may be so.
    """
    options = PrivacyOptions(clip=1.0, noise=1.0)
    variances, means = (
        noised(options, 1000, name=f"bn.running_{kind}") for kind in ("var", "mean")
    )
    assert variances.min() == pytest.approx(1e-5)
    np.testing.assert_array_equal(variances[means > 1e-5], means[means > 1e-5])
    assert (means < 0).sum() > 400


# --- a client -------------------------------------------------------------------------------------


def train(
    privacy: PrivacyOptions | None, round: int = 1, client: int = 0, seed: int = 0, **options: Any
) -> Update:
    """A client whose training does not depend on seed, round or client: only the noise can."""
    model = make_model(SimCLR)
    trainer = LocalTrainer(
        model, device=torch.device("cpu"), precision="32-true", privacy=privacy, **options
    )
    return trainer.run(
        RoundContext(
            round=round,
            rounds=10,
            epochs=1,
            seed=seed,
            global_state=GlobalState(weights=model.shared_state()),
            batchnorm="average",
        ),
        client=client,
        data=data_for(model),
        memory=None,
    )


def distance(a: State, b: State) -> float:
    squares = [
        (a[name].double() - b[name].double()).square().sum()
        for name in a
        if a[name].is_floating_point()
    ]
    return math.sqrt(sum(squares))


def test_under_noise_a_client_does_not_report_its_angle() -> None:
    assert "angle" in train(PrivacyOptions(clip=1.0), callbacks=[Angle(clients=1)]).metrics
    assert (
        "angle"
        not in train(PrivacyOptions(clip=1.0, noise=1.0), callbacks=[Angle(clients=1)]).metrics
    )


def test_a_client_s_update_is_clipped_as_a_whole() -> None:
    """Weights and BatchNorm's statistics together; private state and counters stay as trained."""
    before, plain = make_model(SimCLR).shared_state(), train(None)
    bound = distance(plain.state.weights, before) / 3
    clipped = train(PrivacyOptions(clip=bound))
    assert distance(clipped.state.weights, before) == pytest.approx(bound, rel=1e-5)
    assert clipped.metrics["update_norm"] == pytest.approx(3 * bound)
    name = "backbone.bn1.running_mean"
    moved = (plain.state.weights[name] - before[name]) / 3
    torch.testing.assert_close(
        clipped.state.weights[name] - before[name], moved, rtol=1e-4, atol=1e-6
    )
    counter = "backbone.bn1.num_batches_tracked"
    assert clipped.state.weights[counter] == plain.state.weights[counter] == 5


def test_what_stays_with_the_client_is_not_noised() -> None:
    kept = []
    for privacy in (None, PrivacyOptions(clip=1.0, noise=1.0)):
        model = make_model(BYOL)
        trainer = LocalTrainer(
            model, device=torch.device("cpu"), precision="32-true", privacy=privacy
        )
        context = RoundContext(
            round=1,
            rounds=10,
            epochs=1,
            seed=0,
            global_state=GlobalState(weights=model.shared_state()),
            batchnorm="local",
        )
        kept.append(trainer.run(context, client=0, data=data_for(model), memory=None).memory)
    plain, noised = (memory.tensors() for memory in kept)
    assert kept[0].batchnorm
    assert all(torch.equal(plain[name], noised[name]) for name in plain)


def test_off_is_off_to_the_bit() -> None:
    plain, off = train(None), train(PrivacyOptions())
    expected, found = plain.state.tensors(), off.state.tensors()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert off.metrics == plain.metrics


def test_noise_depends_on_seed_round_and_client_or_on_nothing_known() -> None:
    privacy, name = PrivacyOptions(clip=1.0, noise=1.0), "projector.layers.0.weight"
    first = train(privacy).state.weights[name]
    assert torch.equal(first, train(privacy).state.weights[name])
    for other in ({"round": 2}, {"client": 1}, {"seed": 1}, {"secret_noise": True}):
        assert (train(privacy, **other).state.weights[name] - first).std() > 0.5, other


# --- epsilon --------------------------------------------------------------------------------------


def closed_form(sigma: float, rounds: int, delta: float) -> float:
    """The classical bound.

    It is the minimum over alpha of rounds * alpha / (2 sigma^2) + log(1 / delta) / (alpha - 1).

    With a = alpha - 1 and k = rounds / (2 sigma^2) it is k + k a + log(1 / delta) / a, least at a =
    sqrt(log / k).
    """
    k, log = rounds / (2 * sigma**2), math.log(1 / delta)
    return k + 2 * math.sqrt(k * log)


def exact(sigma: float, rounds: int, delta: float) -> float:
    """Balle & Wang, ICML 2018, Theorem 8.

    Rounds of a Gaussian mechanism are one with sigma / sqrt(rounds).
    """
    mu = math.sqrt(rounds) / sigma

    def excess(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return brentq(excess, 0, 500)


@needs_accountant
@pytest.mark.parametrize("noise", [2.0, 10.0, 40.0])
@pytest.mark.parametrize("rounds", [1, 50])
def test_epsilon_lies_between_the_exact_value_and_the_classical_bound(
    noise: float, rounds: int
) -> None:
    """Updates of norm C at most are at most 2C apart.

    The noise multiplier is half of `privacy.noise`.
    """
    found = epsilon(noise, rounds, delta=1e-5)
    assert exact(noise / 2, rounds, 1e-5) <= found <= closed_form(noise / 2, rounds, 1e-5)


@needs_accountant
def test_epsilon_of_one_known_case() -> None:
    """With sigma 1, one round, delta 1e-5.

    The exact value is 4.38, the classical bound .5 + sqrt(2 log 1e5) = 5.30.
    """
    assert exact(1.0, 1, 1e-5) == pytest.approx(4.377, abs=1e-3)
    assert closed_form(1.0, 1, 1e-5) == pytest.approx(5.298, abs=1e-3)
    assert epsilon(2.0, 1, 1e-5) == pytest.approx(4.73, abs=0.01)


@needs_accountant
def test_different_noise_composes_as_one_gaussian_mechanism() -> None:
    """Twice 6 and once 3 are 2/36 + 1/9 = 1/6, so as much as once sqrt(6).

    3 and 4 are 25/144, so once 12/5.
    """
    for answers, noise in (
        ({6.0: 2, 3.0: 1}, math.sqrt(6)),
        ({3.0: 1, 4.0: 1}, 2.4),
        ({2.0: 4}, 1.0),
    ):
        assert composed_epsilon(answers, 1e-5) == pytest.approx(epsilon(noise, 1, 1e-5), rel=1e-9)


@needs_accountant
def test_the_epsilon_of_a_sum_is_the_best_over_all_orders() -> None:
    """One mechanism of 2 standard deviations, noise 4.

    It is a / 8 + log(1 - 1/a) - (log delta + log a) / (a - 1).

    At a = 10 it is 1.25 - 0.10536 + (11.51293 - 2.30259) / 9 = 2.168; the best order has hardly
    less.
    """
    assert composed_epsilon({4.0: 1}, 1e-5) == pytest.approx(2.168, rel=0.01)
    assert composed_epsilon({4.0: 1}, 1e-5) <= 2.1681


@needs_accountant
def test_an_answer_without_noise_is_beyond_any_budget() -> None:
    assert composed_epsilon({10.0: 5, 0.0: 1}, 1e-5) == math.inf
    assert composed_epsilon({10.0: 5, 0.0: 0}, 1e-5) == epsilon(10.0, 5, 1e-5)
    assert composed_epsilon({}, 1e-5) == 0


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["privacy.noise=1"], r"privacy.noise=1.0 .*type privacy.clip=1"),
        (["privacy.clip=-1"], r"privacy.clip=-1.0 .*type .*privacy.clip=1"),
        (["privacy.clip=nan"], r"privacy.clip=nan .*type .*privacy.clip=1"),
        (["privacy.clip=1", "privacy.noise=inf"], r"privacy.noise=inf .*type .*privacy.noise=10"),
        (["privacy.delta=0"], r"privacy.delta=0.0 .*type .*privacy.delta=1e-05"),
        (["privacy.max_epsilon=8"], r"privacy.max_epsilon=8.0 .*type privacy.noise=10"),
    ],
)
def test_what_cannot_protect_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(words)


def test_a_plan_without_the_accountant_is_refused(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a round is trained; clipping alone needs none."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    words = [*quick, "privacy.clip=1"]
    made(compose(words))
    message = f"privacy.noise=2.0 needs dp-accounting; type {install_hint('privacy')}"
    with pytest.raises(UserError, match=re.escape(message)):
        made(compose([*words, "privacy.noise=2"]))


def test_scaffold_is_refused(quick: list[str]) -> None:
    """Its control variates leave beside the weights."""
    with pytest.raises(
        UserError, match=r"privacy.clip=1.0 .*regularizer=scaffold.* type regularizer=fedprox"
    ):
        made(compose([*quick, "privacy.clip=1", "regularizer=scaffold"]))


@needs_accountant
def test_a_run_over_its_budget_does_not_start(quick: list[str]) -> None:
    """Noise 10: 3 rounds spend 1.45, 4 spend 1.69 and 5 spend 1.91 (exact: 1.33, 1.55, 1.76)."""
    words = [*quick, "privacy.clip=1", "privacy.noise=10", "federation.rounds=5"]
    with pytest.raises(
        UserError,
        match=r"max_epsilon=1.5 .* spends in 5 rounds; type federation.rounds=3 or a larger",
    ):
        made(compose([*words, "privacy.max_epsilon=1.5"]))
    with pytest.raises(UserError, match=r"type a larger privacy.noise"):
        made(compose([*words, "privacy.max_epsilon=0.1"]))
    made(compose([*words, "privacy.max_epsilon=2"]))


@needs_accountant
def test_sampled_clients_spend_only_when_they_are_chosen(quick: list[str]) -> None:
    words = [
        *quick,
        "privacy.clip=1",
        "privacy.noise=10",
        "federation.fraction=0.3",
        "federation.rounds=9",
    ]
    trainer = made(compose(words)).trainer
    chosen = [trainer.choose_clients(round)[0] for round in range(1, 10)]
    most = max(chosen.count(client) for client in range(3))
    assert 3 <= most < 9
    assert trainer.epsilon_after(9) == epsilon(10.0, most, 1e-5)
    trainer.datamodule.clients.clear()
    assert trainer.epsilon_after(9) == epsilon(10.0, 9, 1e-5)  # Sites: nobody knows beforehand.


# --- federations ----------------------------------------------------------------------------------


def run(words: list[str], folder: Path) -> tuple[FederatedTrainer, State]:
    config = compose([*words, f"run.dir={folder}"])
    result = fitted(config)
    return result, load_file(folder / "checkpoints/round_00002/global.safetensors")


def test_a_clipped_federation_stays_near_its_start(quick: list[str], tmp_path: Path) -> None:
    """Each round moves the mean by C at most, so two rounds by 2C."""
    words = [*quick, "privacy.clip=0.01"]
    result, end = run(words, tmp_path / "clipped")
    start = made(compose(words)).trainer.first_state().tensors()
    assert distance(start, end) <= 2 * 0.01 + 1e-5
    assert all(row["update_norm"] > 0.01 for row in result.history)
    assert "epsilon" not in result.history[0]


@needs_accountant
def test_a_federation_with_noise_reports_its_epsilon(quick: list[str], tmp_path: Path) -> None:
    """The same seed gives the same weights, as in every simulation."""
    words = [*quick, "privacy.clip=0.01", "privacy.noise=2"]
    (result, end), (_, again) = (run(words, tmp_path / name) for name in ("a", "b"))
    assert [row["epsilon"] for row in result.history] == [
        epsilon(2.0, round, 1e-5) for round in (1, 2)
    ]
    assert "epsilon" in (result.folder / "metrics.csv").read_text().splitlines()[0]
    assert "update_norm" not in result.history[0]
    assert all(torch.equal(end[name], again[name]) for name in end)
    assert all((end[name] > 0).all() for name in end if name.endswith("running_var"))
