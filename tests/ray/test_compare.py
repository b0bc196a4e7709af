"""The compare job on the tiny target: two drafters trained, measured, set beside others, recorded together."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import compare
from dspark.config import build_config
from dspark.errors import Mismatch
from dspark.provenance import read_json, write_json
from local_cluster import start_local_cluster
from tiny_cache import make_tiny_cache

pytestmark = pytest.mark.ray

SHAPES = {
    "dspark": {"num_layers": 1, "block_size": 4, "draft_vocab_size": 200, "mask_token": "system", "markov_rank": 8},
    "eagle3": {"architecture": "eagle3", "block_size": 4, "draft_vocab_size": 200},
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Any]:
    start_local_cluster()
    folder = tmp_path_factory.mktemp("compare")
    cache = make_tiny_cache(folder / "cache", tiny_target)
    tracking = {"uri": f"sqlite:///{folder / 'mlflow.db'}", "experiment": "compare"}
    for name, shape in SHAPES.items():
        train = {
            "cache": str(cache.folder),
            "output": str(folder / name),
            "drafter": shape,
            "anchors_per_sequence": 4,
            "sequences_per_step": 4,
            "steps": 4,
            "validate_every": 2,
            "tracking": tracking | {"experiment": "train"},
        }
        write_json(folder / f"{name}.yaml", train)  # JSON is YAML
    rows = [{"id": f"{d}{n}", "domain": d, "turns": [f"hello {d} {n}"]} for d in ("math", "chat") for n in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    prompts = [{"path": str(folder / "prompts.jsonl"), "split": "heldout"}]
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    evaluation = {"drafter": "set by compare", "output": "set by compare", "prompts": prompts, "target": target}
    write_json(
        folder / "evaluate.yaml",
        evaluation | {"max_new_tokens": 8, "num_workers": 1, "tracking": tracking | {"experiment": "evaluate"}},
    )
    return {
        "output": str(folder / "comparison"),
        "drafters": {name: str(folder / f"{name}.yaml") for name in SHAPES},
        "evaluate": str(folder / "evaluate.yaml"),
        "contest": {
            "prompts": prompts,
            "target": target,
            "entrants": {"none": {}} | {name: {"drafter": str(folder / name), "verify_length": 2} for name in SHAPES},
            "repeats": 1,
            "concurrency": [1, 2],
            "max_tokens": 6,
            "min_requests": 2,
            "requests_per_place": 1,
            "engine": {"kv_tokens": 512, "page_size": 8, "max_running_requests": 2},
            "threads": 1,
        },
        "tracking": tracking,
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return compare.run(build_config(compare.CompareConfig, content), **options)


@pytest.fixture(scope="module")
def result(content: dict[str, Any]) -> dict[str, Any]:
    plan = run(content, dry_run=True)
    assert plan["runs"] == 6
    assert not Path(content["output"]).exists()
    return run(content)


def test_all_are_trained_measured_and_set_beside_each_other(content, result, capsys):
    assert list(result["drafters"]) == list(result["accepted_length"]) == list(SHAPES)
    assert {figures["steps"] for figures in result["drafters"].values()} == {4}
    for lengths in result["accepted_length"].values():
        assert 1.0 <= lengths["greedy"]["overall"] <= 5.0
    for by_entrant in result["contest"]["greedy"].values():
        assert list(by_entrant) == ["none", *SHAPES]
        assert all(figures["identical"] == figures["compared"] == 2 for figures in by_entrant.values())
    page = (Path(content["output"]) / compare.REPORT).read_text(encoding="utf-8")
    for title in ("Accepted length", "Acceptance by position", "Learning", "Throughput"):
        assert f"<h2>{title}</h2>" in page


def test_the_parent_run_has_a_child_for_each_drafter_and_each_way_of_decoding(content, result):
    client = MlflowClient(content["tracking"]["uri"])
    experiment = client.get_experiment_by_name("compare")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (one for one in runs if "mlflow.parentRunId" not in one.data.tags)
    children = {one.info.run_name: one for one in runs if one is not parent}
    assert {one.data.tags["mlflow.parentRunId"] for one in children.values()} == {parent.info.run_id}
    assert {one.info.status for one in runs} == {"FINISHED"}
    assert set(children) == {f"drafter: {n}" for n in SHAPES} | {f"decoding: {n}" for n in ("none", *SHAPES)}
    metrics = children["drafter: eagle3"].data.metrics
    assert metrics["greedy/overall/accepted_length"] == result["accepted_length"]["eagle3"]["greedy"]["overall"]
    curve = client.get_metric_history(children["drafter: dspark"].info.run_id, "heldout/expected_accepted_length")
    assert sorted(point.step for point in curve) == [0, 2, 4]
    speeds = client.get_metric_history(children["decoding: dspark"].info.run_id, "greedy/tokens_per_s")
    assert sorted(point.step for point in speeds) == [1, 2]


def test_again_it_does_nothing_and_says_the_same(content, result):
    client = MlflowClient(content["tracking"]["uri"])
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    num_runs = len(client.search_runs(ids))
    assert run(content) == result | {"skipped": True}
    assert len(client.search_runs(ids)) == num_runs


def test_more_repeats_are_added_to_the_runs_that_are_there(content, result):
    path = Path(content["output"]) / compare.CONTEST
    earlier = read_json(path)["runs"]
    more = run(content | {"contest": content["contest"] | {"repeats": 2}})
    runs = read_json(path)["runs"]
    assert runs[: len(earlier)] == earlier
    assert len(runs) == 2 * len(earlier)
    assert {f["repeats"] for by in more["contest"]["greedy"].values() for f in by.values()} == {2}


def test_runs_of_another_request_are_left_out(content, result):
    path = Path(content["output"]) / compare.CONTEST
    assert len(read_json(path)["runs"]) > 3
    run(content | {"contest": content["contest"] | {"max_tokens": 5, "concurrency": [1]}})
    assert [row["output_tokens"] for row in read_json(path)["runs"]] == [10, 10, 10]


def test_drafters_of_another_budget_are_not_compared(content, tmp_path):
    other = read_json(content["drafters"]["eagle3"]) | {"steps": 5}
    write_json(tmp_path / "other.yaml", other)
    with pytest.raises(Mismatch, match="steps is 5 but 4 is asked for; give them the same budget"):
        run(content | {"drafters": content["drafters"] | {"eagle3": str(tmp_path / "other.yaml")}})


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"train": 9}, "train is 9 but 12 is asked for"),
        ({"answers_fingerprint": "fedcba9876543210"}, "answers_fingerprint is 'fedcba9876543210'"),
        ({"max_length": 30}, "max_length is 30 but None"),
    ],
)
def test_drafters_of_other_answers_are_not_compared(content, tmp_path, tiny_target, other, reason):
    cache = make_tiny_cache(tmp_path / "cache", tiny_target, **other)
    train = read_json(content["drafters"]["eagle3"]) | {"cache": str(cache.folder), "output": str(tmp_path / "d")}
    write_json(tmp_path / "other.yaml", train)
    with pytest.raises(Mismatch, match=f"data of eagle3 and dspark: {reason}.* train both on the same answers"):
        run(content | {"drafters": content["drafters"] | {"eagle3": str(tmp_path / "other.yaml")}})
