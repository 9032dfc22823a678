"""run.compile=true: the same losses, compiled once and reused by copying weights."""

import shutil

import pytest
import torch
from helpers import data_for, make_model

from fedx_pl.evaluation.features import extract
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import GlobalState, RoundContext
from fedx_pl.methods import BYOL
from fedx_pl.mixins import FedXMixin, FedXOptions, wrap

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++"
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize("relation", ["batch", "queue"])
def test_compiled_networks_give_the_same_losses_and_are_compiled_once(relation: str) -> None:
    """Three rounds of two clients.

    After round 2, when F has statistics and is compiled, nothing is compiled again.

    Both ways start each round from the same state; two steps are compared: rounding grows with
    every step.
    """
    losses: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    first = make_model(
        wrap(FedXMixin, BYOL), fedx=FedXOptions(relation=relation, queue_size=16)
    ).shared_state()
    states = [GlobalState(weights=first)]
    for compile in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make_model(
            wrap(FedXMixin, BYOL), fedx=FedXOptions(relation=relation, queue_size=16)
        )
        trainer = LocalTrainer(
            model, device=torch.device("cpu"), precision="32-true", compile=compile
        )
        compiled = []
        for round in (1, 2, 3):
            context = RoundContext(
                round=round,
                rounds=3,
                epochs=1,
                seed=0,
                global_state=states[round - 1],
                batchnorm="average",
            )
            updates = [
                trainer.run(
                    context, client=c, data=data_for(model, images=40 + c, seed=c), memory=None
                )
                for c in (0, 1)
            ]
            losses[compile] += [update.losses[:2] for update in updates]
            states.append(updates[0].state)  # The eager ones come first, and are used both times.
            # Evaluation between rounds must not compile either.
            images = torch.zeros(5, 16, 16, 3, dtype=torch.uint8)
            extract(model.backbone, images, lambda x: x.permute(0, 3, 1, 2).float())
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert (compiled[0] > 0) == compile
        assert compiled[2] == compiled[1]
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-2, atol=5e-3)
