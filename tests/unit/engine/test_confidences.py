"""Confidences mean what the calibration of the request's own way of decoding says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.engine.confidences import Confidences
from dspark.speculation.calibration import Calibration, SlotScales, survival_of
from dspark.speculation.proposal import Proposal

SCALES = {
    "greedy": SlotScales((1.0, 1.0), (1.0, 1.0)),
    "sampled": SlotScales((1.0, 1.0), (0.0, 0.0)),
    "seeded": SlotScales((1.0, 1.0), (-1.0, -1.0)),
}
LOGITS = [0.5, 0.25]


def survival(calibration: Calibration | None, mode: str) -> list[float]:
    running: Any = SimpleNamespace(mode=mode, confident_survival=None)
    proposal = Proposal(torch.zeros(2, dtype=torch.long), None, torch.tensor(LOGITS))
    return Confidences(calibration).survival(running, proposal)


@pytest.mark.parametrize("mode", SCALES)
def test_each_way_of_decoding_has_scales_of_its_own(mode: str) -> None:
    assert survival(Calibration(SCALES), mode) == pytest.approx(survival_of(LOGITS, SCALES[mode]))
    assert survival(None, mode) == pytest.approx(survival_of(LOGITS, None))


def test_a_file_from_before_seeded_decoding_had_scales_gives_it_those_of_sampled_decoding() -> None:
    before = Calibration({mode: scales for mode, scales in SCALES.items() if mode != "seeded"})
    assert survival(before, "seeded") == survival(before, "sampled")
