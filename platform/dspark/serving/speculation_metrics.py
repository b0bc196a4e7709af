"""What speculation did for one request, counted from what its steps tell."""

from dataclasses import dataclass

from dspark.engine.step import StepOutput
from dspark.serving.sampling_fields import Wire


@dataclass(frozen=True)
class StepDraft:
    """Of one decode: draft tokens proposed, given to verification, that stood, and tokens output in all."""

    num_drafted: int
    num_verified: int
    num_accepted: int
    num_output: int

    @staticmethod
    def of(output: StepOutput) -> "StepDraft | None":
        """None for the step that read the prompt."""
        done = output.round
        if done is None:
            return None
        num_accepted = min(done.num_accepted, done.num_committed)  # an accepted token behind a stop is not output
        return StepDraft(output.num_drafted, done.num_proposed, num_accepted, done.num_committed)


class SpeculativeDecoding(Wire):
    """Of all answers of a request together; the names are vLLM's where it has one."""

    mean_acceptance_length: float | None
    """Tokens per step that verified any, the target's own included: the paper's tau; null without such a step."""
    draft_acceptance_rate: float | None
    """Accepted of verified tokens; null where none was verified."""
    num_decode_steps: int
    """Steps after the one that read the prompt, which output at least a token each."""
    num_spec_steps: int
    """Those of them that verified draft tokens."""
    num_draft_tokens: int
    """Proposed, by the drafter or by copying."""
    num_verified_tokens: int
    """Of those, given to the target to verify."""
    num_accepted_draft_tokens: int
    """Of those, output."""


class Metrics(Wire):
    speculative_decoding: SpeculativeDecoding


class SpeculationTally:
    """Adds the steps of a request up."""

    def __init__(self) -> None:
        self._steps: list[StepDraft] = []

    def add(self, draft: StepDraft | None) -> None:
        """Count a step; None was none that decodes."""
        if draft is not None:
            self._steps.append(draft)

    def metrics(self) -> Metrics:
        """The figures so far."""
        verifying = [step for step in self._steps if step.num_verified]
        verified = sum(step.num_verified for step in verifying)
        accepted = sum(step.num_accepted for step in verifying)
        return Metrics(
            speculative_decoding=SpeculativeDecoding(
                mean_acceptance_length=sum(s.num_output for s in verifying) / len(verifying) if verifying else None,
                draft_acceptance_rate=accepted / verified if verified else None,
                num_decode_steps=len(self._steps),
                num_spec_steps=len(verifying),
                num_draft_tokens=sum(step.num_drafted for step in self._steps),
                num_verified_tokens=verified,
                num_accepted_draft_tokens=accepted,
            )
        )
