"""The worker with a real target and a real, untrained drafter: conversations, comparison, timing, capture."""

import itertools
import pickle
from pathlib import Path

import pytest
import torch

from dspark.config import build_config
from dspark.data.capture import CaptureWorker, PlannedSample
from dspark.data.prompts import Prompt
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.sampling import SamplingParams
from dspark.evaluation import comparison
from dspark.evaluation.accepted_length import speculate
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.planning import open_subject, plan_work
from dspark.evaluation.worker import EvaluationWorker
from dspark.targets import TargetConfig, load_target
from tiny_drafter import make_tiny_drafter
from tiny_target import make_tiny_target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, tiny_target) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target)


def config_for(drafter: Path, **changes) -> EvaluateConfig:
    content = {"drafter": str(drafter), "output": "o", "prompts": [{"path": "p.jsonl"}], "max_new_tokens": 16}
    content["through"] = "reference"
    return build_config(EvaluateConfig, content | changes)


def prompt(number: int, *, num_turns: int = 1, words: int = 4) -> Prompt:
    messages = [{"role": "user", "content": f"question {number} {turn} " + "the " * words} for turn in range(num_turns)]
    return Prompt(f"p{number}", "math", "heldout", messages)


def evaluate(config: EvaluateConfig, prompts: list[Prompt]) -> list[dict]:
    subject = open_subject(config)
    worker = EvaluationWorker(config, subject)
    return [worker.evaluate(item) for item in plan_work(config, subject, prompts)]


@pytest.mark.parametrize("shape", [{}, {"architecture": "dflash"}, {"anchor_fusion": True, "sliding_window": 8}])
def test_greedy_output_is_the_librarys_own_for_forty_prompts(tmp_path, tiny_target, shape):
    config = config_for(make_tiny_drafter(tmp_path, tiny_target, **shape), compare_with_generate=40)
    rows = evaluate(config.with_changes(modes=[{"name": "greedy"}]), [prompt(n) for n in range(40)])
    comparisons = [turn["comparison"] for row in rows for turn in row["turns"]]
    assert len(comparisons) == 40
    assert all(comparison["identical"] for comparison in comparisons)


def test_a_difference_from_the_library_is_reported_with_its_place_and_the_gap_there(drafter, monkeypatch):
    config = config_for(drafter, compare_with_generate=1, modes=[{"name": "greedy"}])
    true_output = evaluate(config, [prompt(1)])[0]["turns"][0]["output_ids"]
    other = [*true_output[:5], true_output[5] ^ 1, *true_output[6:]]
    monkeypatch.setattr(comparison, "generate_greedy", lambda *args, **options: other)
    (found,) = (turn["comparison"] for turn in evaluate(config, [prompt(1)])[0]["turns"])
    assert (found["identical"], found["position"]) == (False, 5)
    assert found["top2_gap"] > 0


def test_every_turn_of_a_conversation_is_run_with_the_answers_before_it(drafter):
    (row,) = evaluate(config_for(drafter, modes=[{"name": "greedy"}]), [prompt(1, num_turns=3)])
    lengths = [turn["num_prompt_tokens"] for turn in row["turns"]]
    assert len(lengths) == 3
    assert all(later > earlier + 10 for earlier, later in itertools.pairwise(lengths))


def test_a_prompt_that_fills_the_context_is_a_row_with_an_error(drafter):
    good, bad = evaluate(config_for(drafter, modes=[{"name": "greedy"}]), [prompt(1), prompt(2, words=600)])
    assert good["error"] is None
    assert "context of 512" in bad["error"]
    assert bad["turns"] == []


def test_only_chosen_prompts_are_timed_without_the_drafter(drafter):
    rows = evaluate(config_for(drafter, time_plain=1, modes=[{"name": "greedy"}]), [prompt(1), prompt(2)])
    timed, untimed = (row["turns"][0]["plain"] for row in rows)
    assert timed["rounds"] == 15
    assert timed["seconds"] > 0
    assert untimed is None


