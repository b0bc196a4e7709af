"""From answers to captured samples: what is kept, what is counted, and that padding changes nothing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dspark.data.capture import (
    CacheConfig,
    CachePlan,
    CaptureWorker,
    PlannedSample,
    default_layer_ids,
    describe_head,
    plan_cache,
    resolve_layer_ids,
)
from dspark.data.target_cache import TargetCache, TargetCacheWriter, bytes_of
from dspark.engine.hidden_states import HiddenStateCapture
from dspark.targets import TargetConfig, load_target
from tiny_families import FAMILIES, make_family_target
from tiny_target import make_tiny_target

LAYER_IDS = (0, 2)


class Answers:
    """Rows as `AnswerSet.rows` gives them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def rows(self) -> list[dict[str, Any]]:
        return self._rows


def answer(name: str, length: int = 40, *, prompt: int = 10, status: str = "ok") -> dict[str, Any]:
    turn = {"prompt_ids": list(range(3, 3 + prompt)), "output_ids": [5] * (length - prompt), "finish_reason": "stop"}
    turns = [turn] if status == "ok" else []
    return {"id": name, "split": "train", "domain": "chat", "status": status, "turns": turns}


def plan(rows: list[dict[str, Any]], **changes: Any) -> CachePlan:
    config = CacheConfig(**{"answers": "", "output": "", "min_loss_tokens": 14} | changes)
    return plan_cache(Answers(rows), config, hidden_size=8, num_layers=2)  # type: ignore[arg-type]


def kept_ids(found: CachePlan) -> list[str]:
    return [sample.id for shard in found.shards for sample in shard]


