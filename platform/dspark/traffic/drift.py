"""Whether drafts are accepted less often than they were: a sequential test on every judged draft token.

Legend: q_k the conditional acceptance of slot k at calibration, the share that stood among the rounds whose slots
before k all stood; x_k whether it stands now. A trial is a slot that verification reached.
"""

import math
from collections.abc import Iterator, Sequence

LOWEST, HIGHEST = 0.01, 0.99  # levels nearer to 0 or 1 rest on too few rounds to be believed
RECENT = 0.998  # weight of what was seen once another round has come: the newest five hundred decide
LEVELS = "acceptance"  # where a calibration tells the levels that were found when it was fitted, by way of decoding


class AcceptanceCusum:
    """Page's test of levels q_k against q_k * (1 - drop), a round at a time.

    S = max(0, S + sum over the round's trials of llr(x_k) / design_effect); an alarm is due while S >= h, h the
    logarithm of rounds_between_false_alarms. As long as trials are independent and acceptance is q_k or more, alarms
    are at least that many rounds apart in the mean: exp of a round's sum has a mean of at most 1 (Lorden 1971; a root
    of it, which the design effect takes, all the more). S is held at 2h, so that an alarm ends soon after its cause.
    """

    def __init__(
        self, levels: Sequence[float], *, drop: float, rounds_between_false_alarms: float, design_effect: float
    ) -> None:
        if not levels:
            raise ValueError("a level of acceptance is needed for slot 0 at least")
        self.levels = [min(max(level, LOWEST), HIGHEST) for level in levels]
        self.threshold = math.log(rounds_between_false_alarms)
        self._ratios = [log_likelihood_ratio(level, drop) for level in self.levels]
        self._design_effect = design_effect
        self._sum = 0.0
        self._expected = self._stood = 0.0

    @property
    def score(self) -> float:
        """S / h: from 1 on an alarm is due; at most 2."""
        return self._sum / self.threshold

    @property
    def is_drifting(self) -> bool:
        return self._sum >= self.threshold

    @property
    def ratio(self) -> float | None:
        """What stood lately over what stands at the levels, over the same trials; None before the first."""
        return self._stood / self._expected if self._expected else None

    def add(self, num_accepted: int, num_judged: int) -> None:
        """A round that judged at least one slot."""
        change, expected = 0.0, 0.0
        num_stood = 0
        for k, stood in trials(num_accepted, num_judged):
            place = min(k, len(self.levels) - 1)
            change += self._ratios[place][0 if stood else 1]
            expected += self.levels[place]
            num_stood += stood
        self._sum = min(max(0.0, self._sum + change / self._design_effect), 2 * self.threshold)
        self._expected = RECENT * self._expected + expected
        self._stood = RECENT * self._stood + num_stood


class LevelCount:
    """Conditional acceptance by slot, counted."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._reached: list[int] = []
        self._stood: list[int] = []

    def add(self, num_accepted: int, num_judged: int) -> None:
        """A round that judged at least one slot."""
        self.num_rounds += 1
        for k, stood in trials(num_accepted, num_judged):
            if k == len(self._reached):
                self._reached.append(0)
                self._stood.append(0)
            self._reached[k] += 1
            self._stood[k] += stood

    def levels(self, *, min_rounds: int = 50) -> list[float]:
        """By slot, up to the first that fewer rounds reached; slot 0 is there whenever anything is."""
        found = []
        for k, (reached, stood) in enumerate(zip(self._reached, self._stood, strict=True)):
            if k and reached < min_rounds:
                break
            found.append(stood / reached)
        return found


class AcceptanceWatch:
    """One way of decoding: the test against the level that calibration recorded, or else against its own first rounds.

    num_alarms: times that an alarm began.
    """

    def __init__(
        self,
        levels: Sequence[float] | None,
        *,
        drop: float,
        rounds_between_false_alarms: float,
        design_effect: float,
        learn_rounds: int,
    ) -> None:
        self.num_alarms = 0
        self._options = {
            "drop": drop,
            "rounds_between_false_alarms": rounds_between_false_alarms,
            "design_effect": design_effect,
        }
        self._learning = LevelCount()
        self._learn_rounds = learn_rounds
        self.test = AcceptanceCusum(levels, **self._options) if levels else None

    def add(self, num_accepted: int, num_judged: int) -> bool:
        """Take a round in; whether an alarm begins with it."""
        if num_judged < 1:
            return False
        if self.test is None:
            self._learning.add(num_accepted, num_judged)
            if self._learning.num_rounds >= self._learn_rounds:
                self.test = AcceptanceCusum(self._learning.levels(), **self._options)
            return False
        was_drifting = self.test.is_drifting
        self.test.add(num_accepted, num_judged)
        begins = self.test.is_drifting and not was_drifting
        self.num_alarms += begins
        return begins


def trials(num_accepted: int, num_judged: int) -> Iterator[tuple[int, bool]]:
    """Slots of a round that verification reached, and whether each stood: all accepted ones and the first rejected."""
    for k in range(min(num_accepted + 1, num_judged)):
        yield k, k < num_accepted


def log_likelihood_ratio(level: float, drop: float) -> tuple[float, float]:
    """Of acceptance level * (1 - drop) against level: what a token adds that stood, and one that did not."""
    fallen = level * (1 - drop)
    return math.log(fallen / level), math.log((1 - fallen) / (1 - level))
