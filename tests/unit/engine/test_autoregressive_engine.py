"""EAGLE-3 and MTP through the engine: lossless, the same in company as alone, the same as from the whole context."""

from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.draft_runner import DraftRunner, SequentialDraftRunner
from dspark.engine.loading import load_engine, paged_runner
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run
from tiny_mtp_target import write_mtp_target
from tiny_target import tiny_tokenizer

NUM_NEW = 12
CHOSEN = PROMPTS[:5]
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"architecture": "eagle3"},
    "eagle3_reduced_vocabulary": {"architecture": "eagle3", "draft_vocab_size": 200},
    "mtp_one_module": {"architecture": "mtp", "layer_ids": (4,), "hidden_state": "before_norm"},
    "mtp_modules": {"architecture": "mtp", "layer_ids": (5,), "num_modules": 4},
}


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def continuations(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), CHOSEN, NUM_NEW)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Any:
    return load_drafter(make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target, **request.param))


def paged(drafter: Any) -> DraftRunner:
    return paged_runner(drafter, num_pages=512, page_size=4)


def outputs_of(model: Any, drafts: DraftRunner, *, prompts: Any = CHOSEN, **options: Any) -> list[list[StepOutput]]:
    settings = {name: options.pop(name) for name in ("verify_length", "max_running_requests") if name in options}
    engine = make_engine(model, drafts, **settings)
    options = {"max_tokens": NUM_NEW} | options
    outputs = run(engine, [request(p, str(i), **options) for i, p in enumerate(prompts)])
    return [outputs[str(i)] for i in range(len(prompts))]


def rounds_of(outputs: list[list[StepOutput]]) -> list[list[Any]]:
    return [[(o.round.num_proposed, o.round.num_accepted) for o in one if o.round is not None] for one in outputs]


@pytest.mark.parametrize(("concurrency", "length"), [(1, 4), (8, 2)])
def test_greedy_output_is_the_librarys_own(model, continuations, drafter, concurrency, length):
    outputs = outputs_of(model, paged(drafter), verify_length=length, max_running_requests=concurrency)
    assert [ids_of(one) for one in outputs] == continuations


def test_rounds_in_company_are_those_of_a_drafter_that_keeps_nothing(model, drafter):
    options = {"prompts": PROMPTS, "max_tokens": 24}
    found = outputs_of(model, paged(drafter), **options)
    twin = outputs_of(model, SequentialDraftRunner(drafter), max_running_requests=1, **options)
    assert rounds_of(found) == rounds_of(twin)
    assert sum(accepted for one in rounds_of(found) for _, accepted in one) > 0


def test_seeded_requests_sample_in_company_what_they_sample_alone(model, drafter):
    options = {"sampling": SamplingParams(temperature=0.8, seeded="rejection"), "seed": 5}
    together = outputs_of(model, paged(drafter), **options)
    alone = outputs_of(model, paged(drafter), max_running_requests=1, **options)
    assert [ids_of(one) for one in together] == [ids_of(one) for one in alone]


@pytest.mark.parametrize("kind", ["glm", "glm, two modules"])
def test_a_targets_own_modules_are_served_by_name(tmp_path: Path, kind: str):
    model = write_mtp_target(tmp_path, kind, vocab_size=320)
    tiny_tokenizer().save_pretrained(tmp_path)
    expected = greedy_continuations(model, CHOSEN, NUM_NEW)
    target = TargetConfig(name=str(tmp_path), dtype="float32", device="cpu")
    config = EngineConfig(page_size=4, kv_tokens=512, verify_length=2)
    engine = load_engine(target, "mtp", config=config).engine
    assert engine.drafter_kind == "mtp"
    assert engine.block_size == (2 if "two" in kind else 5)
    outputs = run(engine, [request(p, str(i), max_tokens=NUM_NEW) for i, p in enumerate(CHOSEN)])
    assert [ids_of(outputs[str(i)]) for i in range(len(CHOSEN))] == expected
    assert engine.stats.drafted_tokens > 0


def test_a_target_that_keeps_a_recurrent_state_is_refused_by_name(tmp_path: Path):
    write_mtp_target(tmp_path, "qwen", vocab_size=320)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = TargetConfig(name=str(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM keeps a state .*LinearAttention"):
        load_engine(target, "mtp", config=EngineConfig(page_size=4, kv_tokens=512, verify_length=2))