def test_a_sampled_row_depends_on_the_seed_and_not_on_what_ran_before(drafter):
    config = config_for(drafter, modes=[{"name": "sampled", "temperature": 1.0}])
    outputs = [
        {row["id"]: row["turns"][0]["output_ids"] for row in evaluate(c, prompts)}
        for c, prompts in (
            (config, [prompt(1), prompt(2)]),
            (config, [prompt(2), prompt(1)]),
            (config.with_changes(seed=1), [prompt(1), prompt(2)]),
        )
    ]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("mode", [{"name": "greedy"}, {"name": "sampled", "temperature": 1.3}])
def test_padding_rows_of_the_target_are_never_output_or_proposed(tmp_path, mode):
    target = make_tiny_target(tmp_path / "target", padded_rows=700)
    config = config_for(make_tiny_drafter(tmp_path / "drafter", target), modes=[mode], max_new_tokens=40)
    config = config.with_changes(compare_with_generate=int(mode["name"] == "greedy"))
    (row,) = evaluate(config, [prompt(1)])
    assert row["error"] is None
    assert max(row["turns"][0]["output_ids"]) < 320
    assert row["turns"][0]["comparison"] is None or row["turns"][0]["comparison"]["identical"]


class RecordingDrafter:
    """A real drafter whose context is kept, to be looked at."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.block_size, self.target_layer_ids = inner.block_size, inner.target_layer_ids
        self.new_state, self.propose = inner.new_state, inner.propose
        self.seen: list[torch.Tensor] = []

    def extend_context(self, state, target_hidden: torch.Tensor) -> None:
        self.seen.append(target_hidden)
        self._inner.extend_context(state, target_hidden)


@pytest.mark.parametrize(("layer_id", "shift"), [(-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
def test_evaluation_sees_the_features_the_cache_writer_stores(tmp_path, tiny_target, layer_id, shift):
    """Of every layer that can be captured; one layer further up they differ."""
    target_config = TargetConfig(name=str(tiny_target), dtype="float32", device="cpu")
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target, layer_ids=(layer_id,))
    drafter = RecordingDrafter(load_drafter(folder))
    prompt_ids = [1, 50, 60, 70]
    rollout = speculate(
        load_target(target_config),
        drafter,
        prompt_ids,
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=20,
        stop_ids=(),
        vocabulary_size=320,
    )
    tokens = prompt_ids + rollout.output_ids
    sample = PlannedSample("a", "train", "math", tokens, [0] * 4 + [1] * 20)
    writer = CaptureWorker(target_config.model_dump(), (layer_id + shift,), str(tmp_path / "cache"), 4096, 1)
    (stored,) = writer.capture([sample])
    seen = torch.cat(drafter.seen)
    # The cache keeps bfloat16; the evaluation's own numbers are float32.
    same = torch.allclose(seen, stored.hidden[: len(seen)].float(), rtol=1e-2, atol=1e-2)
    assert same == (shift == 0)
    assert len(seen) == len(tokens) - 1


def test_the_drafter_drafts_the_same_from_stored_features_as_from_live_ones(drafter, tiny_target):
    """One call with the whole context and many calls as it grew give the same proposal."""
    model = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    recording = RecordingDrafter(load_drafter(drafter))
    rollout = speculate(
        model,
        recording,
        [1, 50, 60, 70],
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=20,
        stop_ids=(),
        vocabulary_size=320,
    )
    inner = load_drafter(drafter)
    whole, grown = inner.new_state(), inner.new_state()
    inner.extend_context(whole, torch.cat(recording.seen))
    for part in recording.seen:
        inner.extend_context(grown, part)
    proposals = [
        inner.propose(state, rollout.output_ids[-1], max_tokens=4, temperature=0.0) for state in (whole, grown)
    ]
    assert proposals[0].token_ids.tolist() == proposals[1].token_ids.tolist()


def test_an_item_survives_the_way_to_a_worker(drafter):
    config = config_for(drafter)
    (item, *_) = plan_work(config, open_subject(config), [prompt(1)])
    assert pickle.loads(pickle.dumps(item)) == item
