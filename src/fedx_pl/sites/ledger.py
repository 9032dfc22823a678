"""A site's privacy ledger: every answer that has left it, for any run, coordinator or images.

    STATE/ledger.json      how many answers left with which noise, and a checksum
    STATE/answers          how many answers left: a ledger that is older than it is not believed

A coordinator chooses the name of a run, so a budget for each run would be no budget. An answer is
recorded before it leaves. An answer whose noise is not known counts as one without noise, for which
no budget is large enough.
"""

import json
from pathlib import Path
from typing import Any

from fedx_pl.errors import UserError
from fedx_pl.federation.options import PrivacyOptions
from fedx_pl.federation.privacy import composed_epsilon
from fedx_pl.files import checksum, write_atomically
from fedx_pl.files.reading import read_bytes, read_json

FILE = "ledger.json"
COUNT = "answers"
_UNKNOWN = 0.0  # stands for the noise of an answer whose record is lost


class Ledger:
    """Counts answers by the noise on them."""

    def __init__(self, state: Path) -> None:
        """Opens a site's ledger, and refuses one that is damaged.

        Args:
            state: the folder of the site's private state.
        """
        self._state = state
        self._file = state / FILE
        self.answers()

    def answers(self) -> dict[float, int]:
        """The number of answers that have left the site, by their noise."""
        answers = self._read()
        lost = self._count() - sum(answers.values())
        if lost > 0:  # The ledger was deleted, or replaced by an older copy.
            answers[_UNKNOWN] = answers.get(_UNKNOWN, 0) + lost
        return answers

    def add(self, noise: float) -> None:
        """Records one more answer, before it leaves.

        Args:
            noise: `PrivacyOptions.noise` of the run.
        """
        answers = self.answers()
        answers[noise] = answers.get(noise, 0) + 1
        table = {repr(float(each)): count for each, count in sorted(answers.items())}
        content = {"answers": table, "sha256": _sha256(table)}
        write_atomically(self._file, json.dumps(content, indent=1).encode(), private=True)
        total = str(sum(answers.values()))
        write_atomically(self._state / COUNT, total.encode(), private=True)

    def spent(self, delta: float) -> float:
        """The epsilon of all answers so far."""
        return composed_epsilon(self.answers(), delta)

    def require_budget(self, own: PrivacyOptions, noise: float) -> None:
        """Raises a `UserError` if one more answer would spend more than the site allows.

        Args:
            own: the site's own privacy options.
            noise: the noise of the run.
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
            f"answer {sum(answers.values())} of this site would spend epsilon={spent:.2f} over all "
            f"its runs{why}; it allows privacy.max_epsilon={own.max_epsilon:g}. A larger one "
            "allows more; for images that no answer was ever trained on, type --state ANOTHER"
        )

    def _read(self) -> dict[float, int]:
        """The answers in the ledger's file."""
        try:
            record = read_json(self._file)
            if record["sha256"] != _sha256(record["answers"]):
                raise ValueError("it does not match its checksum")
            return {float(noise): int(count) for noise, count in record["answers"].items()}
        except FileNotFoundError:
            # Nothing if the site is new. Runs of a version that wrote no count may have left
            # answers.
            runs = [folder for folder in self._state.glob("*") if (folder / "memory.json").exists()]
            return {_UNKNOWN: len(runs)} if runs else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(self._file, error) from error

    def _count(self) -> int:
        """The number of answers that have left the site; 0 if that is not recorded."""
        file = self._state / COUNT
        try:
            return int(read_bytes(file, limit=100))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: Path, error: Exception) -> UserError:
        return UserError(
            f"{file} is damaged ({error}), and only it knows which answers have left this site; "
            "put it back from a backup. If they need not count any more, type --state ANOTHER"
        )


def _sha256(table: Any) -> str:
    return checksum(json.dumps(table, sort_keys=True).encode())
