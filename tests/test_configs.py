"""Every YAML file in the repository loads as the config of its job."""

import importlib
from pathlib import Path

import pytest
import yaml

from dspark.config import Config, build_config, load_config

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for folder in ("configs", "deployments") for path in (ROOT / folder).rglob("*.y*ml"))
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem != "runner")

CONFIG_OF = {
    "adopt": "dspark.drafters.released:AdoptConfig",
    "generate": "dspark.data.answers:GenerateConfig",
    "cache": "dspark.data.capture:CacheConfig",
    "train": "dspark.training.config:TrainConfig",
    "evaluate": "dspark.evaluation.config:EvaluateConfig",
    "export": "dspark.drafters.export:ExportConfig",
    "ask": "dspark.evaluation.questions:AskConfig",
    "check_config": "check_config:CheckConfig",
    "benchmark": "dspark.evaluation.load_config:BenchmarkConfig",
    "colocated": "dspark.serving.deployment_file:DeploymentFile",  # what `serve run` is given
    "compare": "compare:CompareConfig",
    "calibrate": "dspark.evaluation.config:CalibrateConfig",
    "paper": "dspark.evaluation.paper_config:PaperConfig",
    "dspark": "dspark.serving.deployment_file:DeploymentFile",
    "new_set": "new_set:NewSetConfig",
    "pipeline": "pipeline:PipelineConfig",
    "plan": "plan:PlanConfig",
    "profile_engine": "dspark.evaluation.profiling:ProfileConfig",
    "report": "dspark.evaluation.paper_config:PaperConfig",
}
DEFAULTS = dict.fromkeys(("paper", "report"), "configs/paper/paper_quick.yaml")  # of jobs without a file of the demo's


def job_of(path: Path) -> str:
    """`train_dflash.yaml` and `train.long.yaml` are files of `train`: the longest name that the file's starts with."""
    name = path.name.partition(".")[0]
    return max((job for job in CONFIG_OF if name == job or name.startswith(f"{job}_")), key=len, default=name)


def config_class(job: str) -> type[Config]:
    module, _, name = CONFIG_OF[job].partition(":")
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, Config)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_loads_as_the_config_of_its_job(path: Path) -> None:
    assert job_of(path) in CONFIG_OF, f"{path.name} does not start with the name of a job: {sorted(CONFIG_OF)}"
    load_config(config_class(job_of(path)), path)


@pytest.mark.parametrize("job", sorted(CONFIG_OF))
def test_a_misspelt_key_is_refused_with_the_nearest_one(job: str) -> None:
    folder = "deployments" if job in ("colocated", "dspark") else "configs/demo"
    demo = yaml.safe_load((ROOT / DEFAULTS.get(job, f"{folder}/{job}.yaml")).read_text(encoding="utf-8"))
    for key in config_class(job).model_fields:
        with pytest.raises(ValueError, match=f"unknown key '{key}x'; did you mean '{key}'"):
            build_config(config_class(job), {**demo, f"{key}x": 1})


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_its_demo_config_and_its_class(job: str) -> None:
    assert job in CONFIG_OF
    assert (ROOT / DEFAULTS.get(job, f"configs/demo/{job}.yaml")).is_file()


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("train.yaml", "train"),
        ("train_dflash.yaml", "train"),
        ("profile_engine.yaml", "profile_engine"),
        ("benchmark_server.yaml", "benchmark"),
        ("a.b.yaml", "a"),
    ],
)
def test_job_of_takes_the_longest_job_name_that_the_file_starts_with(name: str, job: str) -> None:
    assert job_of(Path(name)) == job
