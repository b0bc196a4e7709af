"""Pairs of runs: shared prompts, alternating order, ratios per pair and their median."""

from collections.abc import Sequence

import pytest

from dspark.config import build_config
from dspark.data.prompts import Prompt, PromptSet, Split
from dspark.evaluation.benchmarking import (
    choose_prompts,
    compare,
    format_pairs,
    key_of,
    measure_pairs,
    pair_keys,
    summarize_pairs,
)
from dspark.evaluation.config import EvaluationMode
from dspark.evaluation.load import Side
from dspark.evaluation.load_config import BenchmarkConfig
from dspark.evaluation.load_run import Answer, LoadRun

GREEDY, SAMPLED = EvaluationMode(name="greedy"), EvaluationMode(name="sampled", temperature=1.0)


def config_of(**changes) -> BenchmarkConfig:
    content = {"drafter": "d", "output": "o", "prompts": [{"path": "p.jsonl"}], "concurrency": [1, 2], "pairs": 3}
    return build_config(BenchmarkConfig, content | changes)


def prompts_of(domain: str, number: int, split: Split = "heldout") -> list[Prompt]:
    return [Prompt(f"{domain}{n}", domain, split, [{"role": "user", "content": "x"}]) for n in range(number)]


def run_of(tokens: int, seconds: float, output_ids: Sequence[int] = (1, 2)) -> LoadRun:
    return LoadRun([Answer(0.0, [0.5, seconds], tokens, "length", list(output_ids))], seconds)


class TwiceAsFast:
    """A load by formula: speculation takes half the time. Remembers what was asked of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.asked: list[tuple[Side, int, int, int]] = []

    def run(self, side: Side, mode: EvaluationMode, *, concurrency: int, num_requests: int, max_tokens: int) -> LoadRun:
        self.asked.append((side, concurrency, num_requests, max_tokens))
        return run_of(num_requests * max_tokens, 2.0 if side == "speculative" else 4.0)


def test_prompts_of_all_domains_come_in_turn_and_none_that_was_trained_on():
    everything = PromptSet(prompts_of("math/a", 3) + prompts_of("code", 2) + prompts_of("chat", 4, "train"))
    chosen = choose_prompts(everything, config_of())
    assert [prompt.domain for prompt in chosen] == ["code", "math/a", "code", "math/a", "math/a"]
    assert len({prompt.id for prompt in chosen}) == 5


def test_only_the_domains_asked_for_are_used_in_an_order_the_seed_decides():
    everything = PromptSet(prompts_of("math", 9) + prompts_of("code", 9))
    first, again, other = (
        [prompt.id for prompt in choose_prompts(everything, config_of(domains=["math"], seed=seed))]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert sorted(first) == sorted(other) == [f"math{n}" for n in range(9)]


@pytest.mark.parametrize(("domains", "split"), [(["poems"], "heldout"), ([], "train")])
def test_without_held_out_prompts_there_is_nothing_to_measure(domains, split):
    with pytest.raises(ValueError, match="no held-out prompts"):
        choose_prompts(PromptSet(prompts_of("math", 2, split)), config_of(domains=domains))


def test_the_side_that_goes_first_changes_from_pair_to_pair():
    load, config = TwiceAsFast(), config_of(concurrency=[2])
    rows = list(measure_pairs(load, config, pair_keys(config)))
    assert [row["order"][0] for row in rows] == ["plain", "speculative", "plain"]
    warm_up, counted = load.asked[:2], load.asked[2:]
    assert [side for side, *_ in counted] == ["plain", "speculative", "speculative", "plain", "plain", "speculative"]
    assert all(asked[1:] == (2, 4, 256) for asked in counted)
    assert [asked[3] for asked in warm_up] == [32, 32]


def test_every_setting_is_measured_once_before_any_is_measured_again():
    config = config_of(modes=[GREEDY.model_dump(), SAMPLED.model_dump()], pairs=2)
    keys = pair_keys(config)
    assert keys[:4] == [("greedy", 1, 0), ("greedy", 2, 0), ("sampled", 1, 0), ("sampled", 2, 0)]
    rows = list(measure_pairs(TwiceAsFast(), config, keys[2:5]))
    assert [key_of(row) for row in rows] == keys[2:5]


def test_a_pair_is_the_ratio_of_throughputs_and_says_whether_outputs_agree():
    pair = compare(run_of(100, 4.0), run_of(90, 2.0), GREEDY)
    assert pair["ratio"] == pytest.approx(45 / 25)
    assert pair["identical"] == 1
    assert pair["full_load_ratio"] is None
    assert compare(run_of(100, 4.0), run_of(90, 2.0, [1, 3]), GREEDY)["identical"] == 0
    assert compare(run_of(100, 4.0), run_of(100, 2.0), SAMPLED)["identical"] is None
    assert compare(run_of(100, 4.0, []), run_of(100, 2.0, []), GREEDY)["identical"] is None


def test_the_summary_is_medians_over_pairs_and_the_range_of_ratios():
    speeds = [(4.0, 2.0), (4.0, 1.0), (6.0, 2.0)]  # seconds for 100 tokens, plain and speculative
    rows = [
        {"mode": "greedy", "concurrency": 16, "pair": n} | compare(run_of(100, p), run_of(100, s), GREEDY)
        for n, (p, s) in enumerate(speeds)
    ]
    figures = summarize_pairs(rows)["greedy"]["16"]
    assert (figures["ratio"]["median"], figures["ratio"]["low"], figures["ratio"]["high"]) == (3.0, 2.0, 4.0)
    assert figures["plain"]["tokens_per_s"] == 25.0
    assert figures["speculative"]["tokens_per_s"] == 50.0
    assert figures["speculative"]["first_token_ms"]["p50"] == 500.0
    assert (figures["identical"], figures["compared"], figures["pairs"]) == (3, 3, 3)
    assert figures["full_load_ratio"]["median"] is None


def test_a_figure_that_some_pairs_lack_is_the_median_of_the_others():
    short = LoadRun([Answer(0.0, [1.0], 1, "stop", [1])], 1.0)
    rows = [{"mode": "m", "concurrency": 1} | compare(run, run, GREEDY) for run in (short, run_of(5, 2.5))]
    assert summarize_pairs(rows)["m"]["1"]["plain"]["token_ms"]["p50"] == 500.0


def test_the_table_shows_each_setting_and_a_dash_for_what_is_not_known():
    rows = list(measure_pairs(TwiceAsFast(), config_of(), pair_keys(config_of())))
    table = format_pairs(summarize_pairs(rows)).splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [["greedy", "1", "3"], ["greedy", "2", "3"]]
    assert "2.00" in table[1]
    assert " - " in table[1]
