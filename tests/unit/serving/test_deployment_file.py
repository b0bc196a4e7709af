"""Deployment files load strictly here, and Ray Serve takes them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from dspark.config import build_config, load_config
from dspark.serving.autoscaling import HeadroomPolicy
from dspark.serving.deployment_file import DeploymentFile

ROOT = Path(__file__).resolve().parents[3]
AUTOSCALING = "dspark_autoscaling.yaml"
POLICY = "dspark.serving.autoscaling:HeadroomPolicy"
FILES = sorted((ROOT / "deployments").glob("*.yaml"))


def content() -> Any:
    return yaml.safe_load((ROOT / "deployments" / "dspark.yaml").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_loads(path: Path) -> None:
    ours = load_config(DeploymentFile, path)
    serves = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert [app.import_path for app in serves.applications] == [app.import_path for app in ours.applications]
    assert [d.name for app in serves.applications for d in app.deployments] == [
        d.name for app in ours.applications for d in app.deployments
    ]


def test_the_autoscaling_file_is_the_colocated_one_but_for_how_many_there_are() -> None:
    """And its policy is one that Serve can make."""
    demo, scaled = (
        yaml.safe_load((ROOT / "deployments" / name).read_text()) for name in ("colocated.yaml", AUTOSCALING)
    )
    (own,), (demos,) = scaled["applications"], demo["applications"]
    assert {k: v for k, v in own["args"].items() if k not in ("scaling", "threads")} == {
        k: v for k, v in demos["args"].items() if k != "threads"
    }
    assert own["deployments"][0] == demos["deployments"][0]
    config = AutoscalingConfig(**own["deployments"][1]["autoscaling_config"])
    assert config.min_replicas == 0
    assert _resolve_policy_callable(config.policy).__class__.__name__ == HeadroomPolicy.__name__


def test_target_and_draft_replicas_change_to_the_same_drafter() -> None:
    def changed(**drafters: str) -> Any:
        made = content()
        for one in made["applications"][0]["deployments"]:
            if one["name"] in drafters:
                one["user_config"] = {"drafter": drafters[one["name"]]}
        return made

    build_config(DeploymentFile, changed(TargetReplica="runs/new", DraftReplica=str(Path("runs/new").resolve())))
    build_config(DeploymentFile, changed(TargetReplica="ngram"))
    for drafters in ({"TargetReplica": "runs/new"}, {"DraftReplica": "runs/new"}):
        with pytest.raises(ValueError, match="nothing would be drafted; name one in the user_config of both"):
            build_config(DeploymentFile, changed(**drafters))
    with pytest.raises(ValueError, match="Ingress: user_config has no effect"):
        build_config(DeploymentFile, changed(Ingress="runs/new"))


def scaled_content(**changes: Any) -> Any:
    changed = yaml.safe_load((ROOT / "deployments" / AUTOSCALING).read_text())
    changed["applications"][0]["deployments"][1]["autoscaling_config"] |= changes
    return changed


def test_contradictions_of_autoscaling_are_refused() -> None:
    build_config(DeploymentFile, scaled_content())
    with pytest.raises(ValueError, match="min_replicas 3 is over max_replicas 2"):
        build_config(DeploymentFile, scaled_content(min_replicas=3))
    with pytest.raises(ValueError, match="to_zero is True"):
        build_config(DeploymentFile, scaled_content(min_replicas=1))
    policy = {"policy_function": POLICY, "policy_kwargs": {"target_utilization": 0.5}}
    with pytest.raises(ValueError, match="target_utilisation"):
        build_config(DeploymentFile, scaled_content(policy=policy))


@pytest.mark.parametrize("name", ["colocated", "dspark"])
def test_the_demos_files_are_on_loopback_with_the_demos_target_and_drafter(name: str) -> None:
    loaded = load_config(DeploymentFile, ROOT / "deployments" / f"{name}.yaml")
    args = loaded.applications[0].args
    assert loaded.http_options.host == "127.0.0.1"
    assert (args.target.name, args.drafter) == ("bundled:smollm2-135m-instruct", "runs/demo/drafter")
    demo = yaml.safe_load((ROOT / "configs" / "demo" / "generate.yaml").read_text())
    assert args.target.model_dump(include={"name", "dtype"}) == demo["target"]
    deployed = {deployment.name: deployment.num_replicas for deployment in loaded.applications[0].deployments}
    beside = {"Ingress": 1, "TargetReplica": 1}
    assert deployed == (beside if name == "colocated" else beside | {"TargetReplica": 2, "DraftReplica": 1})
    assert (args.draft_replicas is None) == (name == "colocated")


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every mapping of the file."""
    found = [path] if isinstance(node, dict) else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return found + [place for key, child in items for place in places(child, (*path, key))]


@pytest.mark.parametrize("place", places(content()), ids=str)
def test_a_misspelt_key_is_refused_wherever_it_stands(place: tuple[Any, ...]) -> None:
    changed = node = content()
    for key in place:
        node = node[key]
    node["num_replica"] = 4
    with pytest.raises(ValueError, match=r"unknown key '[a-z0-9_.]*num_replica'"):
        build_config(DeploymentFile, changed)


def test_more_processes_of_the_api_carry_more_replicas() -> None:
    changed = content()
    ingress, targets, _ = changed["applications"][0]["deployments"]
    targets["num_replicas"], ingress["num_replicas"] = 4, 2
    (application,) = build_config(DeploymentFile, changed).applications
    assert [one.num_replicas for one in application.deployments[:2]] == [2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["applications"][0]["deployments"][1].update(max_ongoing_requests=256), "max_concurrent_requests"),
        (lambda c: c["applications"][0]["deployments"][1].update(graceful_shutdown_timeout_s=20), "graceful"),
        (lambda c: c["applications"][0]["deployments"][0].update(graceful_shutdown_timeout_s=150), "cuts streams"),
        (lambda c: c["applications"][0]["deployments"][1].update(num_replicas=4), "1024 requests that 4 target"),
        (lambda c: c["http_options"].update(request_timeout_s=600), "limits.request_timeout_s"),
        (
            lambda c: c["applications"][0]["deployments"][1].update(
                autoscaling_config={"max_replicas": 2, "policy": {"policy_function": POLICY}}
            ),
            "exclude each other",
        ),
        (lambda c: c["applications"][0]["args"].update(scaling={"to_zero": True}), "to_zero"),
        (lambda c: c["applications"][0].update(import_path="dspark.serving.app:biuld"), "import_path"),
        (lambda c: c["applications"][0]["args"].update(draft_replicas=None), "args.draft_replicas is not set"),
        (lambda c: c["applications"][0]["args"].update(drafter="ngram"), "draft_replicas run a trained drafter"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(change: Any, message: str) -> None:
    changed = content()
    change(changed)
    with pytest.raises(ValueError, match=message):
        build_config(DeploymentFile, changed)
