"""Alerts are whole, and the documentation says of each what to do."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text())
    return [rule for group in content["spec"]["groups"] for rule in group["rules"]]


def test_every_alert_is_whole_and_in_the_docs(rules: list[dict[str, Any]]) -> None:
    table = (ROOT / "docs" / "kubernetes.md").read_text()
    for rule in rules:
        assert all(rule["expr"].count(pair[0]) == rule["expr"].count(pair[1]) for pair in ("()", "[]", "{}"))
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert f"| {rule['alert']} |" in table
    assert len({rule["alert"] for rule in rules}) == len(rules)
