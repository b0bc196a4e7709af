"""The two decisions of a step, as values: who is drafted for, and how many draft tokens each verifies."""

from collections.abc import Sequence

from dspark.engine.confidences import Confidences
from dspark.engine.curve_correction import CurveCorrection
from dspark.engine.estimates import PriorEstimate
from dspark.engine.lagged_capacity import LaggedCapacity, Members, Picture
from dspark.engine.lookup import Lookup, num_likely
from dspark.engine.probing import Idleness, Probing
from dspark.engine.running import RunningRequest, stored_tokens
from dspark.engine.step import Launched
from dspark.speculation.calibration import Calibration
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.drafting_choice import choose_drafting
from dspark.speculation.fleet import FREE
from dspark.speculation.prefix_scheduler import PrefixScheduler
from dspark.speculation.proposal import Proposal

PROBE_SLOTS, PROBE_LENGTH = 3, 2  # of a probe: drafted; verified where no confidences tell anything without
NUM_AHEAD = 1  # slots drafted beyond those that past rounds make worth verifying: confidences may show a better block
MEAN_WEIGHT = 0.2  # of a step, in the mean of what is verified


class SpeculationPolicy:
    """Fixed lengths where they are asked for, else what pays by the cost curve.

    share: a fleet's bounds on every step, also where there is no curve and where lengths are fixed; probes are not
    counted in its max_drafted, or nobody would ever learn that more of it pays. room: draft tokens whose lengths are
    not fixed that fit beside the step's other tokens; None = no bound. Both are known before the step drafts.

    Losslessness: the first decision sees past rounds only, the second admits by rank and stops early, so that a
    token's own content never decides whether it is kept. Source: DSpark §3.2.2, Appendix A; ALGORITHMS §5.
    """

    def __init__(
        self,
        *,
        block_size: int,
        curve: CostCurve | None,
        calibration: Calibration | None,
        verify_length: int | None,
        probe_every: int,
        has_confidence: bool,
        min_gain: float = 0.0,
        lagged_prior: PriorEstimate | None = None,
        corrects_curve: bool = False,
    ) -> None:
        """corrects_curve: hold the curve to what steps are seen to take. lagged_prior: what is known of all requests'
        drafts, where the capacity is the lagged one; else None.
        """
        if verify_length is not None and not 0 <= verify_length <= block_size:
            raise ValueError(f"verify_length {verify_length} is outside of the drafter's block; use 0..{block_size}")
        if block_size and curve is None and verify_length is None:
            raise ValueError(
                "the scheduler needs a cost curve; make one with jobs/profile_engine.py, or set verify_length"
            )
        self.block_size = block_size
        self.curve = self.measured_curve = curve
        self.verify_length = verify_length
        self.has_confidence = has_confidence
        self.min_gain = min_gain
        self.share = FREE
        self.room: int | None = None
        self._mean_length = 0.0
        self._lagged_prior = lagged_prior
        self._lagged = None
        if lagged_prior is not None and curve is not None:
            self._lagged = LaggedCapacity(curve, block_size=block_size)
        self._correction = CurveCorrection(curve) if corrects_curve and curve is not None else None
        self._idle = Idleness()
        self._probing = Probing(every=probe_every, length=PROBE_LENGTH)
        self._scheduler = PrefixScheduler()
        self.confidences = Confidences(calibration)

    def fixed_length(self, running: RunningRequest) -> int | None:
        """The length this request or the engine is bound to; None when the scheduler decides."""
        fixed = running.request.verify_length
        fixed = self.verify_length if fixed is None else fixed
        return None if fixed is None else self._fitting(running, fixed)

    def reserved(self, decoding: Sequence[RunningRequest]) -> int:
        """Tokens of a step to keep for these: fixed lengths, for the others what they had verified lately."""
        fixed = [self.fixed_length(running) for running in decoding]
        num_open = sum(length is None for length in fixed)
        return len(decoding) + sum(length or 0 for length in fixed) + round(self._mean_length * num_open)

    def choose_copies(self, decoding: Sequence[RunningRequest], lookup: Lookup) -> None:
        """Look every request's text up, and settle whose copy is verified: where more of it is expected to stand.

        A length that the request itself asks for is one of drafting: nothing is copied there.
        """
        for running in decoding:
            assert running.copies is not None
            fixed = self.fixed_length(running)
            most = 0 if running.request.verify_length is not None else running.room if fixed is None else fixed
            lookup.look_up(running.copies, most)
            if running.copies.copied:
                limit = self._fitting(running, self.block_size) if fixed is None else fixed
                drafted = running.estimate.survival(limit)
                running.copies.is_used = sum(running.copies.survival()) >= sum(drafted)

    def choose(self, decoding: Sequence[RunningRequest], *, prefill_tokens: int) -> list[int]:
        """Draft tokens to ask the drafter for, per request; 0 = verify its copy if it has one, else nothing."""
        for running in decoding:
            running.is_probed = False
        is_free = [running.is_copied for running in decoding]
        if self._idle.goes_on(decoding, is_free):
            return [0] * len(decoding)
        fixed = self.share.bound([self.fixed_length(running) for running in decoding], is_free)
        if self.curve is None or all(is_free) or all(length is not None for length in fixed):
            return [0 if is_copied else length or 0 for is_copied, length in zip(is_free, fixed, strict=True)]
        limits = [self._fitting(running, self.block_size) for running in decoding]
        expected = [running.past_survival(limit) for running, limit in zip(decoding, limits, strict=True)]
        chosen, lengths = choose_drafting(
            expected,
            self.curve,
            prefill_tokens=prefill_tokens,
            context_tokens=stored_tokens(decoding),
            fixed=fixed,
            is_free=is_free,
            min_gain=self.min_gain,
            max_drafted=self.share.max_drafted,
            capacity=self._capacity,
            floor=self.share.floor,
            weights=self.share.weights_for(running.request.priority for running in decoding),
        )
        for place in self._probing.choose(
            decoding,
            expected,
            limits,
            self.curve,
            chosen=chosen,
            fixed=fixed,
            is_free=is_free,
            prefill_tokens=prefill_tokens,
            num_steps=1 + self._idle.num_spared,
        ):
            decoding[place].is_probed = True
        wanted = []
        for i, running in enumerate(decoding):
            forced = fixed[i]
            if is_free[i]:
                wanted.append(0)
            elif forced is not None:
                wanted.append(forced)
            else:
                is_drafted = chosen[i] or running.is_probed
                wanted.append(min(limits[i], self._drafted(lengths[i])) if is_drafted else 0)
        self._idle.note(decoding, is_idle=not any(wanted) and all(length is None for length in fixed))
        return wanted

    def verify_lengths(
        self, decoding: Sequence[RunningRequest], proposals: Sequence[Proposal], *, prefill_tokens: int
    ) -> list[int]:
        """Draft tokens to verify, per request; what confidences say of these proposals is taken in for later steps."""
        if self._lagged is None and not any(proposal.num_tokens for proposal in proposals):
            for running in decoding:
                running.expected_survival = []
            return self._observe(decoding, [0] * len(decoding))
        survival = self.survival(decoding, proposals)
        for running, proposal, row in zip(decoding, proposals, survival, strict=True):
            running.expected_survival = row
            if proposal.confidence_logits is not None:
                running.estimate.observe(row)
        lengths = self.allocate(decoding, survival, prefill_tokens=prefill_tokens)
        self._observe(decoding, lengths)
        if self._lagged is not None and self._lagged_prior is not None:
            rows = {running.request.request_id: row for running, row in zip(decoding, survival, strict=True)}
            self._lagged.note(Picture(rows, self._lagged_prior.survival(self.block_size)))
        return lengths

    def note_step(self, launched: Launched, step_s: float) -> None:
        """What a step took from its start to its end."""
        if self._correction is None:
            return
        has_changed = self._correction.note(
            num_tokens=launched.batch.num_tokens,
            num_requests=len(launched.works),
            context_tokens=launched.context_tokens,
            num_drafted=launched.num_drafted,
            draft_s=launched.draft_s,
            verify_s=step_s - launched.draft_s,
        )
        if has_changed:
            self.curve = self._correction.curve
            if self._lagged is not None:
                self._lagged.curve = self.curve

    def prepare(self) -> None:
        """Settle what the next step's decisions take from the past, while this one computes."""
        if self._lagged is not None:
            self._lagged.prepare()

    def survival(self, drafted: Sequence[RunningRequest], proposals: Sequence[Proposal]) -> list[list[float]]:
        """Expected survival per draft token: from the confidence head, calibrated; else from past rounds."""
        return [
            self.confidences.survival(running, proposal) or running.past_survival(proposal.num_tokens)
            for running, proposal in zip(drafted, proposals, strict=True)
        ]

    def learn(self, running: RunningRequest, num_verified: int, num_accepted: int) -> None:
        """Take a verdict in, for later steps. Of copies lookup learns by itself, from every committed token."""
        if not running.is_copied:
            self.confidences.learn(running, num_verified, num_accepted)

    def allocate(
        self,
        decoding: Sequence[RunningRequest],
        survival: Sequence[Sequence[float]],
        *,
        prefill_tokens: int,
    ) -> list[int]:
        """Draft tokens to verify, per request. survival: a row per request, as long as its proposal."""
        fixed = [self._bound_length(running) for running in decoding]
        bound = self.share.cut(
            [None if f is None else min(f, len(row)) for f, row in zip(fixed, survival, strict=True)]
        )
        if self.curve is None:
            pairs = zip(bound, survival, strict=True)
            lengths = self.share.cut([num_likely(row) if length is None else length for length, row in pairs])
            return [length or 0 for length in lengths]
        drafted = sum(1 for running, row in zip(decoding, survival, strict=True) if row and not running.is_copied)
        total = self._lagged_total(decoding, survival, bound, prefill_tokens)
        return self._lengths(decoding, survival, bound, prefill_tokens, num_drafted=drafted, total=total)

    def _lagged_total(
        self,
        decoding: Sequence[RunningRequest],
        survival: Sequence[Sequence[float]],
        bound: Sequence[int | None],
        prefill_tokens: int,
    ) -> int | None:
        """Draft tokens of the step by the lagged form, fixed lengths included; None where it is not asked for."""
        if self._lagged is None:
            return None
        num_fixed = sum(length or 0 for length in bound)
        self._lagged.context_tokens = stored_tokens(decoding)
        is_drafted = {
            running.request.request_id: length is None and len(row) > 0
            for running, row, length in zip(decoding, survival, bound, strict=True)
        }
        return num_fixed + self._lagged.total(Members(is_drafted, prefill_tokens + num_fixed))

    @property
    def _capacity(self) -> int | None:
        """Most draft tokens of a step."""
        return min((bound for bound in (self.share.capacity, self.room) if bound is not None), default=None)

    def _lengths(
        self,
        decoding: Sequence[RunningRequest],
        survival: Sequence[Sequence[float]],
        fixed: Sequence[int | None],
        prefill_tokens: int,
        *,
        num_drafted: int,
        total: int | None = None,
    ) -> list[int]:
        """total: draft tokens to verify, whatever the curve says of the present survival; None asks the curve."""
        assert self.curve is not None
        capacity = self._capacity
        if total is not None:
            total = capacity = total if capacity is None else min(total, capacity)
        return self._scheduler.allocate(
            survival,
            self.curve,
            prefill_tokens=prefill_tokens,
            context_tokens=stored_tokens(decoding),
            draft_s=self.curve.draft_seconds(num_drafted),
            capacity=capacity,
            floor=max(total or 0, self.share.floor),
            fixed=fixed,
            weights=self.share.weights_for(running.request.priority for running in decoding),
        )

    def _observe(self, decoding: Sequence[RunningRequest], lengths: list[int]) -> list[int]:
        """How much is verified for a request whose length is open."""
        seen = [n for running, n in zip(decoding, lengths, strict=True) if self.fixed_length(running) is None]
        if seen:
            self._mean_length += MEAN_WEIGHT * (sum(seen) / len(seen) - self._mean_length)
        return lengths

    def _drafted(self, length: int) -> int:
        """Slots to draft where past rounds make so many worth verifying; 0 for a probe."""
        if self.has_confidence:
            return length + NUM_AHEAD if length else PROBE_SLOTS
        return length or PROBE_LENGTH  # nothing this block shows would let more of it be verified

    def _bound_length(self, running: RunningRequest) -> int | None:
        """The fixed length, or that of a probe; both are known before anything is drawn."""
        if running.is_probed and not self.has_confidence:
            return PROBE_LENGTH
        return self.fixed_length(running)

    def _fitting(self, running: RunningRequest, length: int) -> int:
        return max(0, min(length, running.room, self.block_size)) if running.is_draftable else 0
