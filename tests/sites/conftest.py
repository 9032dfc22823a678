"""A coordinator's engine on trial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memory_federation import Trial


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls sites more often than over a network."""
    from fedx_pl.sites import (
        engine as flower,
    )  # Here: without the extra the tests are skipped, not broken.

    monkeypatch.setattr(flower, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(flower, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(flower, "END_SECONDS", 0.1)


@pytest.fixture
def trial(quick: None, tmp_path: Path) -> Trial:
    from memory_federation import Trial

    return Trial(tmp_path / "run")
