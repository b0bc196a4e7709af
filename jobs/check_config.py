"""Check every config, deployment file and manifest, strictly, without a cluster: `make check-config`."""

import ast
import importlib
import logging
import shutil
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

import runner
from dspark.config import Config, build_config, config_problems, nearest, read_content
from dspark.errors import DsparkError, one_line
from dspark.manifests.check import check_manifests
from dspark.manifests.curve_rules import PROFILE_JOB, missing_curve, profiled_threads
from dspark.manifests.documents import Problem, shown
from dspark.manifests.served import write_serve_configs
from dspark.serving.deployment_file import DeploymentFile

C = TypeVar("C", bound=Config)

ROOT = runner.REPOSITORY
JOBS = ROOT / "jobs"

log = logging.getLogger("dspark.check_config")


class CheckConfig(Config):
    """What is checked; folders relative to the repository."""

    configs: tuple[str, ...] = ("configs",)
    """A file there is for the job whose name its own begins with."""
    deployments: tuple[str, ...] = ("deployments",)
    manifests: str | None = "k8s"
    write_serve_config: bool = False
    """First write every serveConfigV2 in the manifests anew, from the deployment file that its RayService names."""


def run(config: CheckConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Check everything; returns counts. Raises: DsparkError when there are problems, which are printed before."""
    written: list[str] = []
    if config.write_serve_config and config.manifests is not None and not dry_run:
        written = write_serve_configs(ROOT / config.manifests, ROOT)
        for file in written:
            print(f"written: {file}", flush=True)
    classes = job_configs()
    configs, deployments = _files(config.configs), _files(config.deployments)
    if dry_run:
        return {
            "stage": "check_config",
            "dry_run": True,
            "files": len(configs) + len(deployments),
            "manifests": config.manifests,
        }
    problems = [problem for path in configs for problem in config_file_problems(path, classes)]
    problems += [problem for path in deployments for problem in file_problems(path, DeploymentFile)]
    problems += curve_problems(configs, deployments, classes)
    if config.manifests is not None:
        with_kubectl = shutil.which("kubectl") is not None
        if not with_kubectl:
            log.warning("kubectl not found: overlays are not rendered, manifests are checked for their form only")
        problems += check_manifests(ROOT / config.manifests, ROOT, classes, with_kubectl=with_kubectl)
    for problem in problems:
        print(problem, flush=True)
    if problems:
        raise DsparkError(f"{len(problems)} problems found; each stands above with its file and place")
    return {"stage": "check_config", "files": len(configs) + len(deployments), "problems": 0, "written": written}


def job_configs() -> dict[str, type[Config]]:
    """The config class of each job, by what the job gives to `runner.main`."""
    found = ((path.stem, _config_of(path)) for path in sorted(JOBS.glob("*.py")))
    return {name: config_class for name, config_class in found if config_class is not None}


def _config_of(path: Path) -> type[Config] | None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "runner.main":
            module = sys.modules[__name__] if path.stem == Path(__file__).stem else importlib.import_module(path.stem)
            config_class: type[Config] = attrgetter(ast.unparse(node.args[0]))(module)
            return config_class
    return None


def config_file_problems(path: Path, classes: dict[str, type[Config]]) -> Iterator[Problem]:
    """Of the config of a job."""
    job = job_of(path, classes)
    if job is None:
        yield Problem(str(path.relative_to(ROOT)), (), None, f"is named for no job{nearest(path.stem, classes)}")
    else:
        yield from file_problems(path, classes[job])


def file_problems(path: Path, config_class: type[Config]) -> Iterator[Problem]:
    """What a file's class refuses, and YAML files that it names and that are not there."""
    file = str(path.relative_to(ROOT))
    try:
        content = read_content(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, TypeError) as error:
        yield Problem(file, (), None, f"is no YAML mapping: {one_line(error)}")
        return
    for problem in config_problems(config_class, content):
        text = None if problem.value is None else shown(problem.value)
        yield Problem(file, problem.location, text, problem.message)
    for key, value in content.items():
        if isinstance(value, str) and value.endswith((".yaml", ".yml")) and not _is_there(value, path):
            there = [str(other.relative_to(ROOT)) for other in (ROOT / value).parent.glob("*.yaml")]
            yield Problem(file, (key,), shown(value), f"is no file{nearest(value, there)}")


def curve_problems(configs: list[Path], deployments: list[Path], classes: dict[str, type[Config]]) -> Iterator[Problem]:
    """Of deployment files whose drafter some config profiles, but none with the threads that it is served with."""
    profiles = [path for path in configs if job_of(path, classes) == PROFILE_JOB]
    profiled = profiled_threads(config for path in profiles for config in _sound(path, classes[PROFILE_JOB]))
    for path in deployments:
        for deployed in _sound(path, DeploymentFile):
            for number, application in enumerate(deployed.applications):
                message = missing_curve(application.args, profiled)
                if message is not None:
                    place = ("applications", number, "args", "threads")
                    yield Problem(str(path.relative_to(ROOT)), place, str(application.args.threads), message)


def _sound(path: Path, config_class: type[C]) -> list[C]:
    """The file's config, or none where it is refused, which `file_problems` tells of."""
    try:
        return [build_config(config_class, read_content(path.read_text(encoding="utf-8")))]
    except (yaml.YAMLError, TypeError, ValueError):
        return []


def _is_there(name: str, path: Path) -> bool:
    """In the repository, or beside the file that names it."""
    return any((folder / name).is_file() for folder in (ROOT, path.parent))


def job_of(path: Path, classes: dict[str, type[Config]]) -> str | None:
    """`train_dflash.yaml` and `train.long.yaml` are files of `train`: the longest name that the file's starts with."""
    name = path.name.partition(".")[0]
    return max((job for job in classes if name == job or name.startswith(f"{job}_")), key=len, default=None)


def _files(folders: tuple[str, ...]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.y*ml"))]


if __name__ == "__main__":
    sys.exit(runner.main(CheckConfig, run, default_config="check_config.yaml"))
