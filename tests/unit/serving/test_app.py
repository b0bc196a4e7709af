"""The application that arguments make, without a cluster."""

import os
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app as flatten

from dspark.serving.app import build
from dspark.serving.draft_router import TurnRouter


def args(**changes: Any) -> dict[str, Any]:
    return {"target": {"name": "bundled:smollm2-135m-instruct"}, "threads": 2} | changes


def deployments(**changes: Any) -> dict[str, Any]:
    built = flatten(build(args(**changes)), name="dspark")
    return {deployment.name: deployment for deployment in built.deployments}


def test_ingress_and_replica_are_deployed() -> None:
    assert deployments().keys() == {"Ingress", "TargetReplica"}


def test_draft_replicas_are_deployed_where_they_are_asked_for_and_an_engine_keeps_to_one() -> None:
    settings = {"threads": 3, "cpus_per_replica": 0.5, "gpus_per_replica": 0.25}
    deployed = deployments(drafter="runs/x", draft_replicas=settings)
    assert deployed.keys() == {"Ingress", "TargetReplica", "DraftReplica"}
    draft = deployed["DraftReplica"]
    assert draft.ray_actor_options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "3"
    assert (draft.ray_actor_options["num_cpus"], draft.ray_actor_options["num_gpus"]) == (0.5, 0.25)
    router = draft._deployment_config.request_router_config
    assert router.get_request_router_class().__name__ == TurnRouter.__name__
    (config,) = draft.init_args
    assert os.path.isabs(config.drafter)


def test_the_replicas_environment_is_set_before_torch_loads() -> None:
    options = deployments(threads=3)["TargetReplica"].ray_actor_options
    environment = options["runtime_env"]["env_vars"]
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("3", "10000")


def test_the_replica_can_refuse_what_is_over_its_limit() -> None:
    replica = deployments(limits={"max_concurrent_requests": 40})["TargetReplica"]
    assert replica.max_ongoing_requests > 40


def test_a_stream_is_not_cut_by_a_drain_but_handed_over() -> None:
    """The API stays for the longest request; replicas, whose answers others continue, as long as is said."""
    deployed = deployments(limits={"request_timeout_s": 900}, failover={"drain_s": 45})
    assert deployed["Ingress"]._deployment_config.graceful_shutdown_timeout_s > 900
    assert deployed["TargetReplica"]._deployment_config.graceful_shutdown_timeout_s == 45


@pytest.mark.parametrize(("drafter", "expected"), [("runs/x", None), ("ngram", "ngram"), (None, None)])
def test_a_relative_drafter_is_found_from_where_serve_runs(
    drafter: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, drafts = deployments(drafter=drafter)["TargetReplica"].init_args
    assert drafts is None
    assert config.drafter == (os.path.join(tmp_path, "runs/x") if drafter == "runs/x" else expected)


def test_a_relative_key_file_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (config, _) = deployments(api_keys_file="keys")["Ingress"].init_args
    assert config.api_keys_file == os.path.join(tmp_path, "keys")


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key 'draftr'; did you mean 'drafter'"):
        build(args(draftr="x"))
