"""Differential privacy of a client's update: clipping, Gaussian noise, and the epsilon spent.

Only the client sees the update without noise, so the server need not be trusted. docs/privacy.md
says what this protects and what it does not.
"""

import math
import os
from bisect import bisect
from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from fedx_pl.federation.options import PrivacyOptions
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.methods.base import State
from fedx_pl.options import OptionError

_LEAST_VARIANCE = 1e-5  # BatchNorm's epsilon: a smaller variance would not change its output


def require_possible(options: PrivacyOptions, regularizer: Regularizer) -> None:
    """Raises an `OptionError` for settings that would fail, or not protect, later.

    Args:
        options: the run's options.
        regularizer: the run's regularizer.
    """
    if options.clip and regularizer.beside_weights:
        name = type(regularizer).__name__
        problem = f"does not cover what {{regularizer={name}()}} sends beside the weights"
        advice = "{regularizer=FedProx()} or none"
        raise OptionError("clip", options.clip, problem, advice, PrivacyOptions)
    options.require_accountant()


def require_budget(
    options: PrivacyOptions, rounds: int, epsilon_after: Callable[[int], float]
) -> None:
    """Raises an `OptionError` if a run would spend more than `PrivacyOptions.max_epsilon`.

    Args:
        options: the run's options.
        rounds: the run's rounds.
        epsilon_after: gives the epsilon spent by the end of a round.
    """
    if options.max_epsilon and (spent := epsilon_after(rounds)) > options.max_epsilon:
        enough = bisect(range(1, rounds + 1), options.max_epsilon, key=epsilon_after)
        fewer = f"{{max_rounds}}={enough} or " if enough else ""
        problem = (
            f"is less than the {spent:.2f} that {{noise}}={options.noise} spends in {rounds} rounds"
        )
        advice = f"{fewer}a larger {{noise}}"
        raise OptionError("max_epsilon", options.max_epsilon, problem, advice, PrivacyOptions)


def protect(
    state: State, received: State, options: PrivacyOptions, seed: int | None
) -> tuple[State, dict[str, float]]:
    """Clips an update and adds noise, so that it may leave the client.

    ``d``, all floating tensors of ``state - received`` as one vector, becomes
    ``d min(1, C / |d|) + noise C N(0, 1)``. Integer tensors only count steps and are not changed.

    Args:
        state: shared weights after local training.
        received: shared weights before it.
        options: C and the noise.
        seed: seed of the noise. None draws it from the operating system: whoever knows the seed can
            remove the noise.

    Returns:
        The state, and ``update_norm`` (of ``d`` before clipping), but not under noise, since it
        would leak.
    """
    if not options.clip:
        return state, {}
    deltas = {
        name: _double(t, t) - _double(received[name], t)
        for name, t in state.items()
        if t.is_floating_point()
    }
    norm = torch.stack([delta.square().sum() for delta in deltas.values()]).sum().sqrt().item()
    # NaN is sent as it is: the server says in which tensor.
    if not options.noise and not norm > options.clip:
        return state, {"update_norm": norm}
    if options.noise and not math.isfinite(norm):  # That training failed must not leak, either.
        deltas = {name: torch.zeros_like(delta) for name, delta in deltas.items()}
        norm = 0.0
    scale = options.clip / max(norm, options.clip)
    normal = _from_os if seed is None else _from_seed(seed)
    protected = dict(state)
    for name, delta in deltas.items():
        tensor = _double(received[name], delta) + scale * delta
        if options.noise:
            tensor += options.noise * options.clip * normal(tensor.shape).to(tensor.device)
            if name.endswith("running_var"):
                tensor = tensor.clamp(min=_LEAST_VARIANCE)
        protected[name] = tensor.to(state[name].dtype)
    return protected, {} if options.noise else {"update_norm": norm}


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """The epsilon that a client has spent after some updates.

    Any two clients' data count as neighbors: clipped updates then differ by up to 2C, so the noise
    has ``noise / 2`` standard deviations. Sampling of clients and averaging do not help, since the
    server sees each update by itself.

    Args:
        noise: `PrivacyOptions.noise`.
        rounds: updates that the client has sent.
        delta: `PrivacyOptions.delta`.
    """
    return composed_epsilon({noise: rounds}, delta)


def composed_epsilon(answers: Mapping[float, int], delta: float) -> float:
    """The epsilon that a client has spent on updates with different noise.

    Renyi divergences of Gaussian mechanisms add up exactly: those of order ``a`` are
    ``a / (2 (noise / 2)^2)`` each. So these updates cost as much as one with a noise of
    ``(sum of count / noise^2)^(-1/2)``.

    Args:
        answers: how many updates the client has sent, by their `PrivacyOptions.noise`.
        delta: `PrivacyOptions.delta`.

    Returns:
        The epsilon; infinity if one of them had no noise.
    """
    given = {noise: count for noise, count in answers.items() if count}
    if not all(noise > 0 for noise in given):
        return math.inf
    # Here, since it takes seconds to import and most runs do not need it.
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise, count in given.items():
        accountant.compose(GaussianDpEvent(noise / 2), count)
    return float(accountant.get_epsilon(delta))


def _double(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device, torch.float64)


def _from_seed(seed: int) -> Callable[[torch.Size], Tensor]:
    """Noise for simulations, which is the same in every run and on every device."""
    draw = np.random.default_rng(seed)
    return lambda shape: torch.from_numpy(np.asarray(draw.standard_normal(shape)))


def _from_os(shape: torch.Size) -> Tensor:
    """Noise from the operating system's generator, which is made for secrets, unlike numpy's."""
    bits = np.frombuffer(os.urandom(8 * shape.numel()), np.uint64) >> 12
    uniform = (bits + 0.5) * 2.0**-52  # never 0 or 1
    return torch.from_numpy(ndtri(uniform)).reshape(shape)
