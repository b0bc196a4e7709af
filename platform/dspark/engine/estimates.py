"""What is expected of a request's next draft tokens, from its past rounds alone.

Legend: k = 0, 1, … the slot of a draft token within its proposal; conditional acceptance at k: its share of acceptances
among the rounds whose slots before k all stood; survival at k: the product of those of slots 0..k.

Nothing here looks at the tokens of the step to come, so whatever is decided from it leaves the output's distribution
as it is.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul

FIRST_GUESS = 0.6  # conditional acceptance before anything was seen
PRIOR_ROUNDS = 8.0  # rounds that a guess weighs against what was seen over all requests
REQUEST_ROUNDS = 4.0  # rounds that the prior weighs against what was seen of one request
DRIFT_ROUNDS = 20.0  # rounds of confidences that were right, taken in advance
DRIFT_DECAY = 0.995  # the newest two hundred rounds of a slot decide
FADE = 0.95  # of what is known of a request, per step that it is not drafted for: how hard its text is does not last
DECAY = 0.9  # weight of a round once the next has come: the newest ten or so decide


class PriorEstimate:
    """Mean acceptance over the rounds of all requests that share a drafter; new requests start from it.

    A slot with little evidence is taken to be like the one before it, the first slot like `first_guess`.
    pseudo_rounds: how many rounds that guess weighs.
    """

    def __init__(self, *, first_guess: float = FIRST_GUESS, pseudo_rounds: float = PRIOR_ROUNDS) -> None:
        self.num_counted = 0  # times that anything was counted: what was made of the estimate before is out of date
        self._first_guess = first_guess
        self._pseudo_rounds = pseudo_rounds
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._known: tuple[int, list[float]] = (-1, [])

    def update(self, num_proposed: int, num_accepted: int) -> None:
        """Count one round."""
        self._count((1.0, float(stands)) for stands in _judged(num_proposed, num_accepted))

    def observe(self, survival: Sequence[float]) -> None:
        """Count what a confidence head expects of one proposal as that share of a round."""
        self._count(pairwise([1.0, *survival]))

    def _count(self, slots: Iterable[tuple[float, float]]) -> None:
        """Per slot, the share of a round that reached it and the share that stood."""
        self.num_counted += 1
        for k, (reached, accepted) in enumerate(slots):
            if k == len(self._reached):
                self._reached.append(0.0)
                self._accepted.append(0.0)
            self._reached[k] += reached
            self._accepted[k] += accepted

    def conditional(self, num_slots: int) -> list[float]:
        """Conditional acceptance of slots 0..num_slots-1."""
        counted, known = self._known  # asked for by every request of a step
        if counted != self.num_counted or len(known) < num_slots:
            known = self._estimated(num_slots)
            self._known = self.num_counted, known
        return known[:num_slots]

    def _estimated(self, num_slots: int) -> list[float]:
        guess = self._first_guess
        estimates = []
        for k in range(num_slots):
            if k < len(self._reached):
                weight = self._pseudo_rounds
                guess = (self._accepted[k] + weight * guess) / (self._reached[k] + weight)
            estimates.append(guess)
        return estimates

    def survival(self, num_slots: int) -> list[float]:
        """Survival of slots 0..num_slots-1, non-increasing."""
        return list(accumulate(self.conditional(num_slots), mul))


class AcceptanceEstimate:
    """Acceptance in one request's recent rounds, held to the prior where it has few of them.

    prior: shared; every round of the request counts there too. decay: weight of a slot's evidence after one more
    round that reached the slot. pseudo_rounds: how many rounds the prior weighs.
    """

    def __init__(self, prior: PriorEstimate, *, decay: float = DECAY, pseudo_rounds: float = REQUEST_ROUNDS) -> None:
        self._prior = prior
        self._decay = decay
        self._pseudo_rounds = pseudo_rounds
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._known: tuple[int, list[float]] = (-1, [])

    def update(self, num_proposed: int, num_accepted: int) -> None:
        """Take a verified round in; one without a proposal says nothing."""
        self._count((1.0, float(stands)) for stands in _judged(num_proposed, num_accepted))
        self._prior.update(num_proposed, num_accepted)

    def observe(self, survival: Sequence[float]) -> None:
        """Take in what a confidence head expects of a proposal, verified or not, instead of its verdict."""
        self._count(pairwise([1.0, *survival]))
        self._prior.observe(survival)

    def fade(self) -> None:
        """A step without a round: the request is more like all others again."""
        if not self._reached:
            return
        self._reached = [FADE * weight for weight in self._reached]
        self._accepted = [FADE * weight for weight in self._accepted]
        self._known = (-1, [])

    def _count(self, slots: Iterable[tuple[float, float]]) -> None:
        """Per slot, the share of a round that reached it and the share that stood."""
        for k, (reached, accepted) in enumerate(slots):
            if k == len(self._reached):
                self._reached.append(0.0)
                self._accepted.append(0.0)
            self._reached[k] = self._decay * self._reached[k] + reached
            self._accepted[k] = self._decay * self._accepted[k] + accepted

    def conditional(self, num_slots: int) -> list[float]:
        """Conditional acceptance of slots 0..num_slots-1."""
        estimates = self._prior.conditional(num_slots)
        weight = self._pseudo_rounds
        for k in range(min(num_slots, len(self._reached))):
            estimates[k] = (self._accepted[k] + weight * estimates[k]) / (self._reached[k] + weight)
        return estimates

    def survival(self, num_slots: int) -> list[float]:
        """Survival of slots 0..num_slots-1, non-increasing."""
        counted, known = self._known  # a round of this request is counted in the prior as well
        if counted != self._prior.num_counted or len(known) != num_slots:
            known = list(accumulate(self.conditional(num_slots), mul))
            self._known = self._prior.num_counted, known
        return known


def _judged(num_proposed: int, num_accepted: int) -> list[bool]:
    """Whether each slot that was judged stood: all accepted ones and the first rejected one."""
    assert 0 <= num_accepted <= num_proposed, f"{num_accepted} of {num_proposed} draft tokens accepted"
    return [True] * num_accepted + [False] * (num_accepted < num_proposed)


class ConfidenceDrift:
    """How far confidences have lately been off, and their correction: accepted over expected, slot by slot.

    A temperature stretches a confidence but cannot shift it, and what was fitted on one kind of text is off on
    another. Counts the slots that verification reached, of all requests; the newest some hundred rounds decide.
    pseudo_rounds: how many right rounds the correction 1 weighs. decay: of a slot's counts, per round that reached it.
    """

    def __init__(self, *, decay: float = DRIFT_DECAY, pseudo_rounds: float = DRIFT_ROUNDS) -> None:
        self._decay = decay
        self._pseudo_rounds = pseudo_rounds
        self._expected: list[float] = []
        self._accepted: list[float] = []

    def update(self, survival: Sequence[float], num_accepted: int) -> None:
        """Count a verified round. survival: of its verified slots, as it was before any correction."""
        for k, (before, after) in enumerate(pairwise([1.0, *survival[: num_accepted + 1]])):
            if k == len(self._expected):
                self._expected.append(0.0)
                self._accepted.append(0.0)
            self._expected[k] = self._decay * self._expected[k] + (after / before if before > 0 else 0.0)
            self._accepted[k] = self._decay * self._accepted[k] + (k < num_accepted)

    def factor(self, k: int) -> float:
        """What the conditional confidence of slot k is multiplied with; a slot never reached is like the one before."""
        if not self._expected:
            return 1.0
        k = min(k, len(self._expected) - 1)
        weight = self._pseudo_rounds
        return (self._accepted[k] + weight) / (self._expected[k] + weight)

    def corrected(self, survival: Sequence[float]) -> list[float]:
        """Survival from corrected confidences; none of them above 1."""
        rows, product = [], 1.0
        for k, (before, after) in enumerate(pairwise([1.0, *survival])):
            product *= min(1.0, after / before * self.factor(k)) if before > 0 else 0.0
            rows.append(product)
        return rows
