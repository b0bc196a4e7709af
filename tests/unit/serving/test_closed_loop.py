"""What a replica learns of its drafter while it serves: live error, drift, recorded rounds, a new calibration."""

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import calibrate
from dspark.config import build_config
from dspark.engine.drafter_folder import drafter_sha256
from dspark.engine.running import RunningRequest
from dspark.engine.starting import RequestStarter
from dspark.evaluation.config import CalibrateConfig
from dspark.provenance import read_json
from dspark.serving.app import build
from dspark.serving.closed_loop import ClosedLoop, mode_of
from dspark.serving.config import ServeConfig
from dspark.serving.openai_schema import CompletionRequest
from dspark.serving.resolve import RequestResolver
from dspark.serving.target_replica import TargetReplica, _chat
from dspark.speculation.calibration import Calibration, SlotScales
from dspark.traffic.rounds import MODES, decode
from dspark.traffic.shards import ROUNDS, TEXTS, shard_names
from tiny_drafter import make_tiny_drafter
from tiny_serving import CHAT, MODEL, TEXT, ask, chat, completion, serve_config

SECRET = "ada@mail.example.org"
MIS_SCALED = SlotScales((0.1,) * 4, (3.0,) * 4)


@pytest.fixture
def drafter(tmp_path: Path, tiny_target: Path) -> Path:
    return make_tiny_drafter(tmp_path / "drafter", tiny_target)


@pytest.fixture
def started(tiny_target: Path, drafter: Path, tmp_path: Path) -> Iterator[Any]:
    replicas: list[TargetReplica] = []

    def start(**changes: Any) -> TargetReplica:
        common = {"drafter": str(drafter), "profile_without_curve": True, "watch": {"calibration_check_s": None}}
        traffic = {"folder": str(tmp_path / "traffic")}
        if isinstance(changes.get("traffic"), dict):
            changes["traffic"] = traffic | changes["traffic"]
        replicas.append(TargetReplica(serve_config(tiny_target, **common | changes)))
        return replicas[-1]

    yield start
    for replica in replicas:
        replica.close()


def told(replica: TargetReplica, name: str, **labels: str) -> list[float]:
    samples = [sample for family in asyncio.run(replica.metrics()) for sample in family.samples]
    return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


def send(replica: TargetReplica, bodies: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(path, json=body) for path, body in bodies))

    responses = ask(replica, serve_config("unused"), talk)
    assert {response.status_code for response in responses} == {200}, [response.text for response in responses]
    return [response.json() for response in responses]


def some_bodies() -> list[tuple[str, dict[str, Any]]]:
    fields: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 5}]
    return [(TEXT, completion(f"question {k}", verify_length=4, **one)) for one in fields for k in range(2)]


def recorded(folder: Path) -> list[Any]:
    return [decode((folder / name).read_bytes()) for name in shard_names(folder, ROUNDS)]


def test_rounds_are_recorded_as_the_engine_counts_them_and_by_their_mode(started: Any, tmp_path: Path) -> None:
    replica = started(traffic={})
    send(replica, some_bodies())
    loop = replica._closed_loop
    assert loop.recorder.flush()
    ((origin, rounds),) = recorded(tmp_path / "traffic")
    counts = replica.loaded.engine.stats.rounds
    assert len(rounds) == counts.rounds > 20
    assert rounds.num_judged.sum() == counts.proposed_tokens
    assert len(np.unique(rounds.request)) == 6
    assert [len(rounds.of_mode(mode)) > 0 for mode in MODES] == [True, True, True]
    assert (origin.drafter, origin.block_size) == (str(tmp_path / "drafter"), 4)
    assert origin.drafter_sha256 == drafter_sha256(tmp_path / "drafter")
    assert told(replica, "dspark_traffic_rounds_total", outcome="written") == [len(rounds)]
    for mode in MODES:
        judged = told(replica, "dspark_confidence_ece_rounds", mode=mode, position="0")
        assert judged == [(rounds.of_mode(mode).num_judged > 0).sum()]


