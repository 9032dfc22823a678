"""A site's privacy budget holds across runs, restarts and coordinators.

A lost ledger does not count as an empty one.
"""

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting", reason="needs the extra privacy")

from fedx_pl.errors import UserError
from fedx_pl.federation.privacy import PrivacyOptions, epsilon
from fedx_pl.sites.ledger import COUNT, FILE, Ledger


def own(max_epsilon: float = 2.0) -> PrivacyOptions:
    return PrivacyOptions(clip=1.0, noise=10.0, max_epsilon=max_epsilon)


def test_a_ledger_counts_by_noise_and_survives_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    assert ledger.answers() == {}
    for noise in (10.0, 12.5, 10.0):
        ledger.add(noise)
    assert Ledger(tmp_path / "state").answers() == {10.0: 2, 12.5: 1}


def test_a_budget_ends_after_as_many_answers_as_it_is_worth(tmp_path: Path) -> None:
    """A noise of 10 spends 1.93 in five answers and 2.13 in six."""
    assert epsilon(10.0, 5, 1e-5) < 2 < epsilon(10.0, 6, 1e-5)
    for _ in range(5):
        Ledger(tmp_path).require_budget(own(), noise=10.0)
        Ledger(tmp_path).add(10.0)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"answer 6 .* over all its runs; it allows privacy.max_epsilon=2"
        ):
            Ledger(tmp_path).require_budget(own(), noise=10.0)
    Ledger(tmp_path).require_budget(
        own(), noise=40.0
    )  # With more noise there is room for one more.
    Ledger(tmp_path).require_budget(own(max_epsilon=0), noise=0.0)  # No budget.


def test_what_left_without_noise_counts_when_a_budget_is_set_later(tmp_path: Path) -> None:
    Ledger(tmp_path).add(0.0)
    with pytest.raises(UserError, match=r"epsilon=inf .* earlier ones had no noise"):
        Ledger(tmp_path).require_budget(own(), noise=10.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"10.0": 5', '"10.0": 1'),
        lambda text: text[:-10],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: json.dumps({"answers": {"10.0": 1}}),
        lambda text: json.dumps({"answers": None, "sha256": ""}),
        lambda text: "\udcff",
    ],
)
def test_a_damaged_ledger_is_refused_and_left_as_it_is(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    for _ in range(5):
        Ledger(tmp_path).add(10.0)
    ledger, file = Ledger(tmp_path), tmp_path / FILE
    file.write_bytes(content := damage(file.read_text()).encode(errors="surrogateescape"))
    for attempt in (
        lambda: Ledger(tmp_path),
        lambda: ledger.add(10.0),
        lambda: ledger.require_budget(own(), 10.0),
    ):
        with pytest.raises(
            UserError, match=rf"{re.escape(str(file))} is damaged .* backup.*--state ANOTHER"
        ):
            attempt()
    assert file.read_bytes() == content


def test_a_ledger_that_is_missing_beside_other_state_is_not_an_empty_one(tmp_path: Path) -> None:
    Ledger(tmp_path).add(10.0)
    (tmp_path / "0123456789abcdef").mkdir()
    (tmp_path / "0123456789abcdef" / "memory.json").write_text("{}")
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match=r"epsilon=inf .* their record is lost"):
        Ledger(tmp_path).require_budget(own(), noise=10.0)
    Ledger(tmp_path).add(10.0)  # A site without a budget continues; unknown stays unknown.
    with pytest.raises(UserError, match="their record is lost"):
        Ledger(tmp_path).require_budget(own(), noise=10.0)


def test_an_older_copy_of_the_ledger_is_not_believed(tmp_path: Path) -> None:
    """After restoring a backup, the answers since then count as answers without noise."""
    Ledger(tmp_path).add(10.0)
    backup = (tmp_path / FILE).read_bytes()
    Ledger(tmp_path).add(10.0)
    (tmp_path / FILE).write_bytes(backup)
    assert Ledger(tmp_path).answers() == {10.0: 1, 0.0: 1}
    with pytest.raises(UserError, match=r"epsilon=inf .* their record is lost"):
        Ledger(tmp_path).require_budget(own(), noise=10.0)
    Ledger(tmp_path).add(10.0)
    assert Ledger(tmp_path).answers() == {10.0: 2, 0.0: 1}
    (tmp_path / FILE).unlink()
    assert Ledger(tmp_path).answers() == {0.0: 3}


@pytest.mark.parametrize("content", [b"", b"x", b"9" * 200, b"\xff"])
def test_a_damaged_count_is_refused(tmp_path: Path, content: bytes) -> None:
    Ledger(tmp_path).add(10.0)
    (tmp_path / COUNT).write_bytes(content)
    with pytest.raises(UserError, match=r"answers is damaged .*--state ANOTHER"):
        Ledger(tmp_path)


def test_a_ledger_of_an_older_version_has_no_count(tmp_path: Path) -> None:
    Ledger(tmp_path).add(10.0)
    (tmp_path / COUNT).unlink()
    assert Ledger(tmp_path).answers() == {10.0: 1}


def test_only_the_site_s_user_can_read_it(tmp_path: Path) -> None:
    Ledger(tmp_path / "above" / "state").add(10.0)
    for file in (FILE, COUNT):
        assert stat.S_IMODE((tmp_path / "above" / "state" / file).stat().st_mode) == 0o600
    for folder in ("above", "above/state"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
