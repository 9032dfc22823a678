"""A site's privacy ledger: every answer that has left it, whichever run, coordinator or images it was for.

    STATE/ledger.json      how many answers with which noise, and a checksum

A coordinator chooses the name of a run, so a budget by run would be no budget. An answer is written down before it
leaves. What cannot be known counts as an answer without noise, for which no budget is large enough.
"""

import json
from pathlib import Path
from typing import Any

from fedx_pl.errors import UserError
from fedx_pl.federation.privacy import PrivacyOptions, composed_epsilon
from fedx_pl.files import checksum, write_atomically

FILE = "ledger.json"
_UNKNOWN = 0.0  # the noise of answers of which nothing else is known


class Ledger:
    """Counts answers by the noise on them."""

    def __init__(self, state: Path) -> None:
        """Opens a site's ledger, and refuses one that is damaged.

        Args:
            state: the folder of the site's private state.
        """
        self._state, self._file = state, state / FILE
        self.answers()

    def answers(self) -> dict[float, int]:
        """How many answers have left the site, by their noise."""
        try:
            written = json.loads(self._file.read_text())
        except FileNotFoundError:
            return self._without_ledger()
        except (OSError, ValueError) as error:
            raise self._damaged(str(error)) from error
        try:
            if written["sha256"] != _sha256(written["answers"]):
                raise ValueError("its checksum is another")
            return {float(noise): int(count) for noise, count in written["answers"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(str(error)) from error

    def add(self, noise: float) -> None:
        """Writes down one more answer, before it leaves.

        Args:
            noise: `PrivacyOptions.noise` of the run.
        """
        found = self.answers()
        found[noise] = found.get(noise, 0) + 1
        table = {repr(float(each)): count for each, count in sorted(found.items())}
        content = {"answers": table, "sha256": _sha256(table)}
        write_atomically(self._file, json.dumps(content, indent=1).encode(), private=True)

    def spent(self, delta: float) -> float:
        """The epsilon of all answers so far."""
        return composed_epsilon(self.answers(), delta)

    def require_budget(self, own: PrivacyOptions, noise: float) -> None:
        """Raises a `UserError` if one more answer would spend more than the site allows.

        Args:
            own: what the site wants.
            noise: of the run.
        """
        if not own.max_epsilon:
            return
        answers = self.answers()
        answers[noise] = answers.get(noise, 0) + 1
        if (spent := composed_epsilon(answers, own.delta)) <= own.max_epsilon:
            return
        bare = answers.get(_UNKNOWN, 0) > (noise == _UNKNOWN)
        why = ", since earlier ones had no noise or their record is lost" if bare else ""
        raise UserError(
            f"answer {sum(answers.values())} of this site would spend epsilon={spent:.2f} over all its runs{why}; it "
            f"allows privacy.max_epsilon={own.max_epsilon:g}. A larger one allows more; for images that no answer was "
            f"ever trained on, type --state ANOTHER"
        )

    def _without_ledger(self) -> dict[float, int]:
        """Nothing if the site is new; else answers of which nobody knows the noise."""
        runs = [folder for folder in self._state.glob("*") if (folder / "memory.json").exists()]
        return {_UNKNOWN: len(runs)} if runs else {}

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self._file} is damaged ({reason}), and only it knows which answers have left this site; put it back "
            f"from a backup. If they need not count any more, type --state ANOTHER"
        )


def _sha256(table: Any) -> str:
    return checksum(json.dumps(table, sort_keys=True).encode())
