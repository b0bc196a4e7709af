"""What the evaluate stage's config refuses."""

from pathlib import Path

import pytest

from dspark.config import build_config, load_config
from dspark.evaluation.config import EvaluateConfig

CONFIGS = Path(__file__).parents[3] / "configs"
MINIMAL = {"drafter": "d", "output": "o", "prompts": [{"path": "p.jsonl"}]}


@pytest.mark.parametrize("name", ["demo/evaluate.yaml", "demo/evaluate_dflash.yaml", "tiny/evaluate.yaml"])
def test_every_file_loads(name):
    assert {mode.name for mode in load_config(EvaluateConfig, CONFIGS / name).modes} == {"greedy", "sampled"}


def test_both_demo_files_measure_the_same_thing():
    ours, theirs = (
        load_config(EvaluateConfig, CONFIGS / "demo" / f"{n}.yaml") for n in ("evaluate", "evaluate_dflash")
    )
    own = {"drafter", "output", "tracking"}
    assert ours.model_dump(exclude=own) == theirs.model_dump(exclude=own)


def test_greedy_and_sampled_are_measured_by_default():
    config = build_config(EvaluateConfig, MINIMAL)
    assert [(mode.name, mode.temperature, mode.top_p) for mode in config.modes] == [("greedy", 0, 1), ("sampled", 1, 1)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompts": []}, "nothing to measure"),
        ({"modes": [{"name": "a"}, {"name": "a"}]}, "one name each"),
        ({"modes": [{"name": "s", "temperature": 1.0}], "compare_with_generate": 2}, "no effect"),
        ({"tasks": {"gsm9k": "x.jsonl"}}, "no benchmark"),
        ({"verify_lenght": 3}, "did you mean 'verify_length'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        build_config(EvaluateConfig, MINIMAL | change)
