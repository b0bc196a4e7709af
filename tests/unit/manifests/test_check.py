"""The repository's manifests pass every check, and one wrong thing in them is refused with its place."""

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from check_config import job_configs
from dspark.manifests.check import check_manifests, set_problems
from dspark.manifests.documents import Document, dotted
from dspark.manifests.kustomize import render
from dspark.manifests.schema import Schemas
from dspark.manifests.surroundings import Surroundings

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
OVERLAYS = ("kind", "gpu", "autoscaling", "gcs-fault-tolerance")


class REMOVED:
    """In the place of a value: the field is left out. A class, since its name is the same in every process."""


SERVICE, TRAIN, DATA = ("RayService", "dspark"), ("RayJob", "dspark-train"), ("RayJob", "dspark-data")
EVALUATE, WORKBENCH = ("RayJob", "dspark-evaluate"), ("RayCluster", "dspark-workbench")
MLFLOW, RAY_POLICY = ("Deployment", "mlflow"), ("NetworkPolicy", "ray")
CLUSTER = ("spec", "rayClusterConfig")
WORKERS = (*CLUSTER, "workerGroupSpecs", 0)
HEAD_POD = (*CLUSTER, "headGroupSpec", "template", "spec")
HEAD, WORKER = (*HEAD_POD, "containers", 0), (*WORKERS, "template", "spec", "containers", 0)
POD = ("spec", "template", "spec")
JOB_POD = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec")

QWEN, CURVE = "drafter=runs/released/qwen3_4b/dspark", "spec.serveConfigV2"

DELETION = {"policy": "DeleteCluster", "condition": {"jobStatus": "SUCCEEDED"}}
INCREMENTAL = {
    "type": "NewClusterWithIncrementalUpgrade",
    "clusterUpgradeOptions": {
        "maxSurgePercent": 20,
        "stepSizePercent": 30,
        "intervalSeconds": 5,
        "gatewayClassName": "x",
    },
}

Change = tuple[str, tuple[str, str], tuple[str | int, ...], Any, str, str]


def at(
    overlay: str, subject: tuple[str, str], place: tuple[Any, ...], value: Any, message: str, told: str = ""
) -> Change:
    """A value put at a place, the message it must bring, and the place that must be told, if it is another one."""
    return overlay, subject, place, value, message, told or dotted(place)


