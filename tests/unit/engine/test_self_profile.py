"""An engine measures itself in the sizes it can hold, and is as it was afterwards."""

from pathlib import Path
from typing import Any

import pytest

from dspark.drafters.checkpoint import load_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.loading import paged_runner, target_runner
from dspark.engine.self_profile import CONTEXT_TOKENS, SIZES, profile
from dspark.engine.step_timer import BatchShape, StepTimer
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, VOCABULARY, greedy_continuations, ids_of, load, request, run

FINGERPRINT = {"processor": "this one"}


def parts(target: Path, folder: Path | None, **settings: Any) -> tuple[Any, Any, EngineConfig]:
    config = EngineConfig(**{"page_size": 4, "kv_tokens": 4096, "max_running_requests": 8} | settings)
    drafter = None if folder is None else load_drafter(str(folder), dtype=None, device="cpu")
    drafts = None
    if drafter is not None:
        drafts = paged_runner(drafter, num_pages=config.num_pages, page_size=config.page_size)
    return target_runner(load(target), drafts, config=config, vocabulary_size=VOCABULARY), drafts, config


@pytest.fixture(scope="module")
def folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target))


@pytest.fixture(autouse=True)
def tokens_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny target's steps take as long with eight tokens as with one on a machine that has other work: no curve."""
    measured = StepTimer.verify_s

    def slower(timer: StepTimer, shape: BatchShape, **options: Any) -> float:
        return measured(timer, shape, **options) + 1e-3 * shape.num_tokens

    monkeypatch.setattr(StepTimer, "verify_s", slower)


def test_the_curve_has_the_sizes_that_can_occur(tiny_target: Path, folder: Path) -> None:
    runner, drafts, config = parts(tiny_target, folder, max_batch_tokens=40)
    curve = profile(runner, drafts, config, fingerprint=FINGERPRINT)
    assert curve is not None
    assert curve.batch_tokens == (1, 2, 4, 8, 16, 32)
    assert curve.draft_requests == (1, 2, 4, 8)
    assert curve.fingerprint == FINGERPRINT
    assert curve.context_tokens == CONTEXT_TOKENS
    alone, _, config = parts(tiny_target, None, max_batch_tokens=40)
    curve = profile(alone, None, config, fingerprint=FINGERPRINT)
    assert curve is not None
    assert curve.draft_requests == ()
    assert curve.batch_tokens == (1, 2, 4, 8)  # without a drafter no step has more tokens than requests


def test_memory_for_few_requests_shortens_the_curve_and_for_none_leaves_it_out(tiny_target: Path, folder: Path) -> None:
    runner, drafts, config = parts(tiny_target, folder, kv_tokens=500)
    curve = profile(runner, drafts, config, fingerprint=FINGERPRINT)
    assert curve is not None
    assert curve.draft_requests[-1] < SIZES[3]
    runner, drafts, config = parts(tiny_target, folder, kv_tokens=64)
    assert profile(runner, drafts, config, fingerprint=FINGERPRINT) is None


def test_what_was_measured_leaves_nothing_in_the_answers(tiny_target: Path, folder: Path) -> None:
    expected = greedy_continuations(load(tiny_target), PROMPTS, 24)
    runner, drafts, config = parts(tiny_target, folder)
    curve = profile(runner, drafts, config, fingerprint=FINGERPRINT)
    engine = Engine(runner, drafts, None, config=config.with_changes(min_gain=0.0), curve=curve)
    outputs = run(engine, [request(prompt, str(i)) for i, prompt in enumerate(PROMPTS)])
    assert [ids_of(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
