"""A new set: what is chosen for a target, and that every file written is one that its job takes."""

import json
from pathlib import Path

import pytest
import transformers
import yaml

import new_set
from dspark.config import build_config, load_config
from dspark.data.answers import GenerateConfig
from dspark.data.prompts import read_prompts
from dspark.drafters.initialize import resolve_mask_token
from dspark.errors import Mismatch
from dspark.evaluation.config import EvaluateConfig
from dspark.serving.config import ServeConfig
from dspark.targets import TargetConfig, stop_token_ids
from dspark.training.config import TrainConfig
from test_configs import config_class
from tiny_target import make_tiny_target

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 200 prompts, one of them empty, and the repository's sets."""
    rows = [{"id": f"p{i}", "prompt": f"How many are {i} and {i + 1}?"} for i in range(199)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + json.dumps({"id": "none", "prompt": ""}) + "\n"
    (tmp_path / "own.jsonl").write_text(text, encoding="utf-8")
    for folder in ("configs", "deployments"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs" / "demo").symlink_to(ROOT / "configs" / "demo")
    (tmp_path / "deployments" / "colocated.yaml").symlink_to(ROOT / "deployments" / "colocated.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new_set_config(target: Path, **changes: object) -> new_set.NewSetConfig:
    content = {"name": "own", "target": {"name": str(target), "dtype": "float32"}, "prompts": ["own.jsonl"]}
    return build_config(new_set.NewSetConfig, content | changes)


def test_every_file_is_taken_by_its_job_and_paths_lead_from_stage_to_stage(workplace, tiny_target):
    result = new_set.run(new_set_config(tiny_target))
    loaded = {
        Path(name).stem: load_config(config_class(Path(name).stem), name)
        for name in result["files"]
        if name.startswith("configs")
    }
    assert set(loaded) == {*new_set.STAGES, "pipeline"}
    assert loaded["cache"].answers == loaded["generate"].output == "runs/own/answers"
    assert loaded["train"].cache == loaded["cache"].output
    for stage in ("evaluate", "calibrate", "profile_engine", "benchmark"):
        assert loaded[stage].drafter == loaded["train"].output == "runs/own/drafter"
        assert loaded[stage].target.name == str(tiny_target)
    deployment = yaml.safe_load(Path("deployments/own.yaml").read_text())
    served = build_config(ServeConfig, deployment["applications"][0]["args"])
    assert (served.drafter, served.target.name) == ("runs/own/drafter", str(tiny_target))
    assert loaded["ask"].deployment == "deployments/own.yaml"
    assert len(loaded["ask"].questions) == 3


def test_prompts_are_answered_several_times_and_a_share_is_held_out_of_all_stages(workplace, tiny_target):
    chosen = new_set.run(new_set_config(tiny_target))
    assert (chosen["prompts"], sum(chosen["rejected"].values())) == (199, 1)
    assert chosen["answers_per_prompt"] == 5
    generate = load_config(GenerateConfig, "configs/own/generate.yaml")
    asked = read_prompts(generate.prompts, seed=0, heldout_fraction=generate.heldout_fraction).prompts
    evaluate = load_config(EvaluateConfig, "configs/own/evaluate.yaml")
    measured = read_prompts(evaluate.sources, seed=0, heldout_fraction=evaluate.heldout_fraction).prompts
    held_out = {prompt.id for prompt in measured if prompt.split == "heldout"}
    trained = {prompt.id.partition("~")[0] for prompt in asked if prompt.split == "train"}
    assert 25 <= len(held_out) <= 75
    assert trained.isdisjoint(held_out)
    assert len(trained) + len(held_out) == 199
    assert sum(prompt.split == "train" for prompt in asked) == 5 * len(trained)


def test_files_that_name_their_split_keep_it(workplace, tiny_target):
    (workplace / "asked.jsonl").write_text(json.dumps({"id": "h", "prompt": "And this?"}) + "\n")
    sources = [{"path": "own.jsonl", "split": "train"}, {"path": "asked.jsonl", "split": "heldout"}]
    chosen = new_set.run(new_set_config(tiny_target, prompts=sources))
    assert (chosen["prompts"], chosen["held out"]) == (200, 1)
    generate = load_config(GenerateConfig, "configs/own/generate.yaml")
    assert [source.path for source in generate.prompts].count("asked.jsonl") == 1
    evaluate = load_config(EvaluateConfig, "configs/own/evaluate.yaml")
    found = read_prompts(evaluate.sources, seed=0, heldout_fraction=evaluate.heldout_fraction).prompts
    assert [prompt.id for prompt in found if prompt.split == "heldout"] == ["h"]


def test_prompts_of_one_split_alone_are_refused(workplace, tiny_target):
    with pytest.raises(ValueError, match="none of the 199 prompts is held out"):
        new_set.run(new_set_config(tiny_target, prompts=[{"path": "own.jsonl", "split": "train"}]))


def test_the_mask_token_is_one_that_the_target_never_writes(tmp_path):
    folder = make_tiny_target(tmp_path / "target", padded_rows=4)
    target = TargetConfig(name=str(folder), dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert new_set.unused_token(target, 324) == 320, "a row beyond the tokenizer's tokens"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved|>"]})
    tokenizer.save_pretrained(folder)
    assert new_set.unused_token(target, 324) == "<|reserved|>"
    assert resolve_mask_token("<|reserved|>", tokenizer, 324) == 320


def test_without_a_token_to_spare_one_is_taken_that_ends_no_answer(tiny_target):
    target = TargetConfig(name=str(tiny_target), dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_target)
    token_id = resolve_mask_token(new_set.unused_token(target, 320), tokenizer, 320)
    assert token_id not in stop_token_ids(target, tokenizer)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(36, [1, 9, 17, 25, 33]), (40, [1, 10, 19, 28, 37]), (30, [1, 8, 14, 20, 27]), (4, [1]), (2, [0]), (1, [0])],
)
def test_layers_are_those_of_the_released_drafters(num_layers, expected):
    assert new_set.spread_layers(num_layers) == expected


def test_a_set_that_was_changed_is_not_written_over(workplace, tiny_target):
    config = new_set_config(tiny_target)
    assert new_set.run(config) == new_set.run(config)
    Path("configs/own/train.yaml").write_text("steps: 7\n")
    with pytest.raises(Mismatch, match=r"configs/own/train\.yaml is there and differs; use --fresh"):
        new_set.run(config)
    new_set.run(config, fresh=True)
    assert load_config(TrainConfig, "configs/own/train.yaml").steps > 7


def test_dry_run_writes_nothing(workplace, tiny_target):
    assert new_set.run(new_set_config(tiny_target), dry_run=True)["dry_run"]
    assert not Path("configs/own").exists()


def test_a_set_to_start_from_that_is_not_there_is_named(workplace, tiny_target):
    with pytest.raises(ValueError, match=r"configs/demmo/train\.yaml not found; set based_on"):
        new_set.run(new_set_config(tiny_target, based_on="configs/demmo"))
