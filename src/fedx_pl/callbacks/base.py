"""The hooks around the rounds of a run: evaluation, alarms, dashboard and progress use them, too.

    class Patience(RoundCallback):  # stops when kNN accuracy has not improved for five rounds
        def on_round_end(self, trainer, record):
            best = max(trainer.history, key=lambda row: row.get("knn_top1", 0), default=None)
            if best and record.number - best["round"] >= 5:
                trainer.should_stop = True

Callbacks are called in the order of the list. Built-in ones that measure come before the user's,
those that write and show come after them. So numbers that a user's callback adds to ``record.row``
are in metrics.csv, in TensorBoard and in the checkpoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedx_pl.errors import UserError
from fedx_pl.federation.round import number_of

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer


class RoundCallback:
    """Does nothing at every hook; subclasses override what they need."""

    @property
    def state_key(self) -> str:
        """The key of `state_dict` in the checkpoint; each callback of a run needs another one."""
        return type(self).__qualname__

    def setup(self, trainer: FederatedTrainer) -> None:
        """Called when the run folder is open and `load_state_dict` was called."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Called before the first round; the model holds the global weights."""

    def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Called when the clients of a round are chosen."""

    def on_client_start(self, trainer: FederatedTrainer, worker: str, client: int | None) -> None:
        """Called when a worker starts to train a client; None: it is idle."""

    def on_client_steps(self, trainer: FederatedTrainer, count: int) -> None:
        """Called very often, after optimizer steps of any client."""

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """Called when an update was aggregated.

        Numbers that are added to ``update.metrics`` are averaged over the clients. A client in
        ``record.resumed`` was trained by an earlier process.
        """

    def on_client_refused(
        self, trainer: FederatedTrainer, record: RoundRecord, client: int, reason: str
    ) -> None:
        """Called when an update was refused; ``record.at_fault`` has the clients to blame."""

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Called when the model holds the new global weights, before the round is saved.

        May add numbers to ``record.row`` and texts to ``record.notes``, and set
        ``trainer.should_stop``.
        """

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Called when the round is on disk and part of ``trainer.history``."""

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        """Called with a note that the user should see."""

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Called when the last round is saved; the model holds its weights."""

    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        """Called when the run ends by an error or by Ctrl-C."""

    def state_dict(self) -> dict[str, Any]:
        """The state for the checkpoint; it must fit in JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned when the last round was saved."""


def kept_state(callback: RoundCallback) -> dict[str, Any]:
    """A callback's `state_dict` as the checkpoint keeps it.

    Raises:
        UserError: it does not fit in JSON.
    """
    name = type(callback).__name__
    state = callback.state_dict()
    if not isinstance(state, dict):
        raise UserError(
            f"state_dict() of the callback {name} returns {state!r}; return a dict, {{}} for "
            f"nothing"
        )
    return {
        key: plain(value, f"state_dict() of the callback {name}", key)
        for key, value in state.items()
    }


def plain(value: Any, where: str, key: object) -> Any:
    """Converts a value to what fits in JSON: numbers of torch and numpy become Python's.

    Args:
        value: a value of a row or of a state.
        where: where it is, for the message.
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
        return json.loads(json.dumps({key: value}, default=number_of))[key]
    except (TypeError, ValueError, RecursionError, KeyError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise UserError(
            f"{where} has {key!r}: a {type(value).__name__}{shape}, which does not fit in JSON "
            f"({error}); give numbers, texts, or lists and dicts of them, e.g. float(value) or "
            f"value.tolist()"
        ) from error
