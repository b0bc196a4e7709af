"""The calibrate job with its worker in this process: what is decoded, fitted, written, skipped and refused."""

import json
from pathlib import Path

import pytest

import calibrate
import evaluate
import runner
from dspark.config import build_config
from dspark.evaluation.config import CalibrateConfig
from dspark.evaluation.engine_worker import EngineWorker
from dspark.provenance import read_json
from dspark.speculation.calibration import Calibration
from tiny_drafter import make_tiny_drafter

NUM_PROMPTS = 8


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrateConfig:
    rows = [
        {"id": f"p{n}", "domain": ("math", "chat")[n % 2], "messages": [{"role": "user", "content": f"question {n}"}]}
        for n in range(NUM_PROMPTS)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(evaluate, "_results", in_this_process)
    content = {
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "output": str(tmp_path / "calibration"),
        "prompts": [{"path": str(tmp_path / "prompts.jsonl"), "split": "heldout"}],
        "samples_per_prompt": 2,
        "max_new_tokens": 16,
        "tracking": {"enabled": False},
    }
    return build_config(CalibrateConfig, content)


def in_this_process(config, subject, items):
    worker = EngineWorker(config, subject)
    num_rows, rows = 0, worker.advance(items)
    while rows:
        yield from rows
        num_rows += len(rows)
        rows = worker.advance([])
    assert num_rows == len(items)


def decoded(config: CalibrateConfig) -> list[dict]:
    return [json.loads(line) for line in (Path(config.output) / "rollouts.jsonl").read_text().splitlines()]


def test_a_dry_run_says_what_is_to_do_and_writes_nothing(config, capsys):
    result = calibrate.run(config, dry_run=True)
    assert (result["to_do"], result["prompts"]) == (4 * NUM_PROMPTS, NUM_PROMPTS)
    assert "4 prompts to fit on, 4 to test on" in capsys.readouterr().out
    assert not Path(config.output).exists()


def test_scales_of_each_mode_are_written_for_this_drafter_and_the_report_says_what_they_are_worth(config):
    result = calibrate.run(config)
    rows = decoded(config)
    assert sorted({row["mode"] for row in rows}) == ["greedy", "sampled", "sampled~2", "seeded"]
    assert len(rows) == 4 * NUM_PROMPTS
    report = read_json(Path(config.output) / "calibration_report.json")
    stored = Calibration.load(Path(config.drafter) / "calibration.json", drafter_sha256=report["drafter"]["sha256"])
    for mode, scales in stored.scales.items():
        assert (list(scales.temperatures), list(scales.shifts)) == (
            result["temperatures"][mode],
            result["shifts"][mode],
        )
    assert {mode: len(scales) for mode, scales in stored.scales.items()} == {"greedy": 4, "sampled": 4}
    assert stored.for_mode("seeded") == stored.for_mode("sampled")  # too few rounds to say otherwise
    for mode, counts in result["rounds"].items():
        rounds = [r for row in rows if row["mode"].startswith(mode) for t in row["turns"] for r in t["rounds"]]
        assert counts["fit"] + counts["test"] == sum(r["num_proposed"] > 0 for r in rounds)
    assert report["modes"]["greedy"]["domains"].keys() == {"math", "chat"}
    assert stored.fitted_on["domains"] == ["chat", "math"]


def test_rounds_enough_give_seeded_decoding_scales_of_its_own(config, monkeypatch):
    monkeypatch.setattr(calibrate, "MIN_ROUNDS", 10)
    calibrate.run(config)
    stored = Calibration.load(Path(config.drafter) / "calibration.json")
    assert stored.scales.keys() == {"greedy", "sampled", "seeded"}


def test_samples_of_a_prompt_differ_and_propose_whole_blocks(config):
    calibrate.run(config)
    by_mode = {row["mode"]: row["turns"][0]["output_ids"] for row in decoded(config) if row["id"] == "p0"}
    assert by_mode["sampled"] != by_mode["sampled~2"]
    proposed = [r["num_proposed"] for row in decoded(config) for turn in row["turns"] for r in turn["rounds"]]
    assert proposed.count(4) > len(proposed) / 2
    assert all(turn["rounds"][0]["num_proposed"] == 4 for row in decoded(config) for turn in row["turns"])


def test_a_second_run_does_nothing_and_says_the_same(config):
    result = calibrate.run(config)
    assert calibrate.run(config) == result | {"skipped": True}


def test_a_run_that_was_killed_goes_on_where_it_was(config):
    result = calibrate.run(config)
    path = Path(config.output) / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20]))
    (Path(config.output) / "calibration_report.json").unlink()
    assert calibrate.run(config, dry_run=True)["to_do"] == 12
    again = calibrate.run(config)
    assert (again["temperatures"], again["shifts"]) == (result["temperatures"], result["shifts"])
    for mode, errors in result["mean_ece"].items():  # other requests run beside them: float32's last digits
        assert again["mean_ece"][mode] == pytest.approx(errors, abs=0.01)
    assert path.read_text().splitlines(keepends=True)[:20] == lines[:20]


