"""Both sides of a draft link from a target and a drafter's folder: what does not fit does not start, or is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_pool import DirectLink
from dspark.engine.config import EngineConfig
from dspark.engine.draft_loading import load_draft_server
from dspark.engine.draft_server import DraftServerConfig
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.remote_draft_runner import RemoteDraftRunner
from dspark.engine.remote_draft_state import RemoteDraftConfig
from dspark.engine.remote_drafts import RemoteDrafts
from dspark.errors import Mismatch, MissingInput
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint
from dspark.speculation.draft_supply import drafter_of
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, ids_of, request, run
from tiny_target import make_tiny_target

ENGINE = EngineConfig(page_size=4, kv_tokens=1024, verify_length=3)
SERVER = DraftServerConfig(page_size=4, kv_tokens=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return make_tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target)


def target_of(folder: Path, dtype: Any = "float32") -> TargetConfig:
    return TargetConfig(name=str(folder), dtype=dtype, device="cpu")


def remote_engine(target: TargetConfig, drafter: Path, link: DirectLink, **settings: Any) -> LoadedEngine:
    remote = RemoteDrafts(link, "engine", RemoteDraftConfig(**settings))
    return load_engine(target, str(drafter), config=ENGINE, remote=remote)


def answers(engine: Any) -> list[list[int]]:
    outputs = run(engine, [request(p, str(i), max_tokens=12) for i, p in enumerate(PROMPTS[:4])])
    return [ids_of(outputs[str(i)]) for i in range(4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_a_loaded_engine_and_a_loaded_server_draft_as_an_engine_alone(tiny_target, folder, dtype):
    target = target_of(tiny_target, dtype)
    link = DirectLink(lambda: load_draft_server(target, str(folder), config=SERVER))
    loaded = remote_engine(target, folder, link, deadline_s=5.0)
    alone = load_engine(target, str(folder), config=ENGINE)
    assert isinstance(loaded.engine._drafts, RemoteDraftRunner)
    assert answers(loaded.engine) == answers(alone.engine)
    assert loaded.engine.stats.rounds.accepted == alone.engine.stats.rounds.accepted
    assert loaded.engine.stats.drafted == alone.engine.stats.drafted > 0
    assert link.server.pool.num_free == link.server.pool.num_pages


@pytest.mark.parametrize("has_file", [True, False])
def test_behind_draft_replicas_an_engine_without_a_curve_measures_itself(tiny_target, folder, has_file):
    """It guesses what drafting takes: by a curve of other hardware, or without one."""
    target, path = target_of(tiny_target), folder / "cost_curve.json"
    if has_file:
        CostCurve((1, 8), (0.1, 0.2), (1, 4), (0.3, 0.4), fingerprint={"num_threads": 99}).save(path)
    link = DirectLink(lambda: load_draft_server(target, str(folder), config=SERVER))
    remote = RemoteDrafts(link, "engine", RemoteDraftConfig(deadline_s=5.0))
    config = EngineConfig(page_size=4, kv_tokens=4096, max_running_requests=8, min_gain=0.0)
    try:
        loaded = load_engine(target, str(folder), config=config, profiles=True, remote=remote)
        left = load_engine(target, str(folder), config=config, remote=remote)
    finally:
        path.unlink(missing_ok=True)
    curve = loaded.engine.policy.curve
    assert loaded.engine.config.verify_length is None
    assert curve is not None
    assert len(curve.batch_tokens) >= 3
    if has_file:
        assert curve.draft_requests == (1, 4)
        assert curve.draft_seconds(4) / curve.draft_seconds(1) == pytest.approx(4 / 3)
        assert curve.draft_seconds(1) == pytest.approx(3 * curve.verify_s[0])
    else:
        assert curve.draft_s == pytest.approx([0.25 * seconds for seconds in curve.verify_s])
    assert any("guessed" in note for note in loaded.notes)
    assert loaded.engine._drafts.curve is None  # its deadline follows from what was measured alone
    alone = load_engine(target, None, config=config)
    assert answers(loaded.engine) == answers(alone.engine)
    assert left.engine.config.verify_length == 3


def test_another_drafter_than_the_engines_drafts_nothing(tiny_target, folder, tmp_path):
    target = target_of(tiny_target)
    other = make_tiny_drafter(tmp_path / "other", tiny_target, num_layers=2)
    link = DirectLink(lambda: load_draft_server(target, str(other), config=SERVER))
    loaded = remote_engine(target, folder, link)
    assert answers(loaded.engine) == answers(load_engine(target, None, config=EngineConfig(kv_tokens=512)).engine)
    assert loaded.engine.stats.drafted == 0


def test_a_drafter_of_another_target_starts_on_neither_side(folder, tmp_path):
    other = target_of(make_tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(Mismatch, match="use it with the target it was trained for"):
        load_draft_server(other, str(folder), config=SERVER)
    with pytest.raises(Mismatch, match="use it with the target it was trained for"):
        remote_engine(other, folder, DirectLink(lambda: None))  # type: ignore[arg-type, return-value]


def test_without_a_drafter_there_is_no_server(tiny_target, tmp_path):
    with pytest.raises(MissingInput, match=r"jobs/train\.py"):
        load_draft_server(target_of(tiny_target), str(tmp_path), config=SERVER)


def test_features_that_take_more_memory_than_allowed_are_refused_with_both_figures(tiny_target, folder):
    with pytest.raises(ValueError, match=r"1,024 tokens take 524,288 bytes .* max_feature_bytes \(1,000\)"):
        remote_engine(target_of(tiny_target), folder, DirectLink(lambda: None), max_feature_bytes=1000)  # type: ignore[arg-type, return-value]


def test_a_server_knows_its_drafters_cost_curve_where_there_is_one_of_this_hardware(tiny_target, tmp_path):
    folder, target = make_tiny_drafter(tmp_path / "drafter", tiny_target), target_of(tiny_target)
    assert load_draft_server(target, str(folder), config=SERVER).calls.supply() is None
    fingerprint = hardware_fingerprint("cpu", torch.float32, 1, target.name)
    curve = CostCurve((1, 8), (0.01, 0.02), (1, 8), (0.002, 0.004), fingerprint=fingerprint)
    curve.save(folder / "cost_curve.json")
    assert load_draft_server(target, str(folder), config=SERVER).calls.supply() == drafter_of(curve)
    replace(curve, fingerprint={"device": "another"}).save(tmp_path / "other.json")
    (tmp_path / "other.json").replace(folder / "cost_curve.json")
    assert load_draft_server(target, str(folder), config=SERVER).calls.supply() is None
