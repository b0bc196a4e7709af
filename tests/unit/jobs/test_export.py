"""The export job: which folders it writes, what their cards say, what it refuses, and when it writes again."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import adopt
import export
import runner
from dspark.config import build_config
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.export import FORMATS, ExportConfig
from dspark.drafters.export_conversions import CannotExport
from dspark.drafters.released import AdoptConfig
from dspark.engine.drafter_folder import drafter_sha256
from dspark.errors import Mismatch, MissingInput
from dspark.provenance import read_json, write_json
from dspark.speculation.calibration import Calibration, SlotScales
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.sglang_tables import calibration_from_sts, curve_from_sps
from engine_loaders import LOADERS
from tiny_drafter import make_tiny_drafter

SCALES = {"greedy": SlotScales((1.5, 0.7, 1.0, 1.0), (0.0,) * 4), "sampled": SlotScales((1.1,) * 4, (0.2,) * 4)}
CURVE = CostCurve((1, 8), (0.01, 0.02), (1, 4), (0.001, 0.003), fingerprint={"processor": "some", "device": "cpu"})


@pytest.fixture
def content(tmp_path: Path, tiny_target: Path) -> dict[str, Any]:
    return make_content(tmp_path, tiny_target)


def make_content(folder: Path, target: Path, **shape: Any) -> dict[str, Any]:
    drafter = make_tiny_drafter(folder / "drafter", target, **shape)
    digest = drafter_sha256(drafter)
    Calibration(SCALES, digest, {"domains": ["math"], "rounds": {"greedy": 12}}).save(drafter / "calibration.json")
    CURVE.save(drafter / "cost_curve.json")
    write_json(drafter / "result.json", {"steps": 760, "anchors": 387_666, "parameters": 13_411_073})
    figures = {"domains": {"math": {"accepted_length": 2.09}}, "overall": {"accepted_length": 1.751}}
    metrics = {"drafter": {"sha256": digest}, "modes": {"greedy": figures}}
    write_json(folder / "evaluation" / "metrics.json", metrics)
    return {
        "drafter": str(drafter),
        "output": str(folder / "export"),
        "license": "apache-2.0",
        "target_name": "somebody/target-4b",
        "evaluation": str(folder / "evaluation"),
        "tracking": {"enabled": False},
    }


def run(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    return export.run(build_config(ExportConfig, content), **options)


def card_of(content: dict[str, Any], name: str) -> str:
    return (Path(content["output"]) / name / "README.md").read_text()


def command_of(card: str) -> list[str]:
    """The words of the card's command line, as a shell splits them."""
    command = card.split("```bash\n")[1].split("\n```")[0]
    return shlex.split(command.replace("\\\n", " "))


def test_every_format_is_written_as_its_engine_wants_it(content):
    result = run(content)
    assert list(result["written"]) == list(FORMATS)
    assert result["refused"] == {}
    for name, loads in LOADERS.items():
        folder = Path(content["output"]) / name
        loads(read_json(folder / "config.json"), load_file(str(folder / "model.safetensors")), target_vocab_size=320)
    assert not list(Path(content["output"]).rglob(".tmp-*"))


def test_our_own_format_is_the_drafter_byte_for_byte_with_all_that_belongs_to_it(content):
    run(content)
    for name in ("config.json", "model.safetensors", "provenance.json", "calibration.json", "cost_curve.json"):
        copied = Path(content["output"]) / "dspark" / name
        assert copied.read_bytes() == (Path(content["drafter"]) / name).read_bytes()


def test_the_card_says_target_data_tau_licence_and_the_command(content):
    run(content)
    for name in FORMATS:
        card = card_of(content, name)
        header = yaml.safe_load(card.split("---\n")[1])
        assert (header["license"], header["base_model"]) == ("apache-2.0", "somebody/target-4b")
        assert "| anchors | 387,666 |" in card
        assert "| greedy | math | 2.09 |" in card
        assert "| greedy | overall | 1.75 |" in card
        assert f"in the layout `{name}`" in card


def test_the_vllm_command_names_the_method_and_the_block(content):
    run(content)
    words = command_of(card_of(content, "vllm"))
    assert words[:3] == ["vllm", "serve", "somebody/target-4b"]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["method"] == "dspark"
    assert speculative["num_speculative_tokens"] == 4
    assert speculative["enable_adaptive_verification"] is True
    assert command_of(card_of(content, "speculators")) == ["vllm", "serve", "."]


def test_the_sglang_command_names_the_files_beside_it_and_these_load_back(content):
    run(content)
    folder = Path(content["output"]) / "sglang"
    words = command_of(card_of(content, "sglang"))
    assert words[0] == "SGLANG_RAGGED_VERIFY_MODE=compact"
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options["--speculative-algorithm"] == "DSPARK"
    assert options["--speculative-dspark-block-size"] == "4"
    costs = read_json(folder / options["--speculative-dspark-sps-table-path"])
    assert curve_from_sps(costs, fingerprint={}).verify_s == CURVE.verify_s
    scales = read_json(folder / options["--speculative-dspark-confidence-sts-path"])
    assert calibration_from_sts(scales, mode="sampled").scales["sampled"].temperatures == SCALES["sampled"].temperatures
    greedy = read_json(folder / "sts_greedy.json")
    assert (greedy["num_samples"], greedy["dataset"]) == (12, "math")
    assert calibration_from_sts(greedy, mode="greedy").scales["greedy"] == SCALES["greedy"]


