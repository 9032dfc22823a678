"""When a run will be done: by the rate of its last training, and what is left of training and evaluations."""

import math
import statistics
from collections import Counter
from collections.abc import Callable

WINDOW_SECONDS = 30.0  # Older work counts less and less for the rate.

Kind = tuple[bool, bool]  # of an evaluation: with kNN, with a linear probe
Due = Callable[
    [int, int], Kind
]  # what is measured after a round, given its number and that of the last one


class Pace:
    """Work per second of late, from reports that may come often (steps) or seldom (whole clients).

    The clock stands still while nothing is done: before `start` and after `stop`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts without work.

        Args:
            clock: seconds, from any origin.
        """
        self._clock = clock
        self._work = self._seconds = 0.0  # each decayed alike
        self._longest = 0.0  # seconds between two reports of late
        self._last: float | None = None  # when the last report came; None: nothing is being done

    def start(self) -> None:
        """Work begins now."""
        self._last = self._clock()

    def stop(self) -> None:
        """Work ends with the last report; what has passed since is not work."""
        self._last = None

    def done(self, work: float) -> None:
        """So much work was done since the last report."""
        now = self._clock()
        passed = now - self._last if self._last is not None else 0.0
        kept = self._kept(passed)
        self._work = self._work * kept + work
        self._seconds = self._seconds * kept + passed
        self._longest = max(self._longest * kept, passed)
        self._last = now

    def seconds_for(self, work: float) -> float | None:
        """How long so much work will take from now on; None if there was none to tell by."""
        if not self._work:
            return None
        passed = self._clock() - self._last if self._last is not None else 0.0
        usual = min(passed, self._longest)
        # Reports that are late mean that the work has become slower.
        late = passed - usual
        kept = self._kept(late)
        seconds = work * (self._seconds * kept + late) / (self._work * kept)
        return max(seconds - usual, 0.0)

    def _kept(self, passed: float) -> float:
        """The share of older work; a window must hold a few reports."""
        return math.exp(-passed / max(WINDOW_SECONDS, 3 * self._longest, 3 * passed))


class Eta:
    """Seconds left of a run of several rounds, each of which trains, and some of which then evaluate."""

    def __init__(self, rounds: int, due: Due, clock: Callable[[], float]) -> None:
        """Starts before the first round.

        Args:
            rounds: of the whole run.
            due: which rounds evaluate what, as `Evaluator.due`.
            clock: seconds, from any origin.
        """
        self.rounds, self.steps = rounds, 0
        self.clock = clock
        self.done = (
            0.0  # steps, or rounds where nobody tells of steps; also those of an earlier process
        )
        self._due = due
        self._pace = Pace(clock)
        self._finished = self._before = 0  # rounds in all, and by an earlier process
        self._evaluating: float | None = None  # since when
        self._first: float | None = (
            None  # seconds of this process' first evaluation, mostly of the untrained network
        )
        self._evaluations: dict[
            Kind, list[float]
        ] = {}  # seconds after each trained round: saving them takes some, too

    @property
    def total(self) -> float:
        """Steps to come when the run started, or rounds."""
        return self.steps or self.rounds

    def expect(self, steps: int, finished: int) -> None:
        """Tells how many optimizer steps are still to come, and the rounds that are finished."""
        self.steps = steps
        self._finished = self._before = finished

    def start(self, round_number: int, share: float, steps: int) -> None:
        """A round's clients begin to train.

        Args:
            round_number: which one.
            share: of its clients that an earlier process had finished.
            steps: that those had taken.
        """
        self._finished, self._evaluating = round_number - 1, None
        self.done = self.done + steps if self.steps else self._finished + share
        self._pace.start()
        if share >= 1:
            self._evaluate()

    def step(self, count: int) -> None:
        """Optimizer steps were taken."""
        if self.steps:
            self.done += count
            self._pace.done(count)

    def client(self, share: float) -> None:
        """So large a share of the round's clients is done; with all of them the evaluation begins."""
        reached = self._finished + share
        if not self.steps and reached > self.done:
            self._pace.done(reached - self.done)
            self.done = reached
        if share >= 1:
            self._evaluate()

    def _evaluate(self) -> None:
        self._pace.stop()
        self._evaluating = self.clock()

    def row(self, round_number: int, evaluated: float) -> None:
        """A round is done and saved; round 0 is the evaluation of the untrained network, which took so long."""
        if not round_number:
            self._first = evaluated
            return
        if self._evaluating is not None:
            kind, seconds = self._due(round_number, self.rounds), self.clock() - self._evaluating
            self._evaluations.setdefault(kind, []).append(seconds)
            if (
                any(kind) and self._first is None
            ):  # A resumed run does not measure the untrained network again.
                self._first = seconds
        self._pace.stop()
        self._finished, self._evaluating = round_number, None
        # Clients that were drawn may be smaller or larger than expected, and some are dropped: count anew.
        here = (round_number - self._before) / max(self.rounds - self._before, 1)
        self.done = self.steps * here if self.steps else float(round_number)

    def seconds(self) -> float | None:
        """What is left, or None while nothing is known."""
        training = self._pace.seconds_for(max(self.total - self.done, 0.0))
        if training is None:
            return None
        following = range(self._finished + 1, self.rounds + 1)
        kinds = Counter(self._due(number, self.rounds) for number in following)
        left = sum(count * self._usual(kind) for kind, count in kinds.items())
        if self._evaluating is not None:
            usual = self._usual(self._due(self._finished + 1, self.rounds))
            left -= min(self.clock() - self._evaluating, usual)
        return training + max(left, 0.0)

    def _usual(self, kind: Kind) -> float:
        """Seconds after a round with such an evaluation.

        A kind that was not there yet is taken for as long as the first evaluation: that of the untrained network
        measures everything, so that it errs on the long side.
        """
        if kind in self._evaluations:
            return statistics.fmean(self._evaluations[kind])
        return (self._first or 0.0) if any(kind) else 0.0
