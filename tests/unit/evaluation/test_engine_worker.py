"""Through the engine, many conversations at once, the same is measured as through the reference loop."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dspark.chat import ChatConfig, render_prompt
from dspark.config import build_config
from dspark.data.prompts import Prompt
from dspark.drafters.base import BlockBatch
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.engine.drafter_folder import COST_CURVE
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.engine.sampling import SamplingParams
from dspark.errors import MissingInput
from dspark.evaluation.accepted_length import decode_plain
from dspark.evaluation.config import EvaluateConfig
from dspark.evaluation.engine_worker import EngineWorker, engine_config
from dspark.evaluation.planning import open_subject, plan_work
from dspark.evaluation.summary import summarize
from dspark.evaluation.worker import EvaluationWorker
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint
from dspark.targets import TargetConfig, load_target, load_tokenizer
from tiny_drafter import make_tiny_drafter
from tiny_target import make_tiny_target

GREEDY = {"modes": [{"name": "greedy"}]}
SAMPLED = {"modes": [{"name": "sampled", "temperature": 1.0}]}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, tiny_target) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target)


def config_for(drafter: Path, **changes) -> EvaluateConfig:
    content = {"drafter": str(drafter), "output": "o", "prompts": [{"path": "p.jsonl"}], "max_new_tokens": 24}
    return build_config(EvaluateConfig, content | changes)


def prompt(number: int, *, num_turns: int = 1, words: int = 4) -> Prompt:
    messages = [{"role": "user", "content": f"question {number} {turn} " + "the " * words} for turn in range(num_turns)]
    return Prompt(f"p{number}", "math", "heldout", messages)


def through_engine(config: EvaluateConfig, prompts: list[Prompt]) -> list[dict]:
    """Rows in the order of the prompts; the worker is kept as full as the job keeps it."""
    subject = open_subject(config)
    worker = EngineWorker(config, subject)
    items = plan_work(config, subject, prompts)
    rows = worker.advance(items[: config.concurrency])
    num_given = config.concurrency
    while len(rows) < len(items):
        more = items[num_given : len(rows) + config.concurrency]
        num_given += len(more)
        found = worker.advance(more)
        assert found, "items are left but no row comes"
        rows += found
    order = {(item.prompt.id, item.mode.name): number for number, item in enumerate(items)}
    return sorted(rows, key=lambda row: order[row["id"], row["mode"]])


def through_reference(config: EvaluateConfig, prompts: list[Prompt]) -> list[dict]:
    subject = open_subject(config)
    return EvaluationWorker(config, subject).advance(plan_work(config, subject, prompts))


def rounds_of(rows: list[dict]) -> list[list[tuple[int, int, int]]]:
    keys = ("num_proposed", "num_accepted", "num_committed")
    return [[tuple(r[key] for key in keys) for r in turn["rounds"]] for row in rows for turn in row["turns"]]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"architecture": "dflash"},
        {"anchor_fusion": True, "sliding_window": 8, "draft_vocab_size": 310},
        {
            "sliding_window": 16,
            "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            "hyper_connections": {"hc_mult": 4},
        },
    ],
    ids=["dspark", "dflash", "extensions", "production"],
)
def test_greedy_rounds_are_exactly_those_of_the_reference_loop(tmp_path, tiny_target, shape):
    folder = make_tiny_drafter(tmp_path, tiny_target, **shape)
    learn_by_heart(folder, tiny_target, [prompt(n) for n in range(8)])
    prompts = [prompt(n, num_turns=1 + (n % 3 == 0), words=4 if n < 8 else n) for n in range(12)]
    config = config_for(folder, concurrency=5, **GREEDY)
    ours, theirs = through_engine(config, prompts), through_reference(config, prompts)
    assert rounds_of(ours) == rounds_of(theirs)
    assert {accepted for turn in rounds_of(ours) for _, accepted, _ in turn} >= {0, 1, 4}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for turn, expected in zip(mine["turns"], other["turns"], strict=True):
            assert turn.keys() == expected.keys()
            for key in ("output_ids", "finish_reason", "num_prompt_tokens"):
                assert turn[key] == expected[key]
            for r, e in zip(turn["rounds"], expected["rounds"], strict=True):
                # One pass over many requests adds in another order: float32's last digits.
                assert r["confidence_logits"] == pytest.approx(e["confidence_logits"], abs=1e-3)


def test_sampled_accepted_length_lies_with_that_of_the_reference_loop(tmp_path, tiny_target):
    folder = make_tiny_drafter(tmp_path, tiny_target)
    learn_by_heart(folder, tiny_target, [prompt(n) for n in range(8)])
    config = config_for(folder, modes=[{"name": "sampled", "temperature": 0.1}])
    prompts = [Prompt(f"p{n}-{k}", "math", "heldout", prompt(n).messages) for n in range(8) for k in range(5)]
    found = []
    for through in (through_engine, through_reference):
        overall = summarize(through(config, prompts), config.modes, seed=0)["modes"]["sampled"]["overall"]
        found.append((overall["accepted_length"], overall["accepted_length_interval"]))
    (ours, (low, high)), (theirs, (their_low, their_high)) = found
    assert min(low, their_low) > 1.1, "a drafter that is never accepted says nothing"
    assert max(low, their_low) <= min(high, their_high), f"{ours} and {theirs} differ by more than chance"


def test_a_sampled_row_depends_on_its_seed_and_not_on_the_rows_beside_it(drafter):
    config = config_for(drafter, **SAMPLED)
    prompts = [prompt(n, words=3 * n) for n in range(8)]
    shuffled = random.Random(0).sample(prompts, len(prompts))
    outputs = [
        {row["id"]: [turn["output_ids"] for turn in row["turns"]] for row in through_engine(c, p)}
        for c, p in (
            (config, prompts),
            (config.with_changes(engine={"max_batch_tokens": 50}), prompts),  # they start, and end, one after another
            (config.with_changes(concurrency=1), prompts),
            (config.with_changes(concurrency=3), shuffled),
            (config.with_changes(seed=1), prompts),
        )
    ]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3] != outputs[4]


def test_rows_come_as_conversations_end_and_nothing_is_left_behind(drafter):
    config = config_for(drafter, **GREEDY)
    subject = open_subject(config)
    worker = EngineWorker(config, subject)
    first = worker.advance(plan_work(config, subject, [prompt(1), prompt(2, num_turns=3), prompt(3)]))
    assert 0 < len(first) < 3
    rest = worker.advance([])
    while len(first) + len(rest) < 3:
        rest += worker.advance([])
    assert [row["id"] for row in rest][-1] == "p2"
    assert worker.advance([]) == []
    engine = worker._loaded.engine
    assert (engine.num_running, engine.num_waiting, engine.num_free_pages) == (0, 0, engine.num_pages)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({}, "context of 512"), ({"engine": {"kv_tokens": 128}}, "raise kv_tokens")],
    ids=["context", "memory"],
)
def test_a_prompt_that_can_never_run_is_a_row_with_an_error_and_the_others_go_on(drafter, change, reason):
    words = 600 if not change else 200
    good, bad, other = through_engine(
        config_for(drafter, **GREEDY, **change), [prompt(1), prompt(2, words=words), prompt(3)]
    )
    assert good["error"] is None
    assert other["error"] is None
    assert reason in bad["error"]
    assert bad["turns"] == []


def test_greedy_output_is_the_librarys_own_while_other_requests_are_under_way(drafter):
    config = config_for(drafter, compare_with_generate=20, concurrency=6, **GREEDY)
    rows = through_engine(config, [prompt(n, words=n) for n in range(24)])
    comparisons = [turn["comparison"] for row in rows for turn in row["turns"]]
    assert [comparison is not None for comparison in comparisons] == [n < 20 for n in range(24)]
    assert all(comparison["identical"] for comparison in comparisons[:20])


def test_padding_rows_of_the_target_are_never_output(tmp_path):
    target = make_tiny_target(tmp_path / "target", padded_rows=700)
    config = config_for(make_tiny_drafter(tmp_path / "drafter", target), compare_with_generate=2)
    for row in through_engine(config, [prompt(1), prompt(2)]):
        assert max(row["turns"][0]["output_ids"]) < 320
        assert row["turns"][0]["comparison"] is None or row["turns"][0]["comparison"]["identical"]


@pytest.mark.parametrize(("length", "expected"), [(None, 4), (2, 2), (0, 0)])
def test_a_fixed_length_is_the_length_of_every_round_that_has_room(drafter, length, expected):
    (row,) = through_engine(config_for(drafter, verify_length=length, **GREEDY), [prompt(1)])
    proposed = [r["num_proposed"] for r in row["turns"][0]["rounds"]]
    assert max(proposed) == expected
    assert set(proposed[: -1 - expected]) == {expected}


def test_scheduled_lengths_follow_the_cost_curve_and_leave_greedy_output_alone(tmp_path, tiny_target):
    folder = make_tiny_drafter(tmp_path, tiny_target)
    fixed = config_for(folder, **GREEDY)
    save_curve(folder, tiny_target, verify_s=(0.01, 0.9))  # every further token costs as much as a whole step
    subject = open_subject(config := fixed.with_changes(lengths="scheduled"))
    assert engine_config(config, subject).verify_length is None
    prompts = [prompt(n) for n in range(4)]
    dear, whole = through_engine(config, prompts), through_engine(fixed, prompts)
    assert [row["turns"][0]["output_ids"] for row in dear] == [row["turns"][0]["output_ids"] for row in whole]
    assert (
        sum(r[0] for turn in rounds_of(dear) for r in turn) < sum(r[0] for turn in rounds_of(whole) for r in turn) / 4
    )


def test_a_cost_curve_of_other_hardware_is_named_as_what_is_missing(tmp_path, tiny_target):
    folder = make_tiny_drafter(tmp_path, tiny_target)
    save_curve(folder, tiny_target, verify_s=(0.01, 0.9), num_threads=64)
    with pytest.raises(MissingInput, match=r"num_threads is 64.*jobs/profile_engine\.py"):
        through_engine(config_for(folder, lengths="scheduled", **GREEDY), [prompt(1)])


def learn_by_heart(folder: Path, target_folder: Path, prompts: list[Prompt], *, steps: int = 30) -> None:
    """Train the drafter in the folder on the target's own greedy answers to prompts of one length."""
    target_config = TargetConfig(name=str(target_folder), dtype="float32", device="cpu")
    target, tokenizer = load_target(target_config), load_tokenizer(target_config)
    options = {"sampling": SamplingParams(temperature=0.0), "stop_ids": (), "vocabulary_size": 320}
    prompt_ids = [render_prompt(tokenizer, p.messages, ChatConfig()) for p in prompts]
    answers = [decode_plain(target, ids, max_new_tokens=24, **options).output_ids for ids in prompt_ids]
    ids = torch.tensor([ids + answer for ids, answer in zip(prompt_ids, answers, strict=True)])
    drafter = load_drafter(folder, trainable=True)
    with torch.no_grad(), HiddenStateCapture(target, drafter.target_layer_ids) as capture:
        target(ids)
        hidden = capture.hidden()
    anchors = torch.arange(len(prompt_ids[0]), ids.shape[1] - drafter.block_size).expand(len(ids), -1)
    batch = BlockBatch(ids, hidden, anchors, torch.ones_like(anchors, dtype=torch.bool))
    places = anchors[..., None] + 1 + torch.arange(drafter.block_size)
    labels = ids.gather(1, places.flatten(1)).view_as(places)
    slots = labels < drafter.config.draft_vocab_size
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(drafter(batch, slots).logits, labels[slots])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_drafter(drafter, folder, dtype=torch.float32)


def save_curve(folder: Path, target: Path, *, verify_s: tuple[float, float], num_threads: int = 1) -> None:
    fingerprint = hardware_fingerprint("cpu", "float32", num_threads, str(target))
    CostCurve((1, 90), verify_s, (1,), (0.001,), (), fingerprint).save(folder / COST_CURVE)