def planned(name: str, length: int, *, vocabulary: int = 300) -> PlannedSample:
    ids = torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    mask = [0] * (length // 3) + [1] * (length - length // 3)
    return PlannedSample(name, "train", "chat", ids, mask)


def worker_for(folder: Path, output: Path, *, dtype: str = "float32", batch_tokens: int = 1000) -> CaptureWorker:
    target = TargetConfig(name=str(folder), dtype=dtype, device="cpu")  # type: ignore[arg-type]
    return CaptureWorker(target.model_dump(), LAYER_IDS, str(output), batch_tokens, 1)


def test_the_default_layers_are_five_evenly_spaced():
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(30) == (1, 7, 14, 20, 27) or default_layer_ids(30) == (1, 8, 14, 20, 27)


@pytest.mark.parametrize("num_target_layers", range(3, 70))
def test_the_default_layers_are_ones_that_the_target_can_give(num_target_layers: int):
    config = CacheConfig(answers="", output="")
    assert resolve_layer_ids(config, num_target_layers) == default_layer_ids(num_target_layers)


def test_the_last_layer_is_refused():
    with pytest.raises(ValueError, match="layer 3 is not below the last layer"):
        resolve_layer_ids(CacheConfig(answers="", output="", target_layer_ids=(1, 3)), 4)


@pytest.mark.parametrize(
    ("layer_ids", "final_states", "expected"),
    [
        ((0, 2), ("after_norm",), (0, 2, 5)),
        ((), ("after_norm", "before_norm"), (4, 5)),
        ((-1,), (), (-1,)),
    ],
)
def test_states_at_the_final_norm_come_behind_the_layers(layer_ids, final_states, expected):
    config = CacheConfig(answers="", output="", target_layer_ids=layer_ids, final_states=final_states)
    assert resolve_layer_ids(config, 4) == expected


@pytest.mark.parametrize(("layer_ids", "message"), [((4,), "set final_states"), ((), "not empty")])
def test_states_at_the_final_norm_have_a_key_of_their_own(layer_ids, message):
    with pytest.raises(ValueError, match=message):
        resolve_layer_ids(CacheConfig(answers="", output="", target_layer_ids=layer_ids), 4)


def test_rows_in_are_rows_kept_and_rows_rejected_by_reason():
    rows = [answer("a"), answer("b", status="error"), answer("c", status="empty"), answer("d", 20), answer("e")]
    found = plan(rows)
    assert kept_ids(found) == ["a", "e"]
    assert found.rejected == {"answer error": 1, "answer empty": 1, "under 14 supervised tokens": 1}
    assert found.rows_in == found.rows_kept + sum(found.rejected.values()) == 5


def test_a_byte_budget_keeps_whole_answers_and_counts_the_rest():
    rows = [answer(str(number), 30 + number) for number in range(20)]
    everything = plan(rows)
    found = plan(rows, max_cache_bytes=everything.projected_bytes // 2)
    assert 0 < found.rows_kept < 20
    assert found.projected_bytes <= everything.projected_bytes // 2
    assert found.rejected == {"over max_cache_bytes": 20 - found.rows_kept}
    lengths = {
        name: len(row["turns"][0]["output_ids"]) + 10 for name, row in zip(map(str, range(20)), rows, strict=True)
    }
    assert all(len(one.input_ids) == lengths[one.id] for shard in found.shards for one in shard)


def test_the_budget_draws_a_seeded_sample_in_the_first_order():
    rows = [answer(str(number)) for number in range(30)]
    half = plan(rows).projected_bytes // 2
    first, again, other = (kept_ids(plan(rows, max_cache_bytes=half, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert first == sorted(first, key=int) != [str(number) for number in range(len(first))]


def test_projected_bytes_are_those_of_the_payload():
    found = plan([answer("a", 40), answer("b", 50)])
    assert (found.num_tokens, found.num_supervised) == (90, 70)
    assert found.projected_bytes == bytes_of(90, 70, hidden_size=8, num_layers=2)


def test_shards_hold_at_most_their_tokens_or_one_sample():
    rows = [answer(str(number), length) for number, length in enumerate([40, 40, 40, 200, 30, 30])]
    found = plan(rows, shard_tokens=100)
    assert [[len(one.input_ids) for one in shard] for shard in found.shards] == [[40, 40], [40], [200], [30, 30]]


def test_a_long_answer_is_cut_and_its_mask_with_it():
    [[one]] = plan([answer("a", 100)], max_length=50).shards
    assert len(one.input_ids) == len(one.loss_mask) == 50
    assert one.loss_mask == [0] * 10 + [1] * 40


def test_a_conversation_whose_history_was_rewritten_becomes_two_samples():
    row = answer("a")
    row["turns"].append({"prompt_ids": [9, 9, 9], "output_ids": [7] * 20, "finish_reason": "stop"})
    found = plan([row])
    assert kept_ids(found) == ["a", "a#1"]
    assert found.rows_kept == 1


@pytest.mark.parametrize("batch_tokens", [100, 5000])
def test_padded_batches_give_what_single_samples_give(tiny_target: Path, tmp_path: Path, batch_tokens: int):
    worker = worker_for(tiny_target, tmp_path, batch_tokens=batch_tokens)
    samples = [planned("short", 5), planned("long", 200), planned("middle", 37)]
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    found = {one.id: one for one in worker.capture(samples)}
    assert found.keys() == {"short", "long", "middle"}
    for one in samples:
        input_ids = torch.tensor([one.input_ids])
        supervised = torch.tensor(one.loss_mask).bool()
        with HiddenStateCapture(target, LAYER_IDS) as capture:
            last_hidden = target.model(input_ids).last_hidden_state[0, supervised]
            hidden = capture.hidden()[0]
        cached = found[one.id]
        assert cached.input_ids.tolist() == one.input_ids
        assert cached.loss_mask.tolist() == one.loss_mask
        # Stored in bf16: 8 bits, so half a unit in the last place is 2^-9 of the value.
        torch.testing.assert_close(cached.hidden.float(), hidden, atol=1e-5, rtol=2**-8)
        torch.testing.assert_close(cached.last_hidden.float(), last_hidden, atol=1e-5, rtol=2**-8)
        # log Z belongs to the stored state, so that the probabilities derived from both sum to 1.
        exact = target.lm_head(cached.last_hidden.float()).logsumexp(dim=-1)
        torch.testing.assert_close(cached.log_z, exact, atol=1e-4, rtol=0)
        torch.testing.assert_close(cached.log_z, target.lm_head(last_hidden).logsumexp(dim=-1), atol=2e-2, rtol=0)


def test_log_z_leaves_padding_rows_of_the_head_out(tmp_path: Path):
    folder = make_tiny_target(tmp_path / "target", padded_rows=7, tied=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        model.lm_head.weight[320:] = 50.0 * model.lm_head.weight[:7]
    model.save_pretrained(folder)
    [found] = worker_for(folder, tmp_path / "cache").capture([planned("a", 30)])
    logits = model.lm_head(found.last_hidden.float())
    torch.testing.assert_close(found.log_z, logits[:, :320].logsumexp(dim=-1), atol=1e-4, rtol=0)
    assert not torch.allclose(found.log_z, logits.logsumexp(dim=-1), atol=0.1)


def test_probabilities_from_stored_states_and_log_z_sum_to_1_in_bf16(tiny_target: Path, tmp_path: Path):
    worker = worker_for(tiny_target, tmp_path, dtype="bfloat16")
    # The tiny target's own logits are small; sharper ones show what rounding them would do.
    worker._model.model.norm.weight.mul_(8.0)
    target = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    [found] = worker.capture([planned("a", 60)])
    logits = found.last_hidden.float() @ target.lm_head.weight.bfloat16().float().T
    total = (logits - found.log_z[:, None]).exp().sum(dim=-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-3, rtol=0)


def test_a_worker_writes_the_planned_shard_and_counts_it(tiny_target: Path, tmp_path: Path):
    worker = worker_for(tiny_target, tmp_path)
    TargetCacheWriter(tmp_path).begin({}, fresh=False)
    rows = [asdict(planned("a", 30)), asdict(planned("b", 20))]
    counts = worker({"shard": [0], "samples": [json.dumps(rows)]})
    assert counts == {"shard": [0], "samples": [2], "tokens": [50], "non_finite": [0]}
    TargetCacheWriter(tmp_path).finish({}, 1, {})
    cache = TargetCache(tmp_path)
    assert [entry.id for entry in cache.entries] == ["a", "b"]
    assert cache.load(1).input_ids.tolist() == rows[1]["input_ids"]


@pytest.mark.parametrize("broken", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_samples_with_states_that_are_not_finite_are_left_out_and_counted(tmp_path: Path, broken: str):
    folder = make_tiny_target(tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        model.get_parameter(broken)[...] = torch.inf
    model.save_pretrained(folder)
    output = tmp_path / "cache"
    worker = worker_for(folder, output)
    TargetCacheWriter(output).begin({}, fresh=False)
    rows = [asdict(planned("a", 30)), asdict(planned("b", 20))]
    counts = worker({"shard": [0], "samples": [json.dumps(rows)]})
    assert (counts["samples"], counts["non_finite"]) == ([0], [2])
    TargetCacheWriter(output).finish({}, 1, {})
    assert len(TargetCache(output)) == 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_z_is_that_of_the_targets_own_logits_whatever_its_head_does(tmp_path: Path, kind: str):
    folder = make_family_target(tmp_path / "target", kind)
    model = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    one = planned("a", 30)
    [found] = worker_for(folder, tmp_path / "cache").capture([one])
    own = model(torch.tensor([one.input_ids])).logits[0, torch.tensor(one.loss_mask).bool(), :320]
    # The stored state is rounded to bf16, hence the tolerance; without the transform it would be off by far more.
    torch.testing.assert_close(found.log_z, own.logsumexp(dim=-1), atol=0.05, rtol=0)
    assert own.std() > 0.2


@pytest.mark.parametrize(("name", "value"), [("final_logit_softcapping", 0.1), ("logits_scaling", 8.0)])
def test_a_head_that_is_not_what_its_config_says_is_refused(tiny_target: Path, name: str, value: float):
    model = load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))
    assert describe_head(model, 300).valid_vocab_size == 300
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: its logits are not those of TargetHead\(.* not supported"):
        describe_head(model, 320)


def test_a_head_in_bf16_is_recognised_too(tiny_target: Path):
    model = load_target(TargetConfig(name=str(tiny_target), dtype="bfloat16", device="cpu"))
    assert describe_head(model, 320).is_linear
