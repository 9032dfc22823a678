"""The hooks around the rounds of a run. Evaluation, alarms, dashboard and progress are callbacks of this kind.

    class Patience(RoundCallback):  # stops when kNN accuracy has not improved for five rounds
        def on_round_end(self, trainer, record):
            best = max(trainer.history, key=lambda row: row.get("knn_top1", 0), default=None)
            if best and record.number - best["round"] >= 5:
                trainer.should_stop = True

Callbacks are called in the order of the list; the built-in ones that measure come before a user's own, those that
write and show come after it. So numbers that a user's callback adds to ``record.row`` are in metrics.csv, in
TensorBoard and in the checkpoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer


class RoundCallback:
    """Does nothing at every hook; subclasses override what they need."""

    @property
    def state_key(self) -> str:
        """The name under which the checkpoint keeps `state_dict`; each callback of a run needs its own."""
        return type(self).__qualname__

    def setup(self, trainer: FederatedTrainer) -> None:
        """The run folder is open, and the state of an earlier process is loaded."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Rounds are about to start; the model holds the global weights."""

    def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """The clients of a round are chosen."""

    def on_client_start(self, trainer: FederatedTrainer, worker: str, client: int | None) -> None:
        """A worker takes up a client; None: it is idle."""

    def on_client_steps(self, trainer: FederatedTrainer, count: int) -> None:
        """Some client has taken optimizer steps. Called very often."""

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """An update is aggregated. Numbers that are added to ``update.metrics`` are averaged over the clients.

        A client of ``record.resumed`` was trained by an earlier process.
        """

    def on_client_refused(
        self, trainer: FederatedTrainer, record: RoundRecord, client: int, reason: str
    ) -> None:
        """An update is not aggregated; ``record.at_fault`` tells whether the client is to blame."""

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """The model holds the new global weights; nothing is saved yet.

        May add numbers to ``record.row`` and texts to ``record.notes``, and set ``trainer.should_stop``.
        """

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """The round is on disk and part of ``trainer.history``."""

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        """There is something the user should see."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """The last round is saved; the model holds its weights."""

    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        """The run ends early, by an error or by Ctrl-C."""

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps; it must fit in JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned when the last round was saved."""


def kept_state(callback: RoundCallback) -> dict[str, Any]:
    """A callback's `state_dict` as the checkpoint keeps it.

    Raises:
        UserError: it does not fit in JSON; it names the callback and the key.
    """
    name, state = type(callback).__name__, callback.state_dict()
    if not isinstance(state, dict):
        raise UserError(
            f"state_dict() of the callback {name} returns {state!r}; return a dict, {{}} for nothing"
        )
    return {
        key: plain(value, f"state_dict() of the callback {name}", key)
        for key, value in state.items()
    }


def plain(value: Any, where: str, key: object) -> Any:
    """A value that fits in JSON: numbers of torch and numpy become Python's.

    Args:
        value: of a row or of a state.
        where: it is found, for people.
        key: its name there.

    Raises:
        UserError: it does not fit.
    """
    try:
        json.dumps({key: value})
        return value
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps({key: value}, default=_number))[key]
    except (TypeError, ValueError, RecursionError, KeyError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise UserError(
            f"{where} has {key!r}: a {type(value).__name__}{shape}, which does not fit in JSON ({error}); give "
            f"numbers, texts, or lists and dicts of them, e.g. float(value) or value.tolist()"
        ) from error


def _number(value: Any) -> Any:
    """A tensor or an array of one number."""
    if getattr(value, "shape", None) != ():
        raise TypeError(f"{type(value).__name__} is not one number")
    return value.item()
