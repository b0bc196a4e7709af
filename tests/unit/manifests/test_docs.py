"""Commands of docs/kubernetes.md: run here, or marked as needing a cluster, and about things that there are."""

import re
from pathlib import Path

import pytest

from dspark.manifests.documents import Document

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
    if line.strip()
]
HERE = {"make check-config": "jobs/check_config.py", "make serve-config": "write_serve_config=true"}
SHELL = ("export ", "umask ", "for ", "done")


def test_every_command_is_run_by_a_test_or_marked() -> None:
    assert len(COMMANDS) > 20
    unmarked = [line for line in COMMANDS if "# cluster" not in line and not line.startswith(SHELL)]
    assert set(unmarked) == set(HERE)


@pytest.mark.parametrize(("command", "runs"), HERE.items())
def test_the_commands_that_run_here_are_targets_of_what_tests_run(command: str, runs: str) -> None:
    target = command.removeprefix("make ")
    recipe = (ROOT / "Makefile").read_text().partition(f"\n{target}:")[2].split("\n\n")[0]
    assert runs in recipe


def test_what_commands_name_is_there(rendered: dict[str, list[Document]]) -> None:
    documents = [document for each in rendered.values() for document in each]
    subjects = {f"{document.kind.lower()}/{document.name}" for document in documents}
    parts = {document.get("metadata", "labels", "app.kubernetes.io/component") for document in documents}
    text = "\n".join(COMMANDS)
    assert set(re.findall(r"component=([a-z]+)", text)) <= parts
    for stage in ("data", "train", "evaluate"):
        assert stage in parts
        assert f"rayjob/dspark-{stage}" in subjects
    for name in re.findall(r"(?:rayservice|deployment|rayjob)/[-a-z]+(?![-a-z]*\$)", text):
        assert name in subjects or name == "rayjob/dspark-", name
    for path in re.findall(r"k8s/[-a-zA-Z/.]+", TEXT):
        assert (ROOT / path.rstrip(".")).exists(), path


def test_symptoms_and_alerts_name_files_and_settings_that_exist() -> None:
    for path in re.findall(r"`((?:jobs|deployments|configs)/[-a-z0-9_./]+)`", TEXT):
        assert (ROOT / path).exists(), path
    engine = (ROOT / "platform" / "dspark" / "engine" / "config.py").read_text()
    for setting in re.findall(r"`engine\.([a-z_]+)`", TEXT):
        assert f"    {setting}:" in engine, setting
