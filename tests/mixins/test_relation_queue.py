"""fedx.relation=queue: relations to the embeddings of earlier steps instead of a second batch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import data_for, make_model, start, train

from fedx_pl import FedXMixin, FedXOptions, losses
from fedx_pl.data.batches import ClientData
from fedx_pl.errors import UserError
from fedx_pl.methods import SimCLR


class FedXSimCLR(FedXMixin, SimCLR):
    pass


def started(
    images: int = 40, queue_size: int = 16, **options: object
) -> tuple[FedXSimCLR, ClientData]:
    """A model in its second round, so that F has BatchNorm statistics."""
    fedx = FedXOptions(relation="queue", queue_size=queue_size, **options)
    model = make_model(FedXSimCLR, fedx=fedx)
    data = data_for(model, images=images)
    assert data.relation_size == 0
    model.load_shared(train(model, data).state.weights)
    start(model, data, round=2)
    return model, data


def test_relations_are_to_the_embeddings_of_earlier_steps_newest_first() -> None:
    """Three steps of n=8 with a queue of 16.

    The test computes every anchor from f and F, one view at a time.
    """
    model, data = started()
    model.eval()  # BatchNorm then treats every image alike, alone or in a batch.
    f, h, big_f = model.embed, model.fedx_head, model.global_model
    anchors = g_anchors = big_f(data.plain_sample(8)).repeat(2, 1)  # One batch fills the queue.
    for batch, _ in zip(data.epoch(0), range(3), strict=False):
        terms = model.loss(batch, model.embed_views(batch))
        z, z_tilde = f(batch.first), f(batch.second)
        expected = {
            "contrastive": losses.nt_xent(z, z_tilde, 0.1),
            "local_relation": losses.relational(z, z_tilde, anchors, 0.1),
            "global_contrast": losses.nt_xent(h(z), big_f(batch.second), 0.1),
            "global_relation": losses.relational(h(z), h(z_tilde), g_anchors, 0.1),
        }
        assert list(terms) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(terms[name], value, rtol=1e-4, atol=1e-5, msg=name)
        anchors = torch.cat([F.normalize(z_tilde.detach(), dim=1), anchors])[:16]
        g_anchors = torch.cat([F.normalize(big_f(batch.second), dim=1), g_anchors])[:16]


@pytest.mark.parametrize("options", [{}, {"global_relation": 0.0}, {"global_contrast": 0.0}])
def test_the_global_model_sees_one_view(options: dict[str, float]) -> None:
    model, data = started(**options)
    first, second = (batch for batch, _ in zip(data.epoch(0), range(2), strict=False))
    model.loss(first, model.embed_views(first))
    seen: list[int] = []
    model.global_model.network.register_forward_hook(
        lambda module, inputs, output: seen.append(len(inputs[0]))
    )
    model.loss(second, model.embed_views(second))
    assert seen == [8]


def test_without_relational_terms_there_is_no_queue() -> None:
    model, data = started(local_relation=0.0, global_relation=0.0)
    batch = next(data.epoch(0))
    assert list(model.loss(batch, model.embed_views(batch))) == ["contrastive", "global_contrast"]
    assert model.relation_queue is None


def test_no_gradient_reaches_the_queue() -> None:
    model, data = started()
    for batch, _ in zip(data.epoch(0), range(2), strict=False):
        model.loss(batch, model.embed_views(batch)).total.backward()
    assert not any(queue.requires_grad for queue in model.relation_queue)


def test_a_new_round_forgets_the_queue_of_the_client_before() -> None:
    """A client's losses do not depend on another client that trained before on this model."""
    model, data = started()
    state = model.shared_state()
    alone = train(model, data, state=state, round=2).losses
    train(model, data_for(model, seed=5), state=state, round=2, client=1)
    torch.testing.assert_close(
        train(model, data, state=state, round=2).losses, alone, rtol=0, atol=0
    )


def test_a_client_smaller_than_the_queue_has_a_shorter_one() -> None:
    for images, length in ((5, 5), (20, 20)):  # Batches of 8: one is fewer, the other no multiple.
        model, data = started(images=images, queue_size=64)
        train(model, data, round=2)
        assert [len(queue) for queue in model.relation_queue] == [length, length]


def test_nothing_of_the_queue_is_kept_or_averaged() -> None:
    model, data = started()
    update = train(model, data, round=2)
    assert not update.memory.tensors()
    assert not any("queue" in name for name in update.state.tensors())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"relation": "stack"}, "relation='stack'"), ({"queue_size": 1}, "queue_size=1")],
)
def test_bad_values_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FedXOptions(**options)
