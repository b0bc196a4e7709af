"""What the image must have for the manifests, the jobs and the operator; no daemon builds it here."""

import fnmatch
import re
from pathlib import Path

import pytest

from dspark.manifests.surroundings import APP_FOLDER

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "k8s" / "Dockerfile").read_text()
IGNORED = (ROOT / "k8s" / "Dockerfile.dockerignore").read_text().splitlines()
INSTRUCTIONS = [
    line.strip() for line in re.sub(r"\\\n", " ", DOCKERFILE).splitlines() if line and not line.startswith("#")
]


def copied() -> list[str]:
    return [name for line in INSTRUCTIONS if line.startswith("COPY ") for name in line.split()[1:-1]]


def test_all_that_is_copied_is_there_and_all_that_jobs_need_is_copied() -> None:
    assert [name for name in copied() if not (ROOT / name).exists()] == []
    assert {"platform", "jobs", "configs", "deployments", "prompts", "constraints.txt", "pyproject.toml"} <= set(
        copied()
    )


def test_the_build_context_holds_what_is_copied_and_nothing_else() -> None:
    kept = {line.removeprefix("!").rstrip("/") for line in IGNORED if line.startswith("!")}
    assert "*" in IGNORED
    assert kept == set(copied())


def test_torch_is_installed_first_exactly_and_alone() -> None:
    installs = [line for line in INSTRUCTIONS if "pip install" in line]
    assert len(installs) == 2
    assert "grep '^torch==' constraints.txt" in installs[0]
    assert "-c constraints.txt -e ." in installs[1]
    assert len(re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1


def test_it_does_not_run_as_root_and_its_folder_is_that_of_the_manifests() -> None:
    users = [line for line in INSTRUCTIONS if line.startswith("USER ")]
    assert users == ["USER 1000:1000"]
    assert f"WORKDIR {APP_FOLDER}" in INSTRUCTIONS
    serve = (ROOT / "k8s" / "base" / "serve.yaml").read_text()
    assert "runAsUser: 1000" in serve
    assert f"mountPath: {APP_FOLDER}/runs" in serve


@pytest.mark.parametrize("program", ["g++", "wget"])
def test_programs_that_kernels_and_probes_need_are_installed(program: str) -> None:
    assert any(program in line.split() for line in INSTRUCTIONS if "apt-get install" in line)


def test_there_is_a_target_for_each_tag_of_the_overlays() -> None:
    targets = {line.split()[-1] for line in INSTRUCTIONS if line.startswith("FROM ")}
    tags = re.findall(r"newTag: (\S+)\}", "".join(p.read_text() for p in (ROOT / "k8s").rglob("kustomization.yaml")))
    assert tags
    assert {tag.rpartition("-")[2] for tag in tags} <= targets


@pytest.mark.parametrize("name", ["runs/demo/answers/part.parquet", ".git/config", "key.pem", "jobs/.env", "mlflow.db"])
def test_nothing_private_gets_into_the_context(name: str) -> None:
    """By the rules' own order: the last one that matches decides."""
    included = True
    for rule in IGNORED:
        if rule and not rule.startswith("#"):
            pattern = rule.removeprefix("!").rstrip("/")
            inner = pattern.removeprefix("**/")
            names = [name, *map(str, Path(name).parents)]
            matches = any(fnmatch.fnmatch(one, pattern) or fnmatch.fnmatch(Path(one).name, inner) for one in names)
            included = rule.startswith("!") if matches else included
    assert not included
