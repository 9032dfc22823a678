"""FedProx and SCAFFOLD, which keep clients' weights close, for any method and mixin.

A regularizer acts on one client's training and may keep tensors with the client and with the
server. The server's travel with the global weights, as `GlobalState.server`; what clients return
there is averaged like weights and then given to `Regularizer.fold`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fedx_pl.errors import UserError
from fedx_pl.federation.estimate import restored
from fedx_pl.methods.base import LocalRound, SSLMethod, State
from fedx_pl.options import check


class Regularizer(pl.Callback):
    """Changes nothing: the base of the others, and what plain FedAvg uses."""

    beside_weights = False  # whether clients send the server more than their weights

    def server_state(self, model: SSLMethod) -> State:
        """The server's tensors beside the weights, at the start of a run."""
        return {}

    def start(self, model: SSLMethod, server: State, private: State) -> None:
        """Called when a client has received the global weights and is about to train.

        Args:
            model: the client's model.
            server: the server's tensors.
            private: what `finish` left with this client; empty the first time.
        """

    def finish(self, model: SSLMethod) -> tuple[State, State]:
        """Called after local training.

        Returns:
            Tensors for the server, named as in `server_state`, and those that the client keeps.
        """
        return {}, {}

    def require_fitting(self, optimizers: Sequence[Optimizer], method: str) -> None:
        """Raises a `UserError` for optimizers that it does not work with.

        Args:
            optimizers: the method's optimizers.
            method: the method's name, for the message.
        """

    @override
    def on_train_start(self, trainer: pl.Trainer, model: Any) -> None:
        self.require_fitting(trainer.optimizers, type(model).__name__)

    def fold(self, before: State, mean: State, share: float) -> State:
        """The server's next tensors.

        Args:
            before: the server's tensors during the round.
            mean: the mean of what the clients returned, weighted by their images.
            share: the share of all images that the clients of the round own.
        """
        return {}


class FedProx(Regularizer):
    """Adds ``mu/2 |w - w_g|^2`` to the loss, as its gradient ``mu (w - w_g)``.

    ``w_g`` are the weights that the client received.
    """

    def __init__(self, mu: float = 0.01) -> None:
        """Sets the strength.

        Args:
            mu: strength of the pull towards the global weights.
        """
        check("mu", mu, example=0.01, at_least=0)
        self.mu = mu
        self._parameters: list[Tensor] = []
        self._received: list[Tensor] = []

    @override
    def start(self, model: SSLMethod, server: State, private: State) -> None:
        self._parameters = list(trained_parameters(model).values())
        self._received = [p.detach().clone() for p in self._parameters]

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        # A fused optimizer divides the gradients by the loss scale itself, later: ours must have
        # it, too.
        scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        scale = _loss_scale(trainer, model.device) if scaled else None
        for parameter, received in zip(self._parameters, self._received, strict=True):
            if parameter.grad is None:
                continue  # It has not moved.
            pull = parameter.detach() - received
            parameter.grad.add_(pull if scale is None else pull.mul_(scale), alpha=self.mu)