@pytest.mark.parametrize("change", [{"num_bins": 10}, {"fit_domains": ["math"]}, {"seed": 1}, {"shift": False}])
def test_another_way_of_fitting_is_done_again(config, change):
    calibrate.run(config)
    assert "skipped" not in calibrate.run(config.with_changes(**change))


@pytest.mark.parametrize("content", [None, "{", '{"temperatures": {}, "drafter_sha256": null, "fitted_on": {}}'])
def test_scales_that_are_gone_broken_or_anothers_are_made_again_without_decoding(config, content):
    result = calibrate.run(config)
    path = Path(config.drafter) / "calibration.json"
    path.unlink() if content is None else path.write_text(content)
    again = calibrate.run(config)
    assert "skipped" not in again
    assert (again["temperatures"], again["shifts"]) == (result["temperatures"], result["shifts"])
    assert len(decoded(config)) == 4 * NUM_PROMPTS


def test_starting_over_decodes_everything_again(config):
    calibrate.run(config)
    path = Path(config.output) / "rollouts.jsonl"
    path.write_text(path.read_text().replace('"finish_reason": "', '"finish_reason": "old '))
    assert "skipped" not in calibrate.run(config, fresh=True)
    assert len(decoded(config)) == 4 * NUM_PROMPTS
    assert "old" not in path.read_text()


def test_a_retrained_drafter_is_decoded_and_fitted_again_whatever_scales_lie_there(config, tiny_target):
    calibrate.run(config)
    make_tiny_drafter(config.drafter, tiny_target, markov_rank=4)
    assert calibrate.run(config, dry_run=True)["to_do"] == 4 * NUM_PROMPTS
    calibrate.run(config)
    report = read_json(Path(config.output) / "calibration_report.json")
    Calibration.load(Path(config.drafter) / "calibration.json", drafter_sha256=report["drafter"]["sha256"])


def test_a_drafter_without_a_confidence_head_is_refused(config, tiny_target, tmp_path):
    folder = make_tiny_drafter(tmp_path / "dflash", tiny_target, architecture="dflash")
    with pytest.raises(ValueError, match=r"no confidence head.*drafter\.confidence_head=true"):
        calibrate.run(config.with_changes(drafter=str(folder)))


def test_a_domain_without_prompts_cannot_be_fitted_on(config):
    with pytest.raises(ValueError, match="fit_domains holds 'maths', but the prompts' domains are chat, math"):
        calibrate.run(config.with_changes(fit_domains=["maths"]))


def test_recorded_traffic_is_named_by_a_flag_and_without_any_the_remedy_is_told(config, tmp_path, capsys):
    path = tmp_path / "calibrate.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    options = {"default_config": "calibrate.yaml", "flags": calibrate.FLAGS}
    folder = tmp_path / "traffic"
    argv = ["--from-traffic", str(folder), "--config", str(path)]
    assert runner.main(CalibrateConfig, calibrate.run, **options, argv=[*argv, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (plan["from_traffic"], plan["rounds_read"]) == (str(folder), 0)
    assert runner.main(CalibrateConfig, calibrate.run, **options, argv=argv) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: {folder} holds no recorded round of drafter {config.drafter}; serve it with")
    assert runner.main(CalibrateConfig, calibrate.run, **options, argv=[*argv, "fit_domains=[math]"]) == 1
    assert "has no effect with from_traffic" in capsys.readouterr().err


def test_seeded_answers_may_be_left_out_and_are_decoded_as_requests_with_a_seed_are(config):
    calibrate.run(config.with_changes(seeded_samples=0))
    assert Calibration.load(Path(config.drafter) / "calibration.json").scales.keys() == {"greedy", "sampled"}
    assert len(decoded(config)) == 3 * NUM_PROMPTS
    assert {mode.name: mode.sampling.seeded for mode in config.modes} == {
        "greedy": "rejection",
        "sampled": "rejection",
        "sampled~2": "rejection",
        "seeded": "invariant",
    }
