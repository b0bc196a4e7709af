"""Drafters with experts, hyper-connections and windows behind the engine: lossless, and alone as in company."""

from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.draft_runner import SequentialDraftRunner
from dspark.engine.paged_draft_runner import PagedDraftRunner
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run

MOE = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "experts": {"moe": MOE},
    "hyper_connections": {"hyper_connections": {}},
    "mixed_windows": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "production": {"moe": MOE, "hyper_connections": {}, "sliding_window": 8, "mlp_layer_types": ["dense", "sparse"]},
}
NUM_NEW = 20


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def drafter(request: pytest.FixtureRequest, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_drafter(make_tiny_drafter(tmp_path_factory.mktemp("d"), tiny_target, num_layers=2, **request.param))


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


def counts_of(output: StepOutput) -> tuple[int, int, int] | None:
    done = output.round
    return None if done is None else (done.num_proposed, done.num_accepted, done.num_committed)


def test_greedy_output_is_the_librarys_own(model: Any, drafter: Any, tiny_target: Path):
    expected = greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW)
    engine = make_engine(model, PagedDraftRunner(drafter, num_pages=512, page_size=4), max_batch_tokens=24)
    outputs = run(engine, [request(prompt, str(i), max_tokens=NUM_NEW) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
    assert engine.stats.drafted_tokens > 0


def test_seeded_output_in_company_is_that_alone(model: Any, drafter: Any):
    sampling = SamplingParams(temperature=0.8, seeded="rejection")

    def outputs_of(chosen: list[int]) -> dict[int, list[int]]:
        engine = make_engine(model, PagedDraftRunner(drafter, num_pages=512, page_size=4))
        requests = [request(PROMPTS[i], str(i), max_tokens=NUM_NEW, sampling=sampling, seed=i) for i in chosen]
        outputs = run(engine, requests)
        return {i: ids_of(outputs[str(i)]) for i in chosen}

    together = outputs_of([0, 2, 3, 5])
    for i in (0, 2, 5):
        assert outputs_of([i])[i] == together[i]


def test_rounds_are_those_of_one_request_after_another(model: Any, drafter: Any):
    found = []
    for drafts in (PagedDraftRunner(drafter, num_pages=512, page_size=4), SequentialDraftRunner(drafter)):
        outputs = run(make_engine(model, drafts), [request(p, str(i)) for i, p in enumerate(PROMPTS)])
        found.append({name: [(one.token_ids, counts_of(one)) for one in outputs[name]] for name in outputs})
    assert found[0] == found[1]