CHANGES = [
    # misspelt keys, by the schema
    at("kind", SERVICE, (*WORKERS, "minReplica"), 1, "did you mean 'minReplicas'"),
    at("kind", SERVICE, (*WORKER, "resource"), {}, "did you mean 'resources'"),
    at("kind", SERVICE, ("spec", "serveConfigV3"), "", "did you mean 'serveConfigV2'"),
    at("kind", TRAIN, ("spec", "shutdownAfterJobFinish"), True, "did you mean 'shutdownAfterJobFinishes'"),
    at("kind", MLFLOW, (*POD, "containers", 0, "imagePullPolcy"), "Always", "did you mean 'imagePullPolicy'"),
    at("kind", MLFLOW, ("metadata", "lables"), {}, "did you mean 'labels'"),
    at("kind", RAY_POLICY, ("spec", "ingres"), [], "did you mean 'ingress'"),
    at("kind", ("PodMonitor", "dspark"), ("spec", "podMetricsEndpoint"), [], "did you mean 'podMetricsEndpoints'"),
    at("kind", ("PrometheusRule", "dspark"), ("spec", "groups", 0, "rules", 0, "exprs"), "1", "did you mean 'expr'"),
    # values out of form
    at("kind", SERVICE, (*WORKERS, "replicas"), "two", "must be of type integer"),
    at("kind", SERVICE, (*CLUSTER, "authOptions", "mode"), "tokens", "did you mean 'token'"),
    at("kind", SERVICE, ("kind",), "RayServce", "did you mean 'RayService'"),
    at("kind", SERVICE, ("apiVersion",), "ray.io/v1alpha1", "'ray.io/v1'"),
    at("kind", ("PersistentVolumeClaim", "mlflow"), ("spec", "accessModes", 0), "ReadWriteMay", "did you mean"),
    # the operator's own rules
    at("kind", SERVICE, (*WORKERS, "minReplicas"), 5, "over maxReplicas 1"),
    at("gpu", SERVICE, (*WORKERS, "replicas"), 7, "not within minReplicas 2 and maxReplicas 2"),
    at("kind", SERVICE, (*WORKERS, "maxReplicas"), REMOVED, "required without autoscaling"),
    at("kind", SERVICE, (*CLUSTER, "headGroupSpec", "rayStartParams", "num-cpu"), "0", "did you mean 'num-cpus'"),
    at("kind", SERVICE, (*CLUSTER, "headGroupSpec", "resources"), {"CPU": "0"}, "too; keep one of them"),
    at("kind", SERVICE, (*CLUSTER, "headGroupSpec", "rayStartParams", "labels"), "a=b", "in `labels`"),
    at("kind", SERVICE, (*CLUSTER, "rayVersion"), "2.59.0", "constraints.txt has as 2.60.0"),
    at("kind", SERVICE, (*CLUSTER, "authOptions"), REMOVED, "must be token", "spec.rayClusterConfig.authOptions.mode"),
    at("kind", SERVICE, (*WORKER, "image"), "dspark:other", "is not the head's image"),
    at("kind", SERVICE, (*CLUSTER, "autoscalerOptions"), {"version": "v2"}, "no effect without"),
    at("autoscaling", SERVICE, (*HEAD_POD, "restartPolicy"), "Always", "must be Never"),
    at("autoscaling", SERVICE, (*HEAD_POD, "automountServiceAccountToken"), False, "needs its account"),
    at("autoscaling", SERVICE, (*HEAD, "volumeMounts", 2, "name"), "cache", "must be ray-logs"),
    at("kind", SERVICE, ("spec", "upgradeStrategy", "type"), "NewClusters", "did you mean 'NewCluster'"),
    at("kind", SERVICE, ("spec", "upgradeStrategy", "type"), "NewClusterWithIncrementalUpgrade", "needs enableIn"),
    at("kind", SERVICE, ("metadata", "name"), "dspark-" + "x" * 50, "more than the 47 characters"),
    at("gcs-fault-tolerance", SERVICE, (*CLUSTER, "gcsFaultToleranceOptions", "redisAddress"), REMOVED, "is required"),
    at("gcs-fault-tolerance", SERVICE, (*CLUSTER, "gcsFaultToleranceOptions", "backend"), "rocksdb", "feature gate"),
    at("kind", TRAIN, ("spec", "submissionMode"), "K8JobMode", "did you mean 'K8sJobMode'"),
    at("kind", TRAIN, ("spec", "backoffLimit"), REMOVED, "one whose head is lost begin again"),
    at("kind", TRAIN, ("spec", "activeDeadlineSeconds"), REMOVED, "a job that hangs must end"),
    at("kind", TRAIN, ("spec", "jobId"), "train-1", "a submission id of its own"),
    at("kind", TRAIN, ("spec", "shutdownAfterJobFinishes"), False, "needs shutdownAfterJobFinishes", "spec.ttlSeconds"),
    at("kind", TRAIN, ("spec", "clusterSelector"), {"ray.io/cluster": "x"}, "exactly one", "spec.rayClusterSpec"),
    at("kind", TRAIN, ("spec", "preRunningDeadlineSeconds"), 20_000, "not below activeDeadlineSeconds"),
    at("kind", TRAIN, ("spec", "runtimeEnvYAML"), "env_var: {A: b}", "did you mean 'env_vars'"),
    at("kind", TRAIN, ("spec", "runtimeEnvYAML"), "working_dir: .", "only a URI"),
    at("kind", TRAIN, ("spec", "submissionMode"), "SidecarMode", "no place in SidecarMode", "submitterPodTemplate"),
    at("kind", TRAIN, ("spec", "submissionMode"), "InteractiveMode", "must be 0 in Interactive", "spec.backoffLimit"),
    at("kind", TRAIN, ("spec", "deletionStrategy"), {"deletionRules": [DELETION]}, "exclude each other", "Rules"),
    at("kind", TRAIN, ("spec", "suspend"), "yes", "must be of type boolean"),
    at("kind", SERVICE, ("spec", "upgradeStrategy"), INCREMENTAL, "is over maxSurgePercent 20", "stepSizePercent"),
    at("kind", SERVICE, ("metadata", "annotations", "ray.io/initializing-timeout"), "soon", "must be like 30m"),
    # what jobs run
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/trian.py", "did you mean 'train'"),
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/train.py --config configs/demo/trian.yaml", "train.yaml"),
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/train.py step=8", "did you mean 'steps'"),
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/train.py --frsh", "did you mean '--fresh'"),
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/train.py num_workers=5", "needs 5 of cpu at once"),
    at("kind", TRAIN, ("spec", "entrypoint"), "python jobs/train.py use_gpu=true", "nvidia.com/gpu at once"),
    at("kind", EVALUATE, ("spec", "entrypointNumCpus"), 3, "needs 5 of cpu at once", "spec.entrypoint"),
    at("gpu", DATA, ("spec", "entrypointNumCpus"), REMOVED, "generate.py holds all prompts in its own process"),
    at("kind", EVALUATE, ("spec", "entrypointNumCpus"), 0, "profile_engine.py measures in its own process"),
    at("kind", DATA, ("spec", "entrypoint"), "python jobs/cache.py max_cache_bytes=30000000000", "the volume of"),
    at("kind", DATA, (*JOB_POD, "volumes", 0), {"name": "runs", "emptyDir": {}}, "is lost with the pod", "entrypoint"),
    at("gpu", EVALUATE, ("spec", "entrypoint"), f"python jobs/profile_engine.py {QWEN} threads=2", "2 threads", CURVE),
    # who pods run as, and on what
    at("kind", MLFLOW, (*POD, "securityContext", "runAsNonRoot"), False, "must be true"),
    at("kind", MLFLOW, (*POD, "securityContext", "runAsUser"), 0, "must be a user above 0"),
    at("kind", SERVICE, (*WORKER, "securityContext", "capabilities"), REMOVED, "must hold ALL"),
    at("kind", SERVICE, (*HEAD, "resources", "requests", "memory"), REMOVED, "memory is required", "requests"),
    at("kind", SERVICE, (*HEAD, "resources", "requests", "cpu"), "4", "is over the limit 2"),
    at("kind", SERVICE, (*HEAD, "resources", "limits", "memory"), "4Gib", "is no quantity"),
    at("gpu", SERVICE, (*WORKER, "resources", "requests", "nvidia.com/gpu"), REMOVED, "must be its limit"),
    at("kind", MLFLOW, (*POD, "containers", 0, "livenessProbe"), REMOVED, "livenessProbe is required", "containers[0]"),
    at("kind", MLFLOW, (*POD, "containers", 0, "image"), "dspark", "names no version"),
    at("kind", MLFLOW, (*POD, "containers", 0, "env", 0), {"name": "HF_TOKEN", "value": "x"}, "secretKeyRef", "value"),
    at("kind", ("ConfigMap", "dspark-environment"), ("kind",), "Secret", "do not stand in files"),
    # names that nothing has
    at("kind", SERVICE, (*WORKER, "volumeMounts", 0, "name"), "run", "did you mean 'runs'"),
    at("kind", MLFLOW, (*POD, "volumes", 0, "persistentVolumeClaim", "claimName"), "mlfow", "did you mean 'mlflow'"),
    at("kind", SERVICE, (*HEAD, "envFrom", 0, "configMapRef", "name"), "dspark-enviroment", "did you mean 'dspark-env"),
    at("kind", SERVICE, (*HEAD, "envFrom", 1, "secretRef", "name"), "dspark-credential", "did you mean"),
    at("kind", SERVICE, (*HEAD_POD, "volumes", 3, "secret", "items", 0, "key"), "key", "did you mean 'keys'"),
    at("gcs-fault-tolerance", ("Service", "redis"), ("metadata", "name"), "rediss", "did you mean", "redisAddress"),
    at("kind", ("ConfigMap", "dspark-environment"), ("data", "MLFLOW_TRACKING_URI"), "http://mlflow:50", "no port 50"),
    at("kind", ("Service", "mlflow"), ("spec", "ports", 0, "targetPort"), "htp", "did you mean 'http'"),
    at("kind", ("Service", "mlflow"), ("spec", "selector", "app.kubernetes.io/name"), "mlfow", "did you mean 'mlflow'"),
    at("kind", MLFLOW, ("spec", "selector", "matchLabels"), {"app.kubernetes.io/name": "ml"}, "no pod has this label"),
    at("kind", RAY_POLICY, ("spec", "podSelector", "matchLabels"), {"ray.io/is-ray-nod": "yes"}, "is-ray-node'"),
    at("kind", RAY_POLICY, ("spec", "ingress", 1, "ports", 0, "port"), 8001, "none of the pods listens there"),
    at("gpu", ("PodDisruptionBudget", "dspark"), ("spec", "minAvailable"), 2, "can be drained"),
    at("gpu", ("PodDisruptionBudget", "dspark"), ("spec", "maxUnavailable"), 1, "exclude each other"),
    at("kind", ("PodMonitor", "dspark"), ("spec", "podMetricsEndpoints", 0, "port"), "serv", "did you mean 'serve'"),
    at("kind", ("PodMonitor", "ray"), ("metadata", "labels"), {}, "is required: by it one part is applied"),
    at("kind", WORKBENCH, ("metadata", "name"), "Workbench", "must"),
    # pods and what they serve
    at("kind", SERVICE, (*HEAD_POD, "terminationGracePeriodSeconds"), 60, "graceful_shutdown_timeout_s"),
    at("kind", SERVICE, ("spec", "rayClusterDeletionDelaySeconds"), 60, "limits.request_timeout_s"),
    at("kind", SERVICE, (*HEAD, "ports", 3, "containerPort"), 9000, "holds no port 8000", "containers[0].ports"),
    at("kind", SERVICE, (*WORKER, "volumeMounts", 0, "mountPath"), "/data", "is on no volume of", "spec.serveConfigV2"),
    at("kind", SERVICE, (*WORKER, "resources", "limits", "cpu"), "1", "all replicas need 2 CPUs", "spec.serveConfigV2"),
    at("kind", SERVICE, ("metadata", "annotations", "dspark-served-from"), "deployments/dspak.yaml", "dspark.yaml"),
]  # fmt: skip