class Scaffold(Regularizer):
    """SCAFFOLD (Karimireddy et al., ICML 2020): corrects each step by control variates.

    A step goes along ``g - c_i + c``; afterwards ``c_i <- c_i - c + (x - y) / (sum of lr)`` for
    weights x received and y returned (the second option of its Algorithm 1). c is the mean of the
    c_i weighted by images, as the weights are.

    The correction is added after the optimizer's step, outside its momentum: then c_i is exactly
    the mean of the optimizer's own steps. Inside, momentum 0.9 would make it ten times too large.
    Only parameters have control variates, BatchNorm's statistics have none. With 16-mixed, a step
    that the loss scaler skips is still corrected and counted.

    Steps must be gradients times one learning rate. Those of Adam and LARS have another size: their
    control variates would be many times as long as the weights.
    """

    beside_weights = True

    def __init__(self) -> None:
        self._parameters: State = {}
        self._received: State = {}
        self._client_variate: State = {}  # c_i
        self._correction: State = {}  # c - c_i
        self._rate = 0.0  # learning rate of the current step
        self._rates = 0.0  # sum of the learning rates of all steps

    @override
    def server_state(self, model: SSLMethod) -> State:
        return _zeros_like(trained_parameters(model))

    @override
    def start(self, model: SSLMethod, server: State, private: State) -> None:
        self._parameters = trained_parameters(model)
        self._received = {name: p.detach().clone() for name, p in self._parameters.items()}
        variate = private or _zeros_like(self._parameters)
        self._client_variate = {
            name: variate[name].to(p.device) for name, p in self._parameters.items()
        }
        self._correction = {
            name: server[name].to(c_i.device) - c_i for name, c_i in self._client_variate.items()
        }
        self._rate = 0.0
        self._rates = 0.0

    @override
    def require_fitting(self, optimizers: Sequence[Optimizer], method: str) -> None:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
        instead = "return one torch.optim.SGD, or use regularizer=fedprox or regularizer=none"
        if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.SGD):
            raise UserError(
                f"regularizer=scaffold works with torch.optim.SGD only, "
                f"{method}.configure_optimizers returns {names}; {instead}"
            )
        rates = sorted({float(group["lr"]) for group in optimizers[0].param_groups})
        if len(rates) > 1:
            raise UserError(
                f"regularizer=scaffold needs one learning rate for all parameters, the SGD of "
                f"{method}.configure_optimizers has {', '.join(f'{rate:g}' for rate in rates)}; "
                f"{instead}"
            )

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, model: Any, optimizer: Optimizer
    ) -> None:
        # After the step, a scheduler may have changed the learning rate already.
        self._rate = float(optimizer.param_groups[0]["lr"])

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
        # Lightning calls this before the method's own hook, so EMA targets follow the correction.
        for name, parameter in self._parameters.items():
            parameter.add_(self._correction[name], alpha=-self._rate)
        self._rates += self._rate

    @override
    @torch.no_grad()
    def finish(self, model: SSLMethod) -> tuple[State, State]:
        before = self._client_variate
        if not self._rates:  # A warm-up may begin with a round of zeros: nothing was learned.
            return _zeros_like(before), before
        after = {
            name: (self._received[name] - p.detach()) / self._rates - self._correction[name]
            for name, p in self._parameters.items()
        }
        change = {name: after[name] - before[name] for name in before}
        return change, after

    @override
    def fold(self, before: State, mean: State, share: float) -> State:
        # The c_i of absent clients did not change.
        return {name: before[name] + share * mean[name] for name in before}


def require_fitting_optimizer(regularizer: Regularizer, model: SSLMethod, data: Any = None) -> None:
    """Raises a `UserError` if a regularizer does not work with an optimizer that a method defines.

    A `configure_optimizers` that needs the Trainer, or data before there are any, cannot be called
    yet; the regularizer checks again when training starts.

    Args:
        regularizer: the run's regularizer.
        model: the run's model; it is not changed.
        data: a client's batches, if there are any yet.
    """
    custom = type(model).configure_optimizers is not SSLMethod.configure_optimizers
    checks = type(regularizer).require_fitting is not Regularizer.require_fitting
    if not (custom and checks):
        return
    try:
        with restored(model):
            model.local = LocalRound(
                round=1, rounds=1, client=0, epochs=1, epochs_before=0, seed=0, data=data
            )
            optimizers = optimizers_in(model.configure_optimizers())
    except Exception:
        return
    regularizer.require_fitting(optimizers, type(model).__name__)


def optimizers_in(configured: Any) -> list[Optimizer]:
    """The optimizers in whatever Lightning allows `configure_optimizers` to return."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_in(configured.get("optimizer"))
    if isinstance(configured, list | tuple):
        return [optimizer for part in configured for optimizer in optimizers_in(part)]
    return []  # None, or a scheduler


def trained_parameters(model: SSLMethod) -> dict[str, Tensor]:
    """The parameters that the client optimizes and the server averages, by name."""
    private = model.private_names()
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name.split(".")[0] not in private}


def _zeros_like(state: Mapping[str, Tensor]) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _loss_scale(trainer: pl.Trainer, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return one if scaler is None else scaler.scale(one)
