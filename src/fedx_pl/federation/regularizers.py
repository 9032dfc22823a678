"""FedProx and SCAFFOLD: what holds clients together by their weights, as Lightning callbacks for any method and mixin.

A regularizer acts on one client's training and may keep tensors with the client and with the server. The server's
travel with the global weights, as `GlobalState.server`; what clients return there is averaged like weights and then
given to `Regularizer.fold`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from fedx_pl.errors import UserError
from fedx_pl.federation.estimate import restored
from fedx_pl.methods.base import LocalRound, SSLMethod, State
from fedx_pl.options import check


class Regularizer(pl.Callback):
    """Changes nothing: the base of the others, and what plain FedAvg uses."""

    beside_weights = False  # Whether clients send the server more than their weights.

    def server_state(self, model: SSLMethod) -> State:
        """What the server keeps beside the weights, at the start of a run."""
        return {}

    def start(self, model: SSLMethod, server: State, private: State) -> None:
        """A client has received the global weights and is about to train.

        Args:
            model: the client.
            server: the server's tensors.
            private: what `finish` left with this client; empty the first time.
        """

    def finish(self, model: SSLMethod) -> tuple[State, State]:
        """After local training: tensors for the server, named as in `server_state`, and those the client keeps."""
        return {}, {}

    def require_fitting(self, optimizers: Sequence[Optimizer], method: str) -> None:
        """Raises a `UserError` for optimizers that it does not work with.

        Args:
            optimizers: of the method.
            method: its name, for the message.
        """

    def on_train_start(self, trainer: pl.Trainer, model: Any) -> None:
        """Checks the optimizers that are really there."""
        self.require_fitting(trainer.optimizers, type(model).__name__)

    def fold(self, before: State, mean: State, share: float) -> State:
        """The server's next tensors.

        Args:
            before: its tensors during the round.
            mean: of what the clients returned, weighted by their images.
            share: of all images that the clients of the round own.
        """
        return {}


class FedProx(Regularizer):
    """Adds ``mu/2 |w - w_g|^2`` to the loss, as its gradient ``mu (w - w_g)``; w_g is what the client received."""

    def __init__(self, mu: float = 0.01) -> None:
        """Sets the weight.

        Args:
            mu: of the pull towards the global weights.
        """
        check("mu", mu, example=0.01, at_least=0)
        self.mu = mu
        self._parameters: list[Tensor] = []
        self._received: list[Tensor] = []

    def start(self, model: SSLMethod, server: State, private: State) -> None:
        """Remembers w_g."""
        self._parameters = list(trained_parameters(model).values())
        self._received = [p.detach().clone() for p in self._parameters]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, model: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        """Adds to the gradients; a parameter without one has not moved."""
        pairs = zip(self._parameters, self._received, strict=True)
        moved = [(p.detach(), start, p.grad) for p, start in pairs if p.grad is not None]
        pull = torch._foreach_sub([p for p, _, _ in moved], [start for _, start, _ in moved])
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimiser divides the gradients by the loss scale itself, later: ours must bear it, too.
            torch._foreach_mul_(pull, _loss_scale(trainer, model.device))
        torch._foreach_add_([gradient for _, _, gradient in moved], pull, alpha=self.mu)


class Scaffold(Regularizer):
    """SCAFFOLD (Karimireddy et al., ICML 2020): each step is corrected by the usual direction of server and client.

    A step goes along ``g - c_i + c``; afterwards ``c_i <- c_i - c + (x - y) / (sum of lr)`` for weights x received and
    y returned (the second option of its Algorithm 1). The correction is added after the optimiser's step, outside its
    momentum: then c_i is exactly the mean of the optimiser's own steps, with momentum as without it. Inside, momentum
    0.9 would make it ten times too large. c is the mean of the c_i weighted by images, as the weights themselves are.
    Only parameters have control variates, BatchNorm's statistics have none. With 16-mixed, a step that the loss scaler
    skips is still corrected and counted.

    Steps must be gradients times one learning rate. Adam's and LARS's are of another size: their control variates
    would be many times as long as the weights.
    """

    beside_weights = True

    def __init__(self) -> None:
        self._parameters: State = {}
        self._received: list[Tensor] = []
        self._own: list[Tensor] = []  # c_i
        self._correction: tuple[Tensor, ...] = ()  # c - c_i
        self._rate = 0.0  # of the step that is being taken
        self._rates = 0.0  # sum of the learning rates of all steps

    def server_state(self, model: SSLMethod) -> State:
        """c = 0."""
        return {name: torch.zeros_like(p) for name, p in trained_parameters(model).items()}

    def start(self, model: SSLMethod, server: State, private: State) -> None:
        """A newcomer's c_i is 0."""
        self._parameters = trained_parameters(model)
        own = private or {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._received = [p.detach().clone() for p in self._parameters.values()]
        self._own = [own[name].to(p.device) for name, p in self._parameters.items()]
        usual = [server[name].to(p.device) for name, p in self._parameters.items()]
        self._correction = torch._foreach_sub(usual, self._own)
        self._rate = self._rates = 0.0

    def require_fitting(self, optimizers: Sequence[Optimizer], method: str) -> None:
        """SGD with one learning rate for all parameters."""
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
        instead = "return one torch.optim.SGD, or use regularizer=fedprox or regularizer=none"
        if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.SGD):
            raise UserError(
                f"regularizer=scaffold works with torch.optim.SGD only, {method}.configure_optimizers returns "
                f"{names}; {instead}"
            )
        rates = sorted({float(group["lr"]) for group in optimizers[0].param_groups})
        if len(rates) > 1:
            raise UserError(
                f"regularizer=scaffold needs one learning rate for all parameters, the SGD of "
                f"{method}.configure_optimizers has {', '.join(f'{rate:g}' for rate in rates)}; {instead}"
            )

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, model: Any, optimizer: Optimizer
    ) -> None:
        """Reads the learning rate: after the step, a scheduler may have changed it already."""
        self._rate = float(optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, model: Any, *_: Any) -> None:
        """Corrects the step; Lightning calls this before the method's own hook, so that EMA targets follow it."""
        torch._foreach_add_(list(self._parameters.values()), self._correction, alpha=-self._rate)
        self._rates += self._rate

    @torch.no_grad()
    def finish(self, model: SSLMethod) -> tuple[State, State]:
        """The change of c_i goes to the server, c_i stays."""
        if (
            not self._rates
        ):  # A scheduler's warm-up may begin with a round of zeros: nothing was learned.
            unchanged = [torch.zeros_like(own) for own in self._own]
            names = self._parameters
            return dict(zip(names, unchanged, strict=True)), dict(
                zip(names, self._own, strict=True)
            )
        moved = torch._foreach_sub(self._received, [p.detach() for p in self._parameters.values()])
        own = torch._foreach_sub(torch._foreach_div(moved, self._rates), self._correction)
        change = torch._foreach_sub(own, self._own)
        return dict(zip(self._parameters, change, strict=True)), dict(
            zip(self._parameters, own, strict=True)
        )

    def fold(self, before: State, mean: State, share: float) -> State:
        """``c <- c + share * mean change``: absent clients' c_i did not change."""
        return {name: before[name] + share * mean[name] for name in before}


def require_fitting_optimizer(regularizer: Regularizer, model: SSLMethod, data: Any = None) -> None:
    """Raises a `UserError` if a regularizer does not work with an optimizer of the method's own.

    One that needs the Trainer, or the data before there are any, cannot be asked yet; the regularizer looks again
    when training starts.

    Args:
        regularizer: of the run.
        model: the same before and after.
        data: a client's batches, if there are any yet.
    """
    own = type(model).configure_optimizers is not SSLMethod.configure_optimizers
    picky = type(regularizer).require_fitting is not Regularizer.require_fitting
    if not (own and picky):
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
    """What the client optimises and the server averages, by name."""
    private = model.private_names()
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name.split(".")[0] not in private}


def _loss_scale(trainer: pl.Trainer, device: torch.device) -> Tensor:
    one = torch.ones((), device=device)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return one if scaler is None else scaler.scale(one)
