"""The train stage's config refuses what cannot be and finds the loss factors of a step."""

from typing import Any

import pytest

from dspark.config import build_config
from dspark.training.config import TrainConfig
from dspark.training.losses import LossWeights

BASE: dict[str, Any] = {"cache": "c", "output": "o", "drafter": {}, "steps": 10}
PHASES = [
    {"until": 0.5, "ce": 1.0, "tv": 0.9, "confidence": 1.0},
    {"until": 1.0, "ce": 0.1, "tv": 0.8, "confidence": 0.7},
]


def test_the_loss_factors_follow_the_phases():
    config = build_config(TrainConfig, BASE | {"loss_phases": PHASES})
    early, late = LossWeights(ce=1.0, tv=0.9, confidence=1.0), LossWeights(ce=0.1, tv=0.8, confidence=0.7)
    assert [config.loss_weights(step) for step in range(11)] == [early] * 5 + [late] * 6


def test_one_phase_with_the_published_factors_is_the_default():
    factors = build_config(TrainConfig, BASE).loss_weights(3)
    assert (factors.ce, factors.tv, factors.confidence) == (0.1, 0.9, 1.0)


@pytest.mark.parametrize("ends", [[0.5], [0.7, 0.5, 1.0], []])
def test_phases_that_do_not_ascend_to_the_end_are_an_error(ends: list[float]):
    phases = [{"until": end, "ce": 1.0, "tv": 1.0, "confidence": 1.0} for end in ends]
    with pytest.raises(ValueError, match=r"loss_phases must ascend in `until` and end at 1\.0"):
        build_config(TrainConfig, BASE | {"loss_phases": phases})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"precision": "float16"}, "precision = 'float16'"),
        ({"zero_stage": 3}, "zero_stage = 3"),
        ({"expert_parallel_size": 2, "num_workers": 3}, "expert_parallel_size 2 does not divide num_workers 3"),
        ({"expert_parallel_size": 2, "num_workers": 2, "zero_stage": 0}, "expert_parallel_size 2 needs zero_stage 1"),
        (
            {"drafter": {"moe": {"n_routed_expert": 4}}},
            "'drafter.moe.n_routed_expert'; did you mean 'n_routed_experts'",
        ),
        ({"drafter": {"block_sise": 5}}, "unknown key 'drafter.block_sise'; did you mean 'block_size'"),
        ({"drafter": {"architecture": "eagle"}}, "drafter.architecture = 'eagle'"),
    ],
)
def test_what_cannot_be_is_an_error_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build_config(TrainConfig, BASE | changes)
