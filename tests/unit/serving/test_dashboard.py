"""The Grafana dashboard and the alerts ask for nothing that is not exported."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.serve.exceptions import DeploymentUnavailableError

from dspark.engine.remote_draft_state import RemoteDraftStats
from dspark.serving.config import FailoverConfig, FleetConfig, LimitsConfig
from dspark.serving.fleet_link import FleetLink
from dspark.serving.fleet_view import FleetView
from dspark.serving.gate import GateCounts
from dspark.serving.metrics import draft_link_families
from dspark.serving.replica_client import ReplicaClient
from dspark.serving.schedule_metrics import fleet_families
from dspark.serving.target_replica import TargetReplica
from dspark.speculation.fleet import Lease, ReplicaReport, Share
from tiny_drafter import make_tiny_drafter
from tiny_serving import TEXT, completion, post, serve_config

MONITORING = Path(__file__).resolve().parents[3] / "k8s" / "monitoring"
DASHBOARD = MONITORING / "grafana-dashboard.json"
SUFFIX = {"counter": "_total"}
METRIC = re.compile(r"\b(?:dspark_|vllm:)[a-z_]+\b")


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    content = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in content["panels"] if panel["type"] != "row"]


def attached_link() -> FleetLink:
    """With a lease that says all that a lease can say."""
    lease = Lease(Share(max_drafted=3, capacity=9, floor=2), 1.0, 1)
    link = FleetLink(
        FleetConfig(),
        report=lambda sequence, with_curve: ReplicaReport("r", sequence),
        connect=lambda config: lambda report: lease,
    )
    link.exchange_once()
    return link


def alerts() -> dict[str, str]:
    """Expressions by name."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["spec"]["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def told_by_the_api() -> set[str]:
    """Names of the samples that a process of the API tells of itself, whether there are replicas or not."""
    client = ReplicaClient(no_replica(), FailoverConfig(), timeout_s=1.0)
    counts = GateCounts(FleetView(LimitsConfig()))
    families = [*asyncio.run(client.metrics()), *counts.families("a")]
    return {sample.name for family in families for sample in family.samples}


def no_replica() -> Any:
    """A handle of Serve's to a deployment that is scaled to zero."""

    async def under_way() -> list[Any]:
        raise DeploymentUnavailableError("there is none")  # type: ignore[arg-type]

    broadcast = SimpleNamespace(_fetch_replica_results_async=under_way)
    return SimpleNamespace(broadcast=lambda method: broadcast, options=lambda **_: None)


@pytest.fixture(scope="module")
def exported(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every name of a sample that a replica exports, of positions and refusals also those that are not there yet."""
    folder = tmp_path_factory.mktemp("dashboard")
    replica = TargetReplica(
        serve_config(
            tiny_target,
            drafter=str(make_tiny_drafter(folder / "drafter", tiny_target)),
            profile_without_curve=True,
            traffic={"folder": str(folder / "traffic")},
            watch={"fine_tune": {"command": ["python", "jobs/train.py"]}},
        )
    )
    families = [*asyncio.run(replica.metrics()), *fleet_families(attached_link())]
    families += draft_link_families(RemoteDraftStats())
    replica.close()
    bare = {family.name + SUFFIX.get(family.type, "") for family in families}
    return bare | {sample.name for family in families for sample in family.samples}


def test_every_metric_of_the_dashboard_is_exported(panels: list[dict[str, Any]], exported: set[str]) -> None:
    asked = {name for panel in panels for target in panel["targets"] for name in METRIC.findall(target["expr"])}
    assert len(asked) > 30
    assert asked - exported == set()


def test_every_metric_of_an_alert_is_exported(exported: set[str]) -> None:
    asked = {name for rule in alerts().values() for name in METRIC.findall(rule)}
    assert len(asked) > 10
    assert asked - exported - told_by_the_api() == set()


def test_silence_is_heard_from_what_the_api_tells_without_a_replica() -> None:
    """Scaled to zero no replica tells anything, and nothing is wrong."""
    assert set(METRIC.findall(alerts()["DsparkSilent"])) <= told_by_the_api()


def test_refusals_are_heard_where_no_replica_counts_requests() -> None:
    """A comparison with nothing is nothing."""
    assert "(sum(rate(dspark_requests_total[5m])) or vector(0))" in alerts()["DsparkRefuses"]


def test_drift_has_an_alert_that_needs_no_yesterday() -> None:
    (rule,) = [rule for rule in alerts().values() if "dspark_acceptance_drift" in rule]
    assert "offset" not in rule
    assert ">= 1" in rule


def test_what_no_other_engine_tells_is_on_the_dashboard(panels: list[dict[str, Any]]) -> None:
    text = json.dumps(panels)
    for name in (
        "dspark_verified_tokens_total",
        "dspark_verify_length_bucket",
        "dspark_position_expected_total",
        "dspark_position_stood_total",
        "dspark_predicted_step_seconds_total",
        "dspark_measured_step_seconds_total",
        "dspark_lease_age_seconds",
        "dspark_fleet_fallbacks_total",
        "dspark_confidence_ece_mean",
        "dspark_acceptance_ratio",
        "dspark_traffic_rounds_total",
    ):
        assert name in text


def test_drafted_copied_and_plain_decodes_are_all_of_them(panels: list[dict[str, Any]], tiny_target: Path) -> None:
    """By the panel's own expressions, of what an engine counted that drafts, copies and does neither."""
    (panel,) = [panel for panel in panels if panel["title"] == "Drafted, copied, plain"]
    drafter = {"engine": {"page_size": 4, "kv_tokens": 4096, "max_running_requests": 8, "lookup": {}}}
    replica = TargetReplica(serve_config(tiny_target, **drafter))
    for speculation in (True, False):
        post(replica, TEXT, completion(max_tokens=60, speculation=speculation))
    families = asyncio.run(replica.metrics())
    replica.close()
    values = {sample.name: sample.value for family in families for sample in family.samples}
    shares = []
    for target in panel["targets"]:
        text = re.sub(r"sum\(rate\((\w+)\{[^}]*\}\[[^\]]*\]\)\)", lambda found: str(values[found[1]]), target["expr"])
        shares.append(eval(text.replace("clamp_min", "max")))
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0
    assert shares[2] > 0.1  # what was decoded plainly


def test_panels_lie_beside_each_other_and_their_parentheses_close(panels: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for target in panel["targets"]:
            assert all(target["expr"].count(pair[0]) == target["expr"].count(pair[1]) for pair in ("()", "[]", "{}"))
    assert len({panel["id"] for panel in panels}) == len(panels)
