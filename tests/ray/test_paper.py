"""A set of experiments on the tiny target, through the job: whole, cut short, and again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import compare
import paper
import report
from dspark.config import build_config
from dspark.evaluation.paper_config import PaperConfig
from dspark.provenance import read_json, write_json
from local_cluster import start_local_cluster
from tiny_drafter import make_tiny_drafter

pytestmark = pytest.mark.ray

SHAPES: dict[str, dict[str, Any]] = {
    "dspark": {},
    "eagle3": {"architecture": "eagle3"},
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Any]:
    """Drafters are taken over, not trained: training has its own tests."""
    start_local_cluster()
    folder = tmp_path_factory.mktemp("paper")
    (folder / "benchmarks").mkdir()
    turns = {"gsm8k": ["hello"], "mbpp": ["number"], "mt-bench": ["question", "answer"]}
    for name, one in turns.items():
        rows = ({"turns": [f"{text} {n}" for text in one]} for n in range(4))
        (folder / "benchmarks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    drafters = {}
    for name, shape in SHAPES.items():
        source = make_tiny_drafter(folder / f"source_{name}", tiny_target, **shape)
        write_json(folder / f"{name}.yaml", {"drafter": str(source), "target": target, "output": "set by paper"})
        drafters[name] = {"config": str(folder / f"{name}.yaml"), "adopted": True}
    own = [{"path": str(folder / "benchmarks" / f"{name}.jsonl"), "split": "heldout", "domain": name} for name in turns]
    common = {"drafter": "set by paper", "output": "set by paper", "target": target, "prompts": own, "num_workers": 1}
    sampled = [{"name": "sampled", "temperature": 1.0}]
    write_json(folder / "evaluate.yaml", common | {"max_new_tokens": 10, "modes": sampled})
    write_json(folder / "calibrate.yaml", common | {"max_new_tokens": 10})
    lossless = {"max_new_tokens": 8, "modes": [{"name": "greedy"}], "compare_with_generate": 3}
    write_json(folder / "lossless.yaml", common | lossless)
    return {
        "output": str(folder / "set"),
        "size": "quick",
        "target": target,
        "drafters": drafters,
        "evaluate": {"config": str(folder / "evaluate.yaml")},
        "calibrate": {"config": str(folder / "calibrate.yaml")},
        "lossless": {"config": str(folder / "lossless.yaml")},
        "contest": {
            "prompts": own,
            "entrants": {"none": {}, "dspark adaptive": {"drafter": "dspark", "verify_length": 2}},
            "repeats": 2,
            "concurrency": [1, 2],
            "max_tokens": 6,
            "min_requests": 2,
            "requests_per_place": 1,
            "engine": {"kv_tokens": 512, "page_size": 8, "max_running_requests": 2},
            "threads": 1,
        },
        "round_time": {"block_sizes": [2, 4], "requests": 2, "context_tokens": 16, "repeats": 5, "threads": 1},
        "tracking": {"enabled": False},
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return paper.run(build_config(PaperConfig, content), **options)


@pytest.fixture(scope="module")
def result(content: dict[str, Any]) -> dict[str, Any]:
    plan = run(content, dry_run=True)
    assert (plan["pieces"], plan["projected_s"]) == (8, None)  # nothing was measured, and no rates are given
    assert not Path(content["output"]).exists()
    return run(content)


def records(content: dict[str, Any]) -> list[str]:
    ended, _ = paper.read_records(Path(content["output"]) / paper.PIECES)
    return [row["name"] for row in ended]


def numbers(content: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    figures = read_json(Path(content["output"]) / "summary.json")["figures"]
    return {name: figures[name] for name in ("table_1", "figure_2", "figure_5")}


def test_every_piece_is_done_once_and_the_report_stands(content, result):
    assert (result["pieces"], result["done"]) == (8, 8)
    assert len(records(content)) == len(set(records(content))) == 8
    output = Path(content["output"])
    assert (output / "report.html").is_file()
    assert (output / "claims.md").is_file()
    assert len(list((output / "figures").glob("*.png"))) == 9 - len(result["not_measured"])
    assert result["claims"]["lossless"] == "holds"
    times = read_json(output / report.ROUND_TIMES)["times"]["variants"]
    assert {(one["kind"], one["block_size"]) for one in times} == {(kind, size) for kind in SHAPES for size in (2, 4)}
    assert all(len(one["draft_s"]) == 5 and min(one["draft_s"]) > 0 for one in times)


def test_the_projection_knows_what_pieces_took(content, result):
    assert run(content, dry_run=True)["projected_s"] == 0


def test_again_nothing_is_measured_and_the_same_is_said(content, result):
    before = numbers(content)
    again = run(content)
    assert (again["done"], again["skipped"]) == (0, True)
    assert again["claims"] == result["claims"]
    assert numbers(content) == before


def test_a_set_that_was_killed_between_pieces_goes_on_with_the_same_results(content, result, monkeypatch, tmp_path):
    later = dict.fromkeys(("round_time", "calibrate", "lossless", "contest"))
    killed = content | later | {"output": str(tmp_path / "set")}
    shutil.copytree(content["output"], killed["output"])
    for name in ("evaluation/seed0/eagle3", "adopted/eagle3", "figures"):
        shutil.rmtree(tmp_path / "set" / name)
    for name in (paper.PIECES, "summary.json", "contest.json", report.ROUND_TIMES):
        (tmp_path / "set" / name).unlink()
    measured = tmp_path / "set/evaluation/seed0/dspark/rollouts.jsonl"
    before = measured.read_bytes()

    adopt_one = paper.adopt.run

    def die(config: Any, **options: Any) -> dict[str, Any]:
        if config.output.endswith("eagle3"):
            raise KeyboardInterrupt
        return adopt_one(config, **options)

    with monkeypatch.context() as patch:
        patch.setattr(paper.adopt, "run", die)
        with pytest.raises(KeyboardInterrupt):
            run(killed)
    assert records(killed) == ["adopt dspark", "evaluate dspark, seed 0"]  # found done
    assert run(killed)["done"] == 2
    assert measured.read_bytes() == before  # what was measured before the kill was not measured again
    assert len(records(killed)) == len(set(records(killed))) == 4
    ended, cut_short = paper.read_records(Path(killed["output"]) / paper.PIECES)
    assert not cut_short
    assert [row["units"] for row in ended if row["name"] == "adopt eagle3"] == [None]  # a part of it was done before
    assert numbers(killed) == numbers(content)


def test_turns_are_run_one_by_one_and_counted(content, result, tmp_path):
    folder = Path(content["output"]).parent / "benchmarks"
    config = build_config(PaperConfig, content | {"benchmarks_folder": str(folder)})
    measuring = config.evaluate_config("dspark", 0).with_changes(output=str(tmp_path), benchmarks=["mt-bench"])
    found = paper.evaluate.run(measuring, dry_run=True)
    assert (found["prompts"], found["turns"]) == (4, 8)
    about = report.describe(config, report.collect(build_config(PaperConfig, content)))
    assert about["prompts"].startswith("12 of")
    assert about["prompts"].endswith("16 turns")  # four prompts have two


def test_the_contest_has_every_run_once(content, result):
    path = Path(content["output"]) / compare.CONTEST
    assert len(read_json(path)["runs"]) == 2 * 2 * 2
    config = build_config(PaperConfig, content)
    assert paper.run_contest(config) == {"skipped": True}