def test_by_default_nothing_is_recorded_and_errors_are_told_all_the_same(started: Any, tmp_path: Path) -> None:
    replica = started()
    send(replica, some_bodies())
    assert replica._closed_loop.recorder is None
    assert told(replica, "dspark_traffic_rounds_total") == []
    assert not (tmp_path / "traffic").exists()
    for mode in MODES:
        (ece,) = told(replica, "dspark_confidence_ece", mode=mode, position="0")
        assert 0 <= ece <= 1


def test_texts_are_kept_when_asked_for_redacted_and_never_logged(
    started: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replica = started(traffic={"texts": {"prompts": True, "answers": True}})
    tools = [{"type": "function", "function": {"name": "f"}}]
    send(
        replica,
        [
            (CHAT, chat(f"mail {SECRET} now")),
            (TEXT, completion(f"of {SECRET}")),
            (TEXT, completion("not to be kept", store=False)),
            (TEXT, completion([1, 40, 77])),
            (CHAT, chat([{"type": "text", "text": "of parts"}], tools=tools, tool_choice="none")),
        ],
    )
    assert replica._closed_loop.recorder.flush()
    (name,) = shard_names(tmp_path / "traffic", TEXTS)
    rows = [json.loads(line) for line in (tmp_path / "traffic" / name).read_text().splitlines()]
    assert sorted(row["messages"][-1]["content"] for row in rows) == ["mail [email] now", "of [email]"]
    assert all(isinstance(row["answer"], str) for row in rows)
    assert SECRET not in caplog.text
    assert "not to be kept" not in caplog.text


def test_a_share_of_blocks_is_verified_whole_and_says_so(started: Any, tmp_path: Path) -> None:
    replica = started(traffic={"whole_blocks": 1.0})
    send(replica, [(TEXT, completion("question")), (TEXT, completion("another", verify_length=2))])
    assert replica._closed_loop.recorder.flush()
    ((_, rounds),) = recorded(tmp_path / "traffic")
    whole = rounds.where(rounds.is_whole)
    lengths = np.isfinite(whole.logits).sum(axis=1)
    assert np.count_nonzero(lengths == 4) > len(whole) / 2  # fewer only where the answer ends
    assert (np.isfinite(rounds.where(~rounds.is_whole).logits).sum(axis=1) <= 2).all()


def test_a_new_calibration_is_taken_while_it_serves_and_counts_start_anew(started: Any, drafter: Path) -> None:
    replica = started(watch={"calibration_check_s": 0.05})
    send(replica, some_bodies())
    policy, digest = replica.loaded.engine.policy, drafter_sha256(drafter)
    before = policy.confidences
    levels = {"acceptance": {"greedy": [0.5, 0.4]}}
    Calibration({"greedy": MIS_SCALED, "sampled": MIS_SCALED}, digest, levels).save(drafter / "calibration.json")
    assert waited(lambda: policy.confidences is not before)
    found = policy.confidences.survival(request_of(replica), proposal_of([1.0, 1.0]))
    assert found[0] == pytest.approx(1 / (1 + np.exp(-13.0)), abs=1e-3)
    assert told(replica, "dspark_calibration_reloads_total", outcome="taken") == [1]
    assert told(replica, "dspark_confidence_ece") == []
    assert told(replica, "dspark_acceptance_level", mode="greedy") == [0.5, 0.4]
    send(replica, some_bodies())
    assert told(replica, "dspark_confidence_ece", mode="greedy", position="0")[0] > 0.1


@pytest.mark.parametrize("kind", ["another drafter's", "broken", "too few slots", "gone"])
def test_a_calibration_that_does_not_fit_is_refused_once_and_all_goes_on(
    started: Any, drafter: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    digest, path = drafter_sha256(drafter), drafter / "calibration.json"
    Calibration({"greedy": MIS_SCALED}, digest).save(path)
    replica = started()
    before, watch = replica.loaded.engine.policy.confidences, replica._closed_loop.calibration_watch
    if kind == "another drafter's":
        Calibration({"greedy": MIS_SCALED}, "0" * 16).save(path)
    elif kind == "broken":
        path.write_text('{"temperatures": {"greedy": [1')
    elif kind == "too few slots":
        Calibration({"greedy": SlotScales((1.0,), (0.0,))}, digest).save(path)
    else:
        path.unlink()
    for _ in range(3):
        watch.look()
    assert replica.loaded.engine.policy.confidences is before
    assert watch.outcomes == {"taken": 0, "refused": int(kind != "gone")}
    assert caplog.text.count("calibration is refused") == int(kind != "gone")
    send(replica, some_bodies())


def test_answers_across_a_swap_leave_no_round_of_one_drafter_under_the_others_name(
    started: Any, drafter: Path, tmp_path: Path, tiny_target: Path
) -> None:
    replica = started(traffic={})
    other = make_tiny_drafter(tmp_path / "other", tiny_target, markov_rank=4)

    async def talk(client: httpx.AsyncClient) -> None:
        stats = replica.loaded.engine.stats
        answers = [asyncio.create_task(client.post(TEXT, json=body | {"max_tokens": 150})) for _, body in some_bodies()]
        while stats.output_tokens < 60:
            await asyncio.sleep(0.001)
        await replica.reconfigure({"drafter": str(other)})
        await asyncio.gather(*answers)
        await client.post(TEXT, json=completion("afterwards", verify_length=4))

    ask(replica, serve_config("unused"), talk)
    assert replica._closed_loop.recorder.flush()
    found = {origin.drafter: (origin.drafter_sha256, len(rounds)) for origin, rounds in recorded(tmp_path / "traffic")}
    assert found.keys() == {str(drafter), str(other)}
    assert found[str(other)][0] == drafter_sha256(other)
    assert found[str(other)][1] == replica._closed_loop.belief.windows["greedy"].num_seen > 0


def test_without_a_drafter_with_confidences_there_is_nothing_to_watch(started: Any, tmp_path: Path) -> None:
    replica = started(drafter="ngram", traffic={})
    send(replica, [(TEXT, completion())])
    assert replica._closed_loop.recorder.flush()
    assert told(replica, "dspark_confidence_ece") == []
    assert recorded(tmp_path / "traffic") == []


def test_fallen_acceptance_raises_the_alarm_and_starts_one_job(
    tiny_target: Path, drafter: Path, tmp_path: Path, started: Any
) -> None:
    digest = drafter_sha256(drafter)
    levels = {"acceptance": {"greedy": [0.99, 0.99, 0.99, 0.99]}}  # an untrained drafter is far from it
    Calibration({"greedy": MIS_SCALED}, digest, levels).save(drafter / "calibration.json")
    replica = started()
    submitted: list[tuple[list[str], str]] = []
    command = ["python", "jobs/train.py", "initialize_from={drafter}", "output=tuned/{id}"]
    content = replica._config.model_dump() | {
        "traffic": {"folder": str(tmp_path / "traffic")},
        "watch": {"fine_tune": {"command": command}, "calibration_check_s": None, "design_effect": 1.0},
    }
    config = build_config(ServeConfig, content)
    loop = ClosedLoop(config, "r", submit=lambda argv, job_id: submitted.append((argv, job_id)))
    replica._closed_loop.close()
    replica._closed_loop = loop
    loop.use(replica.loaded, str(drafter))
    for _ in range(3):
        send(replica, [(TEXT, completion(f"question {k}", verify_length=4)) for k in range(6)])
    assert told(replica, "dspark_acceptance_drift", mode="greedy")[0] >= 1
    assert told(replica, "dspark_acceptance_drift_alarms_total", mode="greedy") == [1]
    assert waited(lambda: loop.fine_tune.outcomes["started"] == 1)
    ((argv, job_id),) = submitted
    assert argv[2:] == [f"initialize_from={drafter}", f"output=tuned/{job_id}"]
    assert "times as often as at calibration" in read_json(tmp_path / "traffic" / "fine_tune.json")["reason"]


def test_modes_are_the_engines_own(tiny_target: Path, started: Any) -> None:
    replica = started()
    resolver = RequestResolver(replica.loaded, _chat(replica._config, replica.loaded), replica._limits)
    seen = set()
    for fields in ({}, {"temperature": 0.5}, {"temperature": 1.0, "seed": 1}):
        body = {"temperature": 0.0, **fields}
        request = resolver.resolve("r", CompletionRequest(model=MODEL, prompt="q", **body))
        running = replica.loaded.engine._starter.start(request)
        assert mode_of(request) == running.mode
        seen.add(running.mode)
    assert seen == set(MODES)


def test_what_has_no_effect_or_is_misspelt_is_refused() -> None:
    with pytest.raises(ValueError, match="fine_tune has nothing to train on without traffic"):
        build({"target": {"name": "x"}, "watch": {"fine_tune": {"command": ["x"]}}})
    with pytest.raises(ValueError, match=r"unknown key 'traffic\.floder'; did you mean 'folder'"):
        build({"target": {"name": "x"}, "traffic": {"floder": "x"}})


def test_refitting_from_its_own_traffic_mends_a_mis_scaled_head_without_a_restart(
    started: Any, drafter: Path, tmp_path: Path
) -> None:
    """The whole loop in small: served, recorded, refitted, taken over, measured anew."""
    digest = drafter_sha256(drafter)
    Calibration({"greedy": MIS_SCALED, "sampled": MIS_SCALED}, digest).save(drafter / "calibration.json")
    replica = started(traffic={}, limits={"max_output_tokens": 200}, watch={"calibration_check_s": None})
    engine = replica.loaded.engine
    rng = random.Random(0)

    def traffic(number: int) -> float:
        bodies = [
            (TEXT, completion(f"question {rng.random()}", verify_length=4, max_tokens=120, temperature=1.0))
            for _ in range(number)
        ]
        send(replica, bodies)
        (mean,) = told(replica, "dspark_confidence_ece_mean", mode="sampled")
        return mean

    before = traffic(24)
    assert replica._closed_loop.recorder.flush()
    config = build_config(
        CalibrateConfig,
        {
            "drafter": str(drafter),
            "output": str(tmp_path / "refit"),
            "prompts": [{"path": "unused.jsonl"}],
            "from_traffic": str(tmp_path / "traffic"),
            "tracking": {"enabled": False},
        },
    )
    result = calibrate.run(config)
    assert result["taken"] == ["sampled"]
    assert result["rounds"]["sampled"]["fit"] + result["rounds"]["sampled"]["test"] == engine.stats.rounds.rounds
    assert calibrate.run(config) == result | {"skipped": True}
    replica._closed_loop.calibration_watch.look()
    after = traffic(24)
    assert replica.loaded.engine is engine
    assert before > 0.2
    assert after < before / 4
    stored = Calibration.load(drafter / "calibration.json", drafter_sha256=digest)
    assert stored.scales["greedy"] == MIS_SCALED  # nothing was recorded to fit it on
    assert stored.fitted_on["acceptance"].keys() == {"sampled"}


def waited(holds: Any, seconds: float = 20.0) -> bool:
    from tiny_serving import wait_until

    return asyncio.run(wait_until(holds, seconds=seconds))


def request_of(replica: TargetReplica) -> RunningRequest:
    resolver = RequestResolver(replica.loaded, _chat(replica._config, replica.loaded), replica._limits)
    request = resolver.resolve("r", CompletionRequest(model=MODEL, prompt="q", temperature=0.0))
    starter: RequestStarter = replica.loaded.engine._starter
    return starter.start(request)


def proposal_of(logits: list[float]) -> Any:
    import torch

    from dspark.speculation.proposal import Proposal

    return Proposal(torch.zeros(len(logits), dtype=torch.long), None, torch.tensor(logits))
