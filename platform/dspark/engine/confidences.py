"""What a confidence head's logits are taken to mean: calibrated, and corrected by what was lately accepted."""

from typing import get_args

from dspark.engine.estimates import ConfidenceDrift
from dspark.engine.running import DecodingMode, RunningRequest
from dspark.speculation.calibration import Calibration, survival_of
from dspark.speculation.proposal import Proposal


class Confidences:
    """Each mode of decoding has scales and a correction of its own. calibration: None takes confidences as they are."""

    def __init__(self, calibration: Calibration | None) -> None:
        self._calibration = Calibration() if calibration is None else calibration
        self._drift = {mode: ConfidenceDrift() for mode in get_args(DecodingMode)}

    def survival(self, running: RunningRequest, proposal: Proposal) -> list[float]:
        """Survival per draft token; [] for a proposal without confidences. The request remembers it uncorrected."""
        running.confident_survival = None
        if proposal.confidence_logits is None or not proposal.num_tokens:
            return []
        scales = self._calibration.for_mode(running.mode)
        running.confident_survival = survival_of(proposal.confidence_logits.tolist(), scales)
        return self._drift[running.mode].corrected(running.confident_survival)

    def learn(self, running: RunningRequest, num_verified: int, num_accepted: int) -> None:
        """Take a verdict in: on the confidences, or where there were none on the request itself."""
        if running.confident_survival is not None:
            self._drift[running.mode].update(running.confident_survival[:num_verified], num_accepted)
        elif num_verified:
            running.estimate.update(num_verified, num_accepted)
