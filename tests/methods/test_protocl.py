import pytest
import torch

from fedx_pl.methods.protocl import k_means


def test_k_means_stops_when_nothing_changes_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result equals twenty iterations of Lloyd's algorithm, bit for bit."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:3]
    centers = x[rows]
    for _ in range(20):
        assigned = torch.cdist(x, centers).argmin(dim=1)
        sums = torch.zeros(3, 4).index_add_(0, assigned, x)
        centers = sums / torch.bincount(assigned, minlength=3)[:, None]
    distance, assigned = torch.cdist(x, centers).min(dim=1)

    calls = []
    cdist = torch.cdist
    monkeypatch.setattr(torch, "cdist", lambda *args: calls.append(1) or cdist(*args))
    result = k_means(x, 3, torch.Generator().manual_seed(1))
    assert len(calls) < 21
    for actual, expected in zip(result, (centers, assigned, distance), strict=True):
        assert torch.equal(actual, expected)
