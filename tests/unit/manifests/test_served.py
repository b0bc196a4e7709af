"""serveConfigV2 is a deployment file with what a cluster needs, and nothing else."""

from pathlib import Path

import pytest
import yaml
from ray.serve._private.build_app import build_app as flatten
from ray.serve.schema import ServeDeploySchema

from dspark.config import build_config
from dspark.manifests.served import SERVED_FROM, deployed, in_cluster, with_serve_config, write_serve_configs
from dspark.serving.app import build
from dspark.serving.deployment_file import DeploymentFile

ROOT = Path(__file__).resolve().parents[3]
SERVICES = {
    "k8s/base/serve.yaml": "deployments/dspark.yaml",
    "k8s/overlays/gpu/service.yaml": "deployments/dspark_qwen3_4b.yaml",
    "k8s/overlays/autoscaling/service.yaml": "deployments/dspark_autoscaling.yaml",
}


@pytest.mark.parametrize(("manifest", "file"), SERVICES.items())
def test_the_manifest_serves_what_the_deployment_file_says(manifest: str, file: str) -> None:
    """Put back what a cluster changes, and it is the file."""
    service = next(
        one for one in yaml.safe_load_all((ROOT / manifest).read_text()) if one and one["kind"] == "RayService"
    )
    assert service["metadata"]["annotations"][SERVED_FROM] == file
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    local = yaml.safe_load((ROOT / file).read_text())
    build_config(DeploymentFile, served)
    ServeDeploySchema.model_validate(served)  # Ray's own, which knows no wrong key, but imports what is named
    assert (served["proxy_location"], served["http_options"]["host"]) == ("EveryNode", "0.0.0.0")
    assert served["http_options"]["port"] == 8000
    served["proxy_location"] = local["proxy_location"]
    served["http_options"] |= {name: local["http_options"][name] for name in ("host", "port")}
    for ours, theirs in zip(served["applications"], local["applications"], strict=True):
        assert ours["args"]["api_keys_file"] == "/etc/dspark/api-keys/keys"
        assert ours["args"]["drafter"] == f"/app/{theirs['args']['drafter']}"
        ours["args"] |= {name: theirs["args"].get(name) for name in ("api_keys_file", "drafter")}
    assert served == local


@pytest.mark.parametrize("manifest", SERVICES)
def test_the_application_that_is_built_has_just_the_deployments_that_are_named(manifest: str) -> None:
    services = [one for one in yaml.safe_load_all((ROOT / manifest).read_text()) if one["kind"] == "RayService"]
    (application,) = yaml.safe_load(services[0]["spec"]["serveConfigV2"])["applications"]
    built = flatten(build(application["args"]), name=application["name"])
    assert {one.name for one in built.deployments} == {one["name"] for one in application["deployments"]}


def test_no_other_manifest_serves_anything() -> None:
    found = {
        str(path.relative_to(ROOT)) for path in (ROOT / "k8s").rglob("*.yaml") if "serveConfigV2: |" in path.read_text()
    }
    assert found == set(SERVICES)


@pytest.mark.parametrize(
    ("drafter", "there"),
    [("runs/x", "/app/runs/x"), ("/data/x", "/data/x"), ("s3://b/x", "s3://b/x"), ("ngram", "ngram"), (None, None)],
)
def test_only_a_folder_becomes_one_of_the_image(drafter: str | None, there: str | None) -> None:
    changed = in_cluster({"applications": [{"args": {"drafter": drafter}}]})
    assert changed["applications"][0]["args"]["drafter"] == there


def test_writing_it_keeps_all_else_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "deployments").mkdir()
    (tmp_path / "k8s").mkdir()
    (tmp_path / "deployments" / "a.yaml").write_text((ROOT / "deployments" / "dspark.yaml").read_text())
    manifest = tmp_path / "k8s" / "serve.yaml"
    manifest.write_text(
        "# why\nkind: RayService\nmetadata: {name: a, annotations: {dspark-served-from: deployments/a.yaml}}\n"
        "spec:\n  serveConfigV2: |\n    old: 1\n\n    older: 2\n"
        "  upgradeStrategy: {type: None} # how\n---\nkind: Other\n"
    )
    assert write_serve_configs(tmp_path / "k8s", tmp_path) == ["k8s/serve.yaml"]
    text = manifest.read_text()
    assert text.startswith("# why\n")
    assert text.endswith("  upgradeStrategy: {type: None} # how\n---\nkind: Other\n")
    service, _ = yaml.safe_load_all(text)
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == deployed(tmp_path, "deployments/a.yaml")
    assert write_serve_configs(tmp_path / "k8s", tmp_path) == []


def test_a_file_that_is_refused_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("applications: []\n")
    with pytest.raises(ValueError, match=r"a\.yaml: .*proxy_location is required"):
        deployed(tmp_path, "a.yaml")
    with pytest.raises(ValueError, match=r"b\.yaml is no file"):
        deployed(tmp_path, "b.yaml")
    with pytest.raises(ValueError, match="0 times"):
        with_serve_config("spec:\n  serveConfigV2: '{}'\n", {})
