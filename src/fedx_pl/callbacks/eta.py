"""The estimated end of a run, from its training rate and the work that is left."""

import statistics
from collections import Counter
from collections.abc import Callable

from fedx_pl.display import Clock, Pace

Kind = tuple[bool, bool]  # an evaluation: with kNN, with a linear probe
# What is evaluated after a round, given its number and that of the last round.
Due = Callable[[int, int], Kind]


class Eta:
    """Seconds left of a run of several rounds, each of which trains, and some of which evaluate."""

    def __init__(self, rounds: int, due: Due, clock: Clock) -> None:
        """Starts before the first round.

        Args:
            rounds: rounds of the whole run.
            due: which rounds evaluate what, as `Evaluator.due`.
            clock: seconds, from any origin.
        """
        self.rounds = rounds
        self.steps = 0  # expected optimizer steps; 0: steps are not reported
        self.done = 0.0  # steps, or rounds where steps are not reported, of earlier processes too
        self._clock = clock
        self._due = due
        self._pace = Pace(clock)
        self._finished = 0  # rounds in all
        self._before = 0  # rounds of earlier processes
        self._evaluating: float | None = None  # since when
        # Seconds of this process' first evaluation, mostly of the untrained network.
        self._first: float | None = None
        # Seconds between training and the next round, by kind: saving takes some, too.
        self._evaluations: dict[Kind, list[float]] = {}

    @property
    def total(self) -> float:
        """Steps that were left when the run started, or all rounds."""
        return self.steps or self.rounds

    def expect(self, steps: int, finished: int) -> None:
        """Sets how many optimizer steps are left, and how many rounds are finished."""
        self.steps = steps
        self._finished = finished
        self._before = finished

    def start(self, round_number: int, share: float, steps: int) -> None:
        """Called when a round's clients begin to train.

        Args:
            round_number: which round.
            share: the share of its clients that an earlier process trained.
            steps: the steps of those clients.
        """
        self._finished = round_number - 1
        self._evaluating = None
        self.done = self.done + steps if self.steps else self._finished + share
        self._pace.start()
        if share >= 1:
            self._evaluate()

    def step(self, count: int) -> None:
        """Counts optimizer steps."""
        if self.steps:
            self.done += count
            self._pace.done(count)

    def client(self, share: float) -> None:
        """Called when a share of the round's clients is done; after all, the evaluation begins."""
        reached = self._finished + share
        if not self.steps and reached > self.done:
            self._pace.done(reached - self.done)
            self.done = reached
        if share >= 1:
            self._evaluate()

    def _evaluate(self) -> None:
        self._pace.stop()
        self._evaluating = self._clock()

    def row(self, round_number: int, evaluated: float) -> None:
        """Called when a round is saved.

        Args:
            round_number: which round; 0 is the evaluation of the untrained network.
            evaluated: seconds of its evaluation.
        """
        if not round_number:
            self._first = evaluated
            return
        if self._evaluating is not None:
            kind = self._due(round_number, self.rounds)
            seconds = self._clock() - self._evaluating
            self._evaluations.setdefault(kind, []).append(seconds)
            # A resumed run does not evaluate the untrained network again.
            if any(kind) and self._first is None:
                self._first = seconds
        self._pace.stop()
        self._finished = round_number
        self._evaluating = None
        # Sampled clients may be smaller or larger than expected, and some are dropped: count again.
        here = (round_number - self._before) / max(self.rounds - self._before, 1)
        self.done = self.steps * here if self.steps else float(round_number)

    def seconds(self) -> float | None:
        """Seconds left, or None while nothing is known."""
        training = self._pace.seconds_for(max(self.total - self.done, 0.0))
        if training is None:
            return None
        following = range(self._finished + 1, self.rounds + 1)
        kinds = Counter(self._due(number, self.rounds) for number in following)
        evaluations = sum(count * self._usual(kind) for kind, count in kinds.items())
        if self._evaluating is not None:
            usual = self._usual(self._due(self._finished + 1, self.rounds))
            evaluations -= min(self._clock() - self._evaluating, usual)
        return training + max(evaluations, 0.0)

    def _usual(self, kind: Kind) -> float:
        """Seconds after a round with such an evaluation.

        A kind that was not there yet is expected to take as long as the first evaluation: that of
        the untrained network measures everything, so the ETA is rather too long than too short.
        """
        if kind in self._evaluations:
            return statistics.fmean(self._evaluations[kind])
        return (self._first or 0.0) if any(kind) else 0.0