SERVED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.update(proxy_locaton="EveryNode"), "proxy_locaton.*did you mean 'proxy_location'"),
    (lambda c: c["http_options"].update(host="127.0.0.1"), "http_options.host = '127.0.0.1'.*use 0.0.0.0"),
    (lambda c: c.update(proxy_location="HeadOnly"), "use EveryNode"),
    (lambda c: c["applications"][0].update(import_path="dspark.serving.app:biuld"), "did you mean 'dspark.*:build'"),
    (
        lambda c: c["applications"][0]["args"].update(drafer="x"),
        r"applications\[0\].args.drafer.*did you mean 'drafter'",
    ),
    (lambda c: c["applications"][0]["args"].update(drafter="runs/x"), "must be an absolute path"),
    (lambda c: c["applications"][0]["args"]["target"].update(name="bundled:smollm2-135m"), "did you mean 'bundled:"),
    (lambda c: c["applications"][0]["args"]["limits"].update(max_output_tokens=0), "greater than or equal to 1"),
    (lambda c: c["applications"][0]["args"].update(api_keys_file=None), "must be set"),
    (lambda c: c["applications"][0]["deployments"][1].update(name="TargetReplca"), "did you mean 'TargetReplica'"),
    (lambda c: c["applications"][0]["deployments"][1].update(num_replica=4), "did you mean 'num_replicas'"),
    (lambda c: c["applications"][0]["deployments"][1].update(num_replicas=3), "deployments/dspark.yaml says 2"),
    (
        lambda c: c["applications"][0]["deployments"][1].update(
            autoscaling_config={
                "min_replicas": 3,
                "max_replicas": 2,
                "policy": {"policy_function": "dspark.serving.autoscaling:HeadroomPolicy"},
            }
        ),
        "min_replicas 3 is over max_replicas 2",
    ),
    (
        lambda c: c["applications"][0]["deployments"][1].update(
            autoscaling_config={
                "max_replicas": 2,
                "policy": {"policy_function": "dspark.serving.autoscaling:HeadroomPolicy"},
            }
        ),
        "num_replicas and autoscaling_config exclude each other",
    ),
]


