from pathlib import Path

import network
import pytest


@pytest.fixture
def lines() -> list[str]:
    """The reported lines; pass ``report=lines.append``."""
    return []


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    network.close(monkeypatch, tmp_path)
