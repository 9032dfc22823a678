"""Estimates how long a run will take, by a few steps of the model that is about to train.

Only the forward and backward pass run: no hooks, no callbacks, no optimizer. The model is not
copied, since not every module can be; its tensors and attributes are restored instead.
"""

from __future__ import annotations

import itertools
import random
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.data.batches import ClientData
from fedx_pl.errors import UserError
from fedx_pl.federation.device import resolve_precision
from fedx_pl.methods.base import LocalRound, SSLMethod, Views
from fedx_pl.mixins.base import Mixin

if TYPE_CHECKING:
    from fedx_pl.federation.attached import Attached

# The estimate is the fastest of so many steps, or of those that begin within so many seconds.
STEPS = 6
BUDGET_SECONDS = 3.0
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def step_seconds(
    model: SSLMethod,
    data: ClientData,
    local: LocalRound,
    device: torch.device,
    precision: str,
) -> float:
    """Seconds of one step, from making the batch to its gradients: the best of a few.

    The optimizer is left out; its time is small compared with the backward pass.

    Args:
        model: the run's model; it is not changed.
        data: a client's batches.
        local: the round that the loss may ask for.
        device: where the model trains; it moves there.
        precision: Lightning's name, e.g. ``32-true`` or ``bf16-mixed``.
    """
    model.to(device)

    def best(loss: Callable[[Views], Tensor]) -> float:
        batches = itertools.chain.from_iterable(data.epoch(number) for number in itertools.count())
        fastest = float("inf")
        spent = 0.0
        for _ in range(STEPS):
            if spent >= BUDGET_SECONDS:
                break
            started = time.perf_counter()
            with torch.autocast(
                device.type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST
            ):
                total = loss(next(batches))
            total.backward()
            model.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
            fastest = min(fastest, seconds)
            spent += seconds
        return fastest

    with restored(model):
        model.local = local
        model.train()
        if isinstance(model, Mixin):
            model.refresh_teachers()
            for teacher in model.teachers():
                teacher.to(device)
        try:
            return best(lambda batch: model.loss(batch, model.embed_views(batch)).total)
        except UserError:
            raise
        except Exception as error:  # The loss may need a hook or the Trainer.
            reason = f"{type(error).__name__}: {error}"
    with restored(model):
        model.train()
        warnings.warn(
            f"the estimated time is that of the network alone: {type(model).__name__}.loss() does "
            f"not run outside a round ({reason})",
            stacklevel=2,
        )
        return best(lambda batch: model.embed_views(batch).first.float().square().mean())


def run_seconds(trainer: Attached, first_round: int = 1) -> float:
    """The expected duration of a run, by a few training steps and one batch of features.

    Args:
        trainer: with model and images, which are not changed.
        first_round: the first round that is still to be trained.
    """
    clients = trainer.datamodule.clients
    rounds = trainer.max_rounds
    model = trainer.model
    largest = max(range(len(clients)), key=lambda client: len(clients[client]))
    data = trainer.client_data(largest, round_number=1)
    # The last round, since a warm-up may leave out terms that the other rounds have.
    local = LocalRound(
        round=rounds,
        rounds=rounds,
        client=largest,
        epochs=trainer.local_epochs,
        epochs_before=0,
        seed=trainer.seed,
        data=data,
    )
    precision = resolve_precision(trainer.precision, trainer.device)
    per_step = step_seconds(model, data, local, device=trainer.device, precision=precision)
    evaluating = 0.0
    if trainer.evaluation:
        with restored(model):
            evaluating = trainer.evaluator.estimate_seconds(
                model, trainer.device, first_round, rounds=rounds
            )
    return steps_between(trainer, first_round, rounds) * per_step + evaluating


def steps_of(trainer: Attached, client: int) -> int:
    """The optimizer steps of a client in one round."""
    steps = len(trainer.client_data(client, round_number=1))
    if trainer.fast_dev_run:
        steps = min(steps, int(trainer.fast_dev_run))
    return steps * trainer.local_epochs


def steps_between(trainer: Attached, first: int, last: int) -> int:
    """The expected optimizer steps of all clients in the rounds ``first`` to ``last``."""
    clients = len(trainer.datamodule.clients)
    steps = sum(steps_of(trainer, client) for client in range(clients))
    return int(steps * trainer.num_sampled / clients * (last - first + 1))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores a model and all random generators afterwards.

    This covers every tensor, container and attribute that can be reached from the model.
    """
    containers, tensors, arrays, generators = _contents(model)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = sorted(
        {tensor.device.index for tensor, *_ in tensors if tensor.device.type == "cuda"}
    )
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        for container, content in containers:
            _refill(container, content)
        for array, values in arrays:
            array[...] = values
        with torch.no_grad():
            for tensor, values, gradient, trainable in tensors:
                tensor.requires_grad_(trainable).grad = gradient
                if not torch.equal(tensor, values):
                    tensor.copy_(values)


def _contents(model: nn.Module) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Everything in a model that can change, each with its current content."""
    containers: list[Any] = []
    tensors: list[Any] = []
    arrays: list[Any] = []
    generators: list[Any] = []
    seen: dict[int, object] = {}  # Keeps the objects, or others could get the same id.
    waiting: list[Any] = [vars(model)]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _CODE):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            if item.is_leaf:  # Others are results, such as the weight under weight normalization.
                tensors.append((item, item.detach().clone(), item.grad, item.requires_grad))
        elif isinstance(item, np.ndarray):
            if item.flags.writeable:
                arrays.append((item, item.copy()))
        elif isinstance(item, torch.Generator):
            generators.append((item, item.get_state()))
        elif isinstance(item, dict):
            containers.append((item, dict(item)))
            waiting += item.values()
        elif isinstance(item, list | set | deque):
            containers.append((item, list(item)))
            waiting += item
        elif isinstance(item, tuple | frozenset):
            waiting += item
        elif hasattr(item, "__dict__"):
            waiting.append(vars(item))
    return containers, tensors, arrays, generators


def _refill(container: Any, content: Any) -> None:
    """Restores the content of a container, if it has changed."""
    if isinstance(container, dict):
        same = list(container) == list(content) and all(
            container[key] is content[key] for key in content
        )
        if not same:
            container.clear()
            container.update(content)
        return
    now = list(container)
    if len(now) != len(content) or any(a is not b for a, b in zip(now, content, strict=True)):
        container.clear()
        container.update(content) if isinstance(container, set) else container.extend(content)