def changed(documents: list[Document], subject: tuple[str, str], change: Callable[[Any], Any]) -> list[Document]:
    """The documents with one of them changed."""
    (number,) = [n for n, document in enumerate(documents) if document.subject == subject]
    content = copy.deepcopy(documents[number].content)
    change(content)
    return [*documents[:number], Document(documents[number].file, content), *documents[number + 1 :]]


def put(place: tuple[str | int, ...], value: Any) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        for part in place[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        if value is REMOVED:
            del node[place[-1]]
        else:
            node[place[-1]] = value

    return change


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_renders_and_passes(
    overlay: str, rendered: dict[str, list[Document]], known: Surroundings, schemas: Schemas
) -> None:
    documents = rendered[overlay]
    assert {SERVICE, TRAIN, DATA, EVALUATE, WORKBENCH, MLFLOW, RAY_POLICY} <= {one.subject for one in documents}
    assert [str(problem) for problem in set_problems(documents, known, schemas)] == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[1][1]}:{change[5]}:{change[3]}"[:90])
def test_one_wrong_thing_is_refused_with_its_place(
    change: Change, rendered: dict[str, list[Document]], known: Surroundings, schemas: Schemas
) -> None:
    overlay, subject, place, value, message, told = change
    problems = list(set_problems(changed(rendered[overlay], subject, put(place, value)), known, schemas))
    assert [str(one) for one in problems if message in one.message and told in dotted(one.place)], problems