def test_what_a_format_has_no_place_for_is_said(content):
    run(content)
    assert "the shifts of sampled decoding are left out" in card_of(content, "sglang")
    assert "jobs/calibrate.py shift=false" in card_of(content, "sglang")
    assert "temperatures and shifts of the confidences are left out" in card_of(content, "vllm")


def test_without_confidences_sglang_verifies_whole_blocks(tmp_path, tiny_target):
    content = make_content(tmp_path, tiny_target, confidence_head=False)
    run(content)
    words = command_of(card_of(content, "sglang"))
    assert words[0] == "SGLANG_RAGGED_VERIFY_MODE=static"
    assert "--speculative-dspark-sps-table-path" not in words


def test_what_an_engine_cannot_load_is_refused_in_a_line_and_the_rest_is_written(tmp_path, tiny_target, capsys):
    content = make_content(tmp_path, tiny_target, learned_mask_embedding=True)
    result = run(content)
    assert list(result["written"]) == ["dspark", "deepspec", "vllm", "speculators"]
    assert "SGLang cannot load a drafter with learned_mask_embedding = True" in result["refused"]["sglang"]
    assert "sglang: refused, SGLang cannot load" in capsys.readouterr().out
    assert not (Path(content["output"]) / "sglang").exists()
    assert "`sglang`: SGLang cannot load" in card_of(content, "vllm")


def test_when_nothing_can_be_written_the_job_fails_with_the_reasons(tmp_path, tiny_target):
    content = make_content(tmp_path, tiny_target, anchor_fusion=True) | {"formats": ["vllm", "sglang"]}
    with pytest.raises(CannotExport, match=r"SGLang cannot load .* anchor_fusion = True.*vLLM cannot load"):
        run(content)
    assert not Path(content["output"]).exists()


def test_a_reduced_vocabulary_is_filled_up_from_the_target_and_drafts_the_same(tmp_path, tiny_target):
    content = make_content(tmp_path, tiny_target, draft_vocab_size=100) | {"dtype": "float32"}
    run(content)
    wide = load_drafter(Path(content["output"]) / "deepspec")
    assert wide.config.draft_vocab_size == 320
    assert "has no reduced vocabulary" in card_of(content, "sglang")


@pytest.mark.parametrize("name", ["deepspec", "sglang", "vllm"])
def test_an_export_can_be_adopted_again_and_drafts_what_it_did(content, tmp_path, tiny_target, name):
    run(content | {"dtype": "float32"})
    target = {"name": str(tiny_target), "dtype": "float32", "device": "cpu"}
    adopted = {"drafter": str(Path(content["output"]) / name), "target": target, "output": str(tmp_path / "adopted")}
    adopt.run(build_config(AdoptConfig, adopted | {"tracking": {"enabled": False}}))
    ours, theirs = (load_drafter(folder).state_dict() for folder in (content["drafter"], tmp_path / "adopted"))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)


def test_a_second_run_writes_nothing_and_a_change_writes_again(content):
    first = run(content)
    card = Path(content["output"]) / "vllm" / "README.md"
    written = card.stat().st_mtime_ns
    assert run(content) == first | {"skipped": True}
    assert card.stat().st_mtime_ns == written
    run(content, fresh=True)
    assert card.stat().st_mtime_ns > written
    run(content | {"license": "mit"})
    assert "license: mit" in card.read_text()


def test_a_dry_run_says_sizes_and_refusals_and_writes_nothing(content, capsys):
    assert run(content, dry_run=True)["dry_run"]
    assert "vllm: 0.1 MB" in capsys.readouterr().out
    assert not Path(content["output"]).exists()


def test_figures_of_another_drafter_are_refused(content):
    metrics = Path(content["evaluation"]) / "metrics.json"
    write_json(metrics, read_json(metrics) | {"drafter": {"sha256": "another"}})
    with pytest.raises(Mismatch, match=r"is of drafter another, but .* is to be exported; run jobs/evaluate\.py"):
        run(content)


def test_a_missing_evaluation_and_a_missing_drafter_name_their_jobs(content):
    with pytest.raises(MissingInput, match=r"no evaluation at nowhere; make it with jobs/evaluate\.py"):
        run(content | {"evaluation": "nowhere"})
    with pytest.raises(MissingInput, match=r"no complete drafter at nowhere.*jobs/train\.py"):
        run(content | {"drafter": "nowhere"})


def test_as_a_command_it_ends_with_one_line_of_json(content, tmp_path, capsys):
    write_json(tmp_path / "export.yaml", content)  # JSON is YAML
    arguments = ["--config", str(tmp_path / "export.yaml"), "formats=[vllm]"]
    assert runner.main(ExportConfig, export.run, default_config="export.yaml", argv=arguments) == 0
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])["written"]) == ["vllm"]
