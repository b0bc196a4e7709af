"""Sets of experiments: what their pieces are made of, and how long they will take."""

from pathlib import Path
from typing import Any

import pytest

import paper
from dspark.config import build_config, load_config
from dspark.evaluation.paper_config import PaperConfig
from dspark.evaluation.projection import projected_seconds, training_slots
from dspark.evaluation.tasks import BENCHMARKS, FOLDER_VARIABLE

ROOT = Path(__file__).resolve().parents[3]
SETS = sorted((ROOT / "configs" / "paper").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


def quick(**changes: Any) -> PaperConfig:
    return load_config(PaperConfig, ROOT / "configs/paper/paper_quick.yaml").with_changes(**changes)


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_every_piece_of_every_set_has_a_valid_config(path, monkeypatch):
    monkeypatch.setattr("dspark.evaluation.projection.read_prompts", pytest.fail) if "released" in path.stem else None
    config = load_config(PaperConfig, path)
    pieces = list(paper.plan_pieces(config))
    assert len({piece.name for piece in pieces}) == len(pieces)
    trained = [piece for piece in pieces if piece.kind in ("train", "adopt")]
    evaluated = [piece for piece in pieces if piece.name.startswith("evaluate ")]
    assert len(trained) == len(evaluated) == sum(len(config.seeds_of(name)) for name in config.drafters)
    outputs = [piece.output for piece in pieces if piece.kind in ("train", "cache", "evaluate")]
    assert len(set(outputs)) == len(outputs)
    if config.contest is not None:
        for entrant in config.contest_config().entrants.values():
            assert entrant.drafter is None or entrant.drafter.startswith(config.output)


def test_full_sets_train_every_drafter_of_a_claim_about_order_three_times():
    for path in SETS:
        config = load_config(PaperConfig, path)
        if config.size == "full" and config.caches:
            assert all(len(config.seeds_of(name)) == 3 for name in config.drafters if name != "mtp")


def test_all_drafters_of_a_set_have_the_same_budget():
    config = quick()
    budgets = {
        (training.steps, training.sequences_per_step, training.anchors_per_sequence, training.seed)
        for training in (paper.train_config(config, name, 0) for name in config.drafters)
    }
    assert budgets == {(140, 8, 32, 0)}


def test_a_drafters_own_changes_come_after_what_all_have_in_common():
    config = quick()
    changed = config.drafters["dspark"].with_changes(changes=("steps=7",))
    other = config.model_copy(update={"drafters": {**config.drafters, "dspark": changed}})
    assert paper.train_config(other, "dspark", 3).steps == 7
    assert paper.train_config(other, "dspark", 3).seed == 3


def test_without_the_benchmarks_files_own_prompts_stand_in(tmp_path, monkeypatch):
    own = quick().evaluate_config("dspark", 0)
    assert own.prompts
    assert not own.benchmarks
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    theirs = quick().evaluate_config("dspark", 0)
    assert (theirs.prompts, theirs.benchmarks, theirs.prompts_per_domain) == ([], list(BENCHMARKS), 7)
    assert quick().lossless_config().benchmarks == ["gsm8k"]


def test_a_piece_of_fewer_prompts_than_the_set_keeps_its_number(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    released = load_config(PaperConfig, ROOT / "configs/paper/paper_released.yaml")
    assert released.prompts_per_benchmark is None
    assert released.calibrate_config().prompts_per_domain == 100
    assert released.evaluate_config("dspark", 0).prompts_per_domain is None
    between = quick(prompts_per_benchmark=15)  # the files say 20, 20 and 12
    found = [between.evaluate_config("dspark", 0), between.calibrate_config(), between.lossless_config()]
    assert [piece.prompts_per_domain for piece in found] == [15, 15, 12]


def test_full_sets_measure_as_many_prompts_for_losslessness_as_they_compare():
    for path in SETS:
        config = load_config(PaperConfig, path)
        if config.size == "full" and config.prompts_per_benchmark is None:
            piece = config.lossless_config()
            measured = piece.prompts_per_domain or BENCHMARKS["gsm8k"].num_prompts
            assert piece.compare_with_generate <= measured, path.stem


def test_an_adopted_drafter_is_measured_once():
    config = load_config(PaperConfig, ROOT / "configs/paper/paper_released.yaml").with_changes(seeds=(0, 1, 2))
    assert config.seeds_of("dspark") == (0,)
    assert config.drafter_folder("dspark", 0) == config.drafter_folder("dspark", 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafters": {"dflash": {"config": "x.yaml", "cache": "states"}}}, "one called 'dspark'"),
        ({"drafters": {"dspark": {"config": "x.yaml", "cache": "stats"}}}, "trains on cache 'stats'"),
        ({"drafters": {"dspark": {"config": "x.yaml"}}}, "either adopted or trained on a cache"),
        ({"seeds": (0, 0)}, "give each once"),
        ({"calibrate": None}, "budget is scheduled"),
        ({"generate": None}, "caches are made of answers"),
    ],
)
def test_what_cannot_work_is_refused(changes, reason):
    content = quick().model_dump() | changes
    with pytest.raises(ValueError, match=reason):
        build_config(PaperConfig, content)


def test_projected_times_go_by_what_was_measured_then_by_rates():
    pieces = [
        paper.Piece("a", "train", 100.0, "", dict),
        paper.Piece("b", "evaluate", 50.0, "", dict),
    ]
    rates = {"startup_s": 10.0, "train": 2.0, "evaluate": 5.0}
    assert projected_seconds(pieces, [], rates) == pytest.approx(10 + 50 + 10 + 10)
    records = [{"kind": "train", "units": 20.0, "seconds": 50.0}]  # 40 s for 20 units, beside the start
    assert projected_seconds(pieces, records, rates) == pytest.approx(10 + 200 + 10 + 10)
    assert projected_seconds(pieces, [], {"train": 2.0}) is None
    assert projected_seconds([paper.Piece("c", "train", None, "", dict)], records, rates) is None


def test_training_grows_with_the_block_and_the_layers():
    config = quick()
    slots = {
        name: training_slots(paper.train_config(config, name, 0).drafter, 100, paper.train_config(config, name, 0))
        for name in ("dspark", "dspark-15", "dflash-5-layers")
    }
    assert slots["dspark"] == 100 * 32 * 7 * 4
    assert slots["dspark-15"] / slots["dspark"] == pytest.approx(15 / 7)
    assert slots["dflash-5-layers"] / slots["dspark"] == pytest.approx(7 / 4)


def test_the_quick_set_is_planned_for_less_than_an_hour(capsys):
    plan = paper.run(quick(), dry_run=True)
    assert plan["projected_s"] < 3600
    shown = capsys.readouterr().out
    assert "train dspark-15, seed 0" in shown
    assert "to go: about" in shown