@pytest.mark.parametrize(("change", "message"), SERVED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_serve_config_is_refused_with_its_place(
    change: Callable[[Any], Any],
    message: str,
    rendered: dict[str, list[Document]],
    known: Surroundings,
    schemas: Schemas,
) -> None:
    def rewrite(content: Any) -> None:
        served = yaml.safe_load(content["spec"]["serveConfigV2"])
        change(served)
        content["spec"]["serveConfigV2"] = yaml.safe_dump(served)

    problems = [str(one) for one in set_problems(changed(rendered["kind"], SERVICE, rewrite), known, schemas)]
    with pytest.raises(AssertionError, match=message):  # for its regular expression
        assert not problems, "\n".join(problems)
    assert all("spec.serveConfigV2" in problem for problem in problems)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_both_components_go_onto_the_gpu_overlay(tmp_path: Path, known: Surroundings, schemas: Schemas) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../gpu]\n"
        "components: [../../components/autoscaling, ../../components/gcs-fault-tolerance]\n"
    )
    documents = render(overlay, tmp_path)
    (service,) = [document for document in documents if document.subject == SERVICE]
    assert service.get(*CLUSTER, "enableInTreeAutoscaling") is True
    assert service.get(*CLUSTER, "gcsFaultToleranceOptions", "redisAddress") == "redis:6379"
    assert [str(problem) for problem in set_problems(documents, known, schemas)] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_object_storage_takes_the_place_of_volumes_and_folders_are_refused_then(
    tmp_path: Path, known: Surroundings, schemas: Schemas
) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../kind]\n"
        "components: [../../components/object-storage]\n"
    )
    documents = render(overlay, tmp_path)
    assert [one.name for one in documents if one.kind == "PersistentVolumeClaim"] == ["mlflow"]
    problems = [str(problem) for problem in set_problems(documents, known, schemas)]
    assert len(problems) == 8  # six stages write to folders; both kinds of pods look for the drafter in one
    assert all("is lost with the pod" in one or "drafter" in one for one in problems), problems
    command = "python jobs/train.py output=s3://bucket/drafter cache=s3://bucket/cache"
    stored = changed(documents, TRAIN, put(("spec", "entrypoint"), command))
    assert not [one for one in set_problems(stored, known, schemas) if one.subject == TRAIN]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_a_problem_is_told_once_and_in_the_file_that_says_it(tmp_path: Path) -> None:
    """The base's mistake stands in four overlays; the patch's in one."""
    for name in ("constraints.txt", "k8s", "deployments", "configs"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    edit(
        tmp_path / "k8s/base/serve.yaml",
        "terminationGracePeriodSeconds: 180\n            auto",
        "terminationGracePeriodSecond: 180\n            auto",
    )
    edit(tmp_path / "k8s/overlays/gpu/workers.yaml", 'requests: {cpu: "8"', 'requests: {cpu: "9"')
    edit(tmp_path / "k8s/components/autoscaling/service.yaml", "version: v2", "version: v3")
    edit(tmp_path / "k8s/overlays/gcs-fault-tolerance/kustomization.yaml", "newTag", "newTg")
    (tmp_path / "k8s/base/left-over.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    problems = [str(one) for one in check_manifests(tmp_path / "k8s", tmp_path, job_configs())]
    assert Counter(problem.partition(": ")[0] for problem in problems) == {
        "k8s/base/left-over.yaml": 1,
        "k8s/base/serve.yaml": 2,  # the key that nobody knows, and what is missing for it
        "k8s/components/autoscaling/service.yaml": 1,
        "k8s/overlays/gcs-fault-tolerance/kustomization.yaml": 1,
        "k8s/overlays/gpu/workers.yaml": 1,
    }, problems
    (told,) = [problem for problem in problems if "workers.yaml" in problem]
    assert told == (
        "k8s/overlays/gpu/workers.yaml: RayService/dspark: spec.rayClusterConfig.workerGroupSpecs[0].template.spec."
        "containers[0].resources.requests.cpu = '9': is over the limit 8"
    )


def places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*place, key)
        yield from places(child, (*place, key))


def test_whatever_is_damaged_is_told_and_never_ends_the_check(
    rendered: dict[str, list[Document]], known: Surroundings, schemas: Schemas
) -> None:
    """A list in the place of a mapping, a mapping without what it must have, nothing at all."""
    draw = random.Random(7)
    documents = rendered["gcs-fault-tolerance"]
    chosen = [one for one in documents if one.subject in (SERVICE, WORKBENCH, MLFLOW, RAY_POLICY)]
    spots = [(one.subject, place) for one in chosen for place in places(one.content["spec"], ("spec",))]
    for subject, place in draw.sample(spots, 50):
        damage = draw.choice((REMOVED, None, "x", -1, [], {}, [None], [{}]))
        for problem in set_problems(changed(documents, subject, put(place, damage)), known, schemas):
            assert str(problem).startswith(problem.file)
    ill_typed = put(("spec", "rayClusterConfig", "workerGroupSpecs"), {"groupName": "x"})
    told = [str(problem) for problem in set_problems(changed(documents, SERVICE, ill_typed), known, schemas)]
    assert len(told) == 1  # what it means is not asked before its form is right
    assert "must be of type array" in told[0]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def test_without_kubectl_the_form_is_checked_nevertheless(tmp_path: Path) -> None:
    for name in ("constraints.txt", "k8s"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    assert check_manifests(tmp_path / "k8s", tmp_path, {}, with_kubectl=False) == []
    edit(tmp_path / "k8s/base/kustomization.yaml", "- train.yaml", "- trian.yaml")
    edit(tmp_path / "k8s/base/mlflow.yaml", "strategy: {type: Recreate}", "strategy: {type: Recreated}")
    problems = [str(one) for one in check_manifests(tmp_path / "k8s", tmp_path, {}, with_kubectl=False)]
    assert any("trian.yaml" in one and "did you mean 'train.yaml'" in one for one in problems)
    assert any("spec.strategy.type = 'Recreated'" in one and "did you mean 'Recreate'" in one for one in problems)


def test_no_manifest_holds_a_secret_and_every_external_one_is_in_the_docs(known: Surroundings) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    for name, keys in known.secrets.items():
        assert f"create secret generic {name}" in text
        assert all(f"{key}=" in text for key in keys)
    assert "kind: Secret" not in "".join(path.read_text() for path in K8S.rglob("*.yaml"))


def test_the_dashboard_in_the_config_map_is_a_dashboard() -> None:
    content = json.loads((K8S / "monitoring" / "grafana-dashboard.json").read_text())
    assert content["title"]
    assert content["panels"]
