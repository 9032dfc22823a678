"""The four terms, the frozen global model and the head."""

import pytest
import torch
from helpers import data_for, make_model, start, train

from fedx_pl import FedXMixin, FedXOptions, losses
from fedx_pl.errors import UserError
from fedx_pl.methods import SimCLR


class FedXSimCLR(FedXMixin, SimCLR):
    pass


def started(**options: object) -> tuple[FedXSimCLR, object]:
    model = make_model(FedXSimCLR, fedx=FedXOptions(**options))
    data = data_for(model)
    start(model, data)
    return model, next(data.epoch(0))


def test_the_terms_are_those_of_the_paper_from_independent_parts() -> None:
    """The test applies f, h and F view by view, the mixin to all views at once.

    In eval mode, BatchNorm makes no difference between the two.
    """
    model, batch = started()
    model.eval()
    model.global_model.network.eval()
    terms = model.loss(batch, model.embed_views(batch))
    f, h, big_f = model.embed, model.fedx_head, model.global_model.network
    z, z_tilde, z_r = f(batch.first), f(batch.second), f(batch.relation)
    expected = {
        "contrastive": losses.nt_xent(z, z_tilde, 0.1),
        "local_relation": losses.relational(z, z_tilde, z_r, 0.1),
        "global_contrast": losses.nt_xent(h(z), big_f(batch.second), 0.1),
        "global_relation": losses.relational(h(z), h(z_tilde), big_f(batch.relation), 0.1),
    }
    assert list(terms) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, msg=name)


def test_each_weight_scales_its_term() -> None:
    weights = {
        "local_contrast": 0.5,
        "local_relation": 2.0,
        "global_contrast": 3.0,
        "global_relation": 4.0,
    }
    model, batch = started()
    weighted, _ = started(**weights)
    for module in (model, model.global_model.network, weighted, weighted.global_model.network):
        module.eval()
    plain_terms = model.loss(batch, model.embed_views(batch))
    weighted_terms = weighted.loss(batch, weighted.embed_views(batch))
    for name, weight in zip(plain_terms, weights.values(), strict=True):
        torch.testing.assert_close(weighted_terms[name], weight * plain_terms[name], msg=name)


@pytest.mark.parametrize(
    "term", ["local_contrast", "local_relation", "global_contrast", "global_relation"]
)
def test_a_term_of_weight_zero_is_left_out(term: str) -> None:
    model, batch = started(**{term: 0.0})
    terms = model.loss(batch, model.embed_views(batch))
    assert ("contrastive" if term == "local_contrast" else term) not in terms
    assert len(terms) == 3


@pytest.mark.parametrize("relation", ["batch", "queue"])
def test_a_warm_up_leaves_the_global_terms_out_of_the_first_rounds(relation: str) -> None:
    model = make_model(FedXSimCLR, fedx=FedXOptions(warmup=2, relation=relation))
    data = data_for(model)
    terms = {}
    for round_number in (1, 2, 3):
        start(model, data, round_number)
        batch = next(data.epoch(0))
        terms[round_number] = list(model.loss(batch, model.embed_views(batch)))
    assert terms[1] == terms[2] == ["contrastive", "local_relation"]
    assert terms[3] == ["contrastive", "local_relation", "global_contrast", "global_relation"]


def test_a_warm_up_needs_something_to_train() -> None:
    with pytest.raises(UserError, match=r"^warmup=3 leaves nothing to train"):
        FedXOptions(warmup=3, local_contrast=0, local_relation=0)


def test_the_global_model_runs_only_on_what_is_used() -> None:
    for options, images in (({}, 16), ({"global_relation": 0.0}, 8), ({"global_contrast": 0.0}, 8)):
        model, batch = started(**options)
        seen = []
        model.global_model.network.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(len(inputs[0]))
        )
        model.loss(batch, model.embed_views(batch))
        assert seen == [images]


def test_without_relational_terms_no_relation_batch_is_asked_for() -> None:
    assert make_model(FedXSimCLR).relation_batch
    assert not make_model(
        FedXSimCLR, fedx=FedXOptions(local_relation=0, global_relation=0)
    ).relation_batch


def test_the_variants_are_one_key_away() -> None:
    model, batch = started()
    model.eval()
    z = model.embed_views(batch)
    default = model.loss(batch, z)
    for options, term in (
        ({"divergence": "authors"}, "local_relation"),
        ({"contrast": "literal"}, "global_contrast"),
    ):
        variant, _ = started(**options)
        variant.eval()
        assert variant.loss(batch, variant.embed_views(batch))[term] != default[term]


def test_f_is_the_model_the_round_started_from_and_stays_so() -> None:
    model = make_model(FedXSimCLR)
    received = model.shared_state()
    train(model, data_for(model), state=received, epochs=2)
    teacher = model.global_model.network
    torch.testing.assert_close(
        teacher[0].conv1.weight, received["backbone.conv1.weight"], rtol=0, atol=0
    )
    assert not torch.equal(model.backbone.conv1.weight, teacher[0].conv1.weight)


def test_f_takes_the_next_global_model_in_place() -> None:
    model, other = make_model(FedXSimCLR), make_model(FedXSimCLR, seed=1)
    second = train(model, data_for(model), state=train(model, data_for(model)).state, round=2)
    teacher = model.global_model.network
    train(model, data_for(model), state=second.state, memory=second.memory, round=3)
    assert model.global_model.network is teacher
    other.load_shared(second.state.weights)
    x = next(data_for(model).epoch(0)).first
    torch.testing.assert_close(teacher(x), other.eval().embed(x), rtol=1e-4, atol=1e-5)


def test_f_of_an_untrained_model_normalizes_by_the_batch_and_later_by_its_statistics() -> None:
    """Initial statistics (0, 1) would give all images nearly one embedding."""
    model, _ = started()
    assert model.global_model.network[0].bn1.training
    first = train(model, data_for(model))
    train(model, data_for(model), state=first.state.weights, memory=first.memory, round=2)
    assert not any(module.training for module in model.global_model.network.modules())


def test_folding_f_changes_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with BatchNorm folded into F's convolutions and without; losses agree to 1e-4."""

    def losses_of_round_2() -> torch.Tensor:
        model = make_model(FedXSimCLR)
        first = train(model, data_for(model))
        return train(
            model, data_for(model), state=first.state.weights, memory=first.memory, round=2
        ).losses

    folded = losses_of_round_2()
    monkeypatch.setattr("fedx_pl.mixins.teacher.foldable_pairs", lambda network: [])
    torch.testing.assert_close(folded, losses_of_round_2(), rtol=1e-4, atol=1e-4)


def test_h_is_shared_with_the_server() -> None:
    assert any(name.startswith("fedx_head.") for name in make_model(FedXSimCLR).shared_state())


def test_without_the_head_f_and_the_global_model_are_compared_directly() -> None:
    model = make_model(FedXSimCLR, fedx=FedXOptions(head=False))
    assert not any(name.startswith("fedx_head.") for name in model.shared_state())
    train(model, data_for(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "divergence='kl'"),
        ({"contrast": "eq7"}, "contrast='eq7'"),
        ({"tau": 0.0}, "tau=0.0"),
        ({"local_relation": -1.0}, "local_relation=-1.0"),
        (
            dict.fromkeys(
                ("local_contrast", "local_relation", "global_contrast", "global_relation"), 0.0
            ),
            "nothing is left",
        ),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FedXOptions(**options)
