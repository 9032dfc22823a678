import math

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import NegativeCosineSimilarity, NTXentLoss

from fedx_pl import losses


def embeddings(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_nt_xent_of_orthogonal_pairs_is_derived_by_hand() -> None:
    """Two images, both views equal, images orthogonal, tau=1.

    Each anchor sees its positive (cos 1) and two negatives (cos 0): -log(e / (e + 1 + 1)).
    """
    z = torch.eye(2, dtype=torch.float64)
    assert losses.nt_xent(z, z, 1.0).item() == pytest.approx(-math.log(math.e / (math.e + 2)))


def test_nt_xent_agrees_with_lightly() -> None:
    z1, z2 = embeddings(16, 8), embeddings(16, 8, seed=1)
    torch.testing.assert_close(losses.nt_xent(z1, z2, 0.1), NTXentLoss(temperature=0.1)(z1, z2))


def test_nt_xent_masks_the_anchor_itself() -> None:
    """One image has no negatives: log(1) = 0.

    A diagonal masked by 0 instead of -inf would give -log(e / (e + 1)).
    """
    z1, z2 = embeddings(1, 8), embeddings(1, 8, seed=1)
    assert losses.nt_xent(z1, z2, 0.1).item() == 0.0


def hand_relation(sims: list[float], tau: float) -> list[float]:
    weights = [math.exp(s / tau) for s in sims]
    return [w / sum(weights) for w in weights]


def test_relational_is_the_jensen_shannon_divergence_derived_by_hand() -> None:
    """z1 = e1 and z2 = e2 against the anchors e1, e2.

    p = softmax(1/tau, 0), q = softmax(0, 1/tau), m = (1/2, 1/2).
    """
    tau = 0.5
    p, q = hand_relation([1, 0], tau), hand_relation([0, 1], tau)
    kl_p = sum(a * math.log(a / 0.5) for a in p)
    kl_q = sum(a * math.log(a / 0.5) for a in q)
    z = torch.eye(2, dtype=torch.float64)
    found = losses.relational(z[:1], z[1:], z, tau)
    assert found.item() == pytest.approx((kl_p + kl_q) / 2)


def test_relational_in_the_authors_form_swaps_the_arguments_of_kl() -> None:
    tau = 0.5
    p, q = hand_relation([1, 0], tau), hand_relation([0, 1], tau)
    expected = (
        sum(0.5 * math.log(0.5 / a) for a in p) / 2 + sum(0.5 * math.log(0.5 / a) for a in q) / 2
    )
    z = torch.eye(2, dtype=torch.float64)
    found = losses.relational(z[:1], z[1:], z, tau, "authors")
    assert found.item() == pytest.approx(expected)
    assert found.item() != pytest.approx(losses.relational(z[:1], z[1:], z, tau).item())


def test_relational_agrees_with_kl_div_and_is_bounded_by_log_two() -> None:
    z1, z2, anchors, tau = (
        embeddings(12, 6),
        embeddings(12, 6, seed=1),
        embeddings(9, 6, seed=2),
        0.1,
    )
    p = F.softmax(F.normalize(z1) @ F.normalize(anchors).T / tau, dim=1)
    q = F.softmax(F.normalize(z2) @ F.normalize(anchors).T / tau, dim=1)
    m = (p + q) / 2
    expected = (
        F.kl_div(m.log(), p, reduction="batchmean") + F.kl_div(m.log(), q, reduction="batchmean")
    ) / 2
    found = losses.relational(z1, z2, anchors, tau)
    torch.testing.assert_close(found, expected)
    assert 0 < found.item() < math.log(2)
    assert losses.relational(z1, z1, anchors, tau).item() == pytest.approx(0, abs=1e-12)


def test_relational_mean_over_the_batch_does_not_depend_on_its_size() -> None:
    z1, z2, anchors = embeddings(4, 6), embeddings(4, 6, seed=1), embeddings(5, 6, seed=2)
    twice = losses.relational(z1.repeat(2, 1), z2.repeat(2, 1), anchors, 0.1)
    torch.testing.assert_close(twice, losses.relational(z1, z2, anchors, 0.1))


def test_relational_stays_finite_where_probabilities_vanish() -> None:
    """tau=.001 gives two point masses, whose JSD is log 2; the gradients stay finite."""
    z = torch.eye(2).requires_grad_()
    loss = losses.relational(z[:1], z[1:], torch.eye(2), 0.001)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert torch.isfinite(z.grad).all()


def test_relational_rejects_an_unknown_divergence() -> None:
    with pytest.raises(ValueError, match="'jsd' or 'authors'"):
        losses.relational(torch.eye(2), torch.eye(2), torch.eye(2), 0.1, "kl")


def test_literal_global_contrast_leaves_the_positive_out_of_the_denominator() -> None:
    """Two images, local = global = e1, e2, tau=1.

    The positive has cos 1; the denominator holds one local and one global negative, both with
    cos 0: -(1 - log 2).
    """
    z = torch.eye(2, dtype=torch.float64)
    assert losses.global_contrast(z, z, 1.0).item() == pytest.approx(math.log(2) - 1)


def test_literal_global_contrast_of_one_image_is_zero_with_a_gradient() -> None:
    z = embeddings(1, 4).requires_grad_()
    loss = losses.global_contrast(z, embeddings(1, 4, seed=1), 0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None


def test_info_nce_derived_by_hand() -> None:
    """query = key = e1, queue = (e1, e2), tau=1: -log(e / (e + e + 1))."""
    e1 = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = losses.info_nce(e1, e1, torch.eye(2, dtype=torch.float64), 1.0)
    assert found.item() == pytest.approx(-math.log(math.e / (2 * math.e + 1)))


def test_byol_is_two_minus_two_cosines() -> None:
    a, b = torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert losses.alignment(a, b).item() == pytest.approx(2 - 2 * math.cos(math.pi / 4))
    z1, z2 = embeddings(8, 5), embeddings(8, 5, seed=1)
    torch.testing.assert_close(losses.alignment(z1, z2), 2 + 2 * NegativeCosineSimilarity()(z1, z2))


def test_proto_nce_gives_each_prototype_its_own_temperature() -> None:
    """query e1 of cluster 0, prototypes e1 and e2 with phi .5 and .25: logits 2 and 0."""
    found = losses.proto_nce(
        torch.eye(2)[:1], torch.eye(2), torch.tensor([0]), torch.tensor([0.5, 0.25])
    )
    assert found.item() == pytest.approx(-math.log(math.exp(2) / (math.exp(2) + 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings_are_widened_before_the_softmax(dtype: torch.dtype) -> None:
    z1, z2 = embeddings(16, 8).to(dtype), embeddings(16, 8, seed=1).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses.nt_xent(z1, z2, 0.1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, losses.nt_xent(z1.float(), z2.float(), 0.1), rtol=0, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: losses.nt_xent(z, embeddings(5, 4, seed=1), 0.3),
        lambda z: losses.relational(z, embeddings(5, 4, seed=1), embeddings(3, 4, seed=2), 0.3),
        lambda z: losses.relational(
            embeddings(5, 4, seed=1), embeddings(5, 4, seed=3), z, 0.3, "authors"
        ),
        lambda z: losses.global_contrast(z, embeddings(5, 4, seed=1), 0.3),
        lambda z: losses.info_nce(z, embeddings(5, 4, seed=1), embeddings(7, 4, seed=2), 0.3),
        lambda z: losses.alignment(z, embeddings(5, 4, seed=1)),
    ],
)
def test_gradients_agree_with_finite_differences(loss: object) -> None:
    assert torch.autograd.gradcheck(loss, embeddings(5, 4).requires_grad_())
