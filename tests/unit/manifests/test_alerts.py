"""Alerts are whole, fire when they should and at no other time, and the documentation says of each what to do."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]

# Per alert, cases of series by the minute in promtool's notation, and how many alerts there are at the end.
STEADY = "0+600x2000"
CASES: list[tuple[str, str, dict[str, str], list[dict[str, str]]]] = [
    ("DsparkSilent", "nothing is scraped", {}, [{}]),
    (
        "DsparkSilent",
        "all replicas are silent while requests are open",
        {"dspark_replicas_running": "2x20", "dspark_replicas_silent": "2x20", "dspark_ingress_requests_open": "3x20"},
        [{}],
    ),
    (
        "DsparkSilent",
        "nobody asks, and there is no replica",
        {"dspark_replicas_running": "0x20", "dspark_replicas_silent": "0x20", "dspark_ingress_requests_open": "0x20"},
        [],
    ),
    (
        "DsparkSilent",
        "one of two answers",
        {"dspark_replicas_running": "2x20", "dspark_replicas_silent": "1x20", "dspark_ingress_requests_open": "3x20"},
        [],
    ),
    (
        "DsparkRequestsFail",
        "2 of 100",
        {
            'dspark_requests_total{finish_reason="error"}': "0+2x20",
            'dspark_requests_total{finish_reason="stop"}': "0+98x20",
        },
        [{}],
    ),
    (
        "DsparkRequestsFail",
        "1 of 200",
        {
            'dspark_requests_total{finish_reason="error"}': "0+1x20",
            'dspark_requests_total{finish_reason="stop"}': "0+199x20",
        },
        [],
    ),
    ("DsparkRequestsFail", "none ever", {'dspark_requests_total{finish_reason="stop"}': "0+99x20"}, []),
    (
        "DsparkRefuses",
        "everything",
        {'dspark_requests_refused_total{status="503"}': "0+9x20"},
        [{}],
    ),
    (
        "DsparkRefuses",
        "8 beside 100, of both kinds",
        {
            'dspark_requests_refused_total{status="429"}': "0+4x20",
            'dspark_requests_refused_total{status="503"}': "0+4x20",
            "dspark_requests_total": "0+100x20",
        },
        [{}],
    ),
    (
        "DsparkRefuses",
        "what was not allowed in the first place",
        {'dspark_requests_refused_total{status="400"}': "0+50x20", "dspark_requests_total": "0+100x20"},
        [],
    ),
    (
        "DsparkSlowFirstToken",
        "2 of 100 over ten seconds",
        {
            'dspark_time_to_first_token_seconds_bucket{le="10"}': "0+98x20",
            'dspark_time_to_first_token_seconds_bucket{le="30"}': "0+100x20",
            'dspark_time_to_first_token_seconds_bucket{le="+Inf"}': "0+100x20",
        },
        [{}],
    ),
    (
        "DsparkSlowFirstToken",
        "all within ten seconds",
        {
            'dspark_time_to_first_token_seconds_bucket{le="10"}': "0+100x20",
            'dspark_time_to_first_token_seconds_bucket{le="30"}': "0+100x20",
            'dspark_time_to_first_token_seconds_bucket{le="+Inf"}': "0+100x20",
        },
        [],
    ),
    ("DsparkPreempts", "ten a minute", {"dspark_num_preemptions_total": "0+10x30"}, [{}]),
    ("DsparkPreempts", "one a minute", {"dspark_num_preemptions_total": "0+1x30"}, []),
    (
        "DsparkAcceptanceFell",
        "from 2 tokens a round to 1.5",
        {"dspark_rounds_total": STEADY, "dspark_committed_tokens_total": "0+1200x1400 1680900+900x599"},
        [{}],
    ),
    (
        "DsparkAcceptanceFell",
        "twice the traffic, accepted as before",
        {
            "dspark_rounds_total": "0+600x1400 841200+1200x599",
            "dspark_committed_tokens_total": "0+1200x1400 1682400+2400x599",
        },
        [],
    ),
    (
        "DsparkAcceptanceFell",
        "no day before",
        {"dspark_rounds_total": "0+6x90", "dspark_committed_tokens_total": "0+6x90"},
        [],
    ),
    (
        "DsparkAcceptanceDrifts",
        "of one mode, on two replicas",
        {
            'dspark_acceptance_drift{mode="greedy",replica="a"}': "1x40",
            'dspark_acceptance_drift{mode="greedy",replica="b"}': "0x40",
            'dspark_acceptance_drift{mode="sampled",replica="a"}': "0x40",
        },
        [{"mode": "greedy"}],
    ),
    ("DsparkAcceptanceDrifts", "of none", {'dspark_acceptance_drift{mode="greedy"}': "0x40"}, []),
    (
        "DsparkConfidenceOff",
        "three for every two that stood, over two replicas",
        {
            'dspark_position_expected_total{replica="a"}': "0+30x120",
            'dspark_position_stood_total{replica="a"}': "0+15x120",
            'dspark_position_expected_total{replica="b"}': "0+30x120",
            'dspark_position_stood_total{replica="b"}': "0+25x120",
        },
        [{}],
    ),
    (
        "DsparkConfidenceOff",
        "eleven for every ten",
        {"dspark_position_expected_total": "0+11x120", "dspark_position_stood_total": "0+10x120"},
        [],
    ),
    (
        "DsparkConfidenceOff",
        "nothing is drafted",
        {"dspark_position_expected_total": "5x120", "dspark_position_stood_total": "4x120"},
        [],
    ),
    (
        "DsparkCostCurveOff",
        "steps take twice as long",
        {"dspark_measured_step_seconds_total": "0+40x120", "dspark_predicted_step_seconds_total": "0+20x120"},
        [{}],
    ),
    (
        "DsparkCostCurveOff",
        "a fifth longer",
        {"dspark_measured_step_seconds_total": "0+24x120", "dspark_predicted_step_seconds_total": "0+20x120"},
        [],
    ),
    (
        "DsparkDraftReplicaGone",
        "for one of two replicas",
        {'dspark_draft_link_up{replica="a"}': "1x20", 'dspark_draft_link_up{replica="b"}': "0x20"},
        [{}],
    ),
    (
        "DsparkDraftReplicaGone",
        "for a minute",
        {"dspark_draft_link_up": "1x15 0 1x5"},
        [],
    ),
    (
        "DsparkFleetSchedulerGone",
        "for both",
        {'dspark_fleet_attached{replica="a"}': "0x30", 'dspark_fleet_attached{replica="b"}': "0x30"},
        [{}],
    ),
    (
        "DsparkFleetSchedulerGone",
        "for one of two",
        {'dspark_fleet_attached{replica="a"}': "1x30", 'dspark_fleet_attached{replica="b"}': "0x30"},
        [],
    ),
    ("DsparkFleetSchedulerGone", "a lone replica needs none", {"dspark_fleet_attached": "0x30"}, []),
]


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


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(rules: list[dict[str, Any]]) -> None:
    names = {rule["alert"] for rule in rules}
    assert {name for name, _, _, fired in CASES if fired} == names
    assert {name for name, _, _, fired in CASES if not fired} == names


def test_prometheus_fires_them_in_these_cases_and_in_no_others(rules: list[dict[str, Any]], tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dspark", "rules": rules}]}))
    by_name = {rule["alert"]: rule for rule in rules}
    tests = [case_of(by_name[name], what, series, fired) for name, what, series, fired in CASES]
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run(["promtool", "test", "rules", "cases.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def case_of(rule: dict[str, Any], what: str, series: dict[str, str], fired: list[dict[str, str]]) -> dict[str, Any]:
    """A case as promtool reads it, looked at when its longest series ends."""
    minutes = max(
        (sum(int(part.rpartition("x")[2]) + 1 for part in text.split() if "x" in part) for text in series.values()),
        default=20,
    )
    annotations = {
        name: text.strip().replace("{{ $labels.mode }}", fired[0].get("mode", "") if fired else "")
        for name, text in rule["annotations"].items()
    }
    return {
        "name": f"{rule['alert']}: {what}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minutes - 1}m",
                "alertname": rule["alert"],
                "exp_alerts": [
                    {"exp_labels": rule["labels"] | labels, "exp_annotations": annotations} for labels in fired
                ],
            }
        ],
    }
