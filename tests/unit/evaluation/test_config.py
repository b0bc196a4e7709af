"""What the evaluate stage's config refuses."""

from pathlib import Path

import pytest

from dspark.config import build_config, load_config
from dspark.evaluation.config import CalibrateConfig, EvaluateConfig, EvaluationMode

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
        ({"time_plain": 1}, r"time_plain 1 needs through 'reference'.*jobs/benchmark\.py"),
        ({"lengths": "scheduled", "verify_length": 2}, "verify_length 2 has no effect"),
        ({"lengths": "scheduled", "through": "reference"}, "needs through 'engine'"),
        ({"concurrency": 3, "through": "reference"}, "concurrency has no effect"),
        ({"engine": {"kv_tokens": 64}, "through": "reference"}, "engine has no effect"),
        ({"engine": {"verify_length": 2}}, r"engine\.verify_length has no effect here; set verify_length"),
        ({"engine": {"max_running_requests": 2}}, "set concurrency"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        build_config(EvaluateConfig, MINIMAL | change)


@pytest.mark.parametrize("name", ["demo/calibrate.yaml", "tiny/calibrate.yaml"])
def test_every_calibrate_file_loads(name):
    assert load_config(CalibrateConfig, CONFIGS / name).num_bins == 20


def test_calibration_measures_whole_blocks_through_the_engine_with_one_mode_per_sample():
    config = build_config(CalibrateConfig, MINIMAL | {"samples_per_prompt": 3, "max_new_tokens": 99, "concurrency": 5})
    measured = config.measurement
    assert (measured.through, measured.lengths, measured.verify_length) == ("engine", "fixed", None)
    assert (measured.max_new_tokens, measured.concurrency, measured.output) == (99, 5, "o")
    modes = [(mode.name, mode.temperature) for mode in measured.modes]
    assert modes == [("greedy", 0), ("sampled", 1), ("sampled~2", 1), ("sampled~3", 1), ("seeded", 1)]
    assert [mode.sampling.seeded for mode in measured.modes] == ["rejection"] * 4 + ["invariant"]


def test_modes_are_the_same_as_before_they_could_be_seeded_and_results_of_them_stay_in_use():
    old = {"name": "sampled", "temperature": 1.0, "top_k": None, "top_p": 1.0}
    assert build_config(EvaluationMode, old).identity() == old
    seeded = build_config(EvaluationMode, old | {"seeded": "invariant"})
    assert seeded.identity() == old | {"seeded": "invariant"}
