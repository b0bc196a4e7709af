"""RayJobs: what KubeRay refuses, that they come to an end, and that what they run exists and has room to run."""

import shlex
from collections.abc import Iterator
from decimal import Decimal
from pathlib import PurePosixPath

import yaml

from dspark.config import Config, load_config, nearest
from dspark.manifests.documents import Document, Problem, named
from dspark.manifests.pods import GPU, quantity, ray_pods
from dspark.manifests.surroundings import APP_FOLDER, Surroundings
from dspark.storage import is_remote

MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
RUNTIME_KEYS = ("working_dir", "py_modules", "py_executable", "pip", "uv", "conda", "env_vars", "excludes", "config")
OWN_WORK = {"generate": "holds all prompts", "profile_engine": "measures"}
"""What jobs do in the process of the entrypoint, beside telling workers what to do."""
JOB_OPTIONS = ("--config", "--fresh", "--dry-run", "--help")
SPEC = ("spec",)


def job_problems(document: Document, documents: list[Document], known: Surroundings) -> Iterator[Problem]:
    """Of a RayJob among the other manifests."""
    if document.kind != "RayJob":
        return
    yield from _ending(document)
    yield from _clusters(document)
    yield from _modes(document)
    yield from _runtime_env(document)
    yield from _entrypoint(document, documents, known)


def _ending(document: Document) -> Iterator[Problem]:
    """A job whose head is lost would else run for ever, or its second submission be refused as a duplicate."""
    for name in ("activeDeadlineSeconds", "backoffLimit"):
        if document.get("spec", name) is None:
            message = "is required: a job that hangs must end, one whose head is lost begin again"
            yield document.problem((*SPEC, name), message)
    deadline, start = document.get("spec", "activeDeadlineSeconds"), document.get("spec", "preRunningDeadlineSeconds")
    if isinstance(deadline, int) and deadline <= 0:
        yield document.problem((*SPEC, "activeDeadlineSeconds"), "must be above 0")
    if isinstance(deadline, int) and isinstance(start, int) and start >= deadline:
        yield document.problem((*SPEC, "preRunningDeadlineSeconds"), f"is not below activeDeadlineSeconds {deadline}")
    limit = document.get("spec", "backoffLimit")
    if isinstance(limit, int) and limit < 0:
        yield document.problem((*SPEC, "backoffLimit"), "must not be negative")
    if document.get("spec", "jobId") is not None:
        yield document.problem((*SPEC, "jobId"), "each try needs a submission id of its own; leave it out")
    shuts_down = bool(document.get("spec", "shutdownAfterJobFinishes"))
    rules = (document.get("spec", "deletionStrategy") or {}).get("deletionRules")
    if not shuts_down and not rules:
        message = "must be true: else the cluster stays when the job is done"
        yield document.problem((*SPEC, "shutdownAfterJobFinishes"), message)
    if shuts_down and rules:
        message = "and shutdownAfterJobFinishes exclude each other; leave one out"
        yield document.problem((*SPEC, "deletionStrategy", "deletionRules"), message)
    for name in ("ttlSecondsAfterFinished", "suspend"):
        if document.get("spec", name) and not shuts_down:
            yield document.problem((*SPEC, name), "needs shutdownAfterJobFinishes: true")
    if (document.get("spec", "ttlSecondsAfterFinished") or 0) < 0:
        yield document.problem((*SPEC, "ttlSecondsAfterFinished"), "must not be negative")


def _clusters(document: Document) -> Iterator[Problem]:
    selects = bool(document.get("spec", "clusterSelector"))
    if selects == bool(document.get("spec", "rayClusterSpec")):
        yield document.problem((*SPEC, "rayClusterSpec"), "and clusterSelector: set exactly one of them", hidden=True)
    if selects and not document.get("spec", "clusterSelector", "ray.io/cluster"):
        yield document.problem((*SPEC, "clusterSelector"), "must name a cluster by ray.io/cluster")
    if selects and document.get("spec", "suspend"):
        yield document.problem((*SPEC, "suspend"), "is impossible with clusterSelector")
    for number, rule in enumerate((document.get("spec", "deletionStrategy") or {}).get("deletionRules") or []):
        scales = document.get("spec", "rayClusterSpec", "enableInTreeAutoscaling")
        if rule.get("policy") == "DeleteWorkers" and (scales or selects):
            place = (*SPEC, "deletionStrategy", "deletionRules", number, "policy")
            yield document.problem(place, "is impossible under autoscaling and with clusterSelector")


def _modes(document: Document) -> Iterator[Problem]:
    mode = document.get("spec", "submissionMode") or MODES[0]
    if mode not in MODES:
        yield document.problem((*SPEC, "submissionMode"), f"is no way to submit{nearest(str(mode), MODES)}")
    if mode == "InteractiveMode" and document.get("spec", "backoffLimit"):
        yield document.problem((*SPEC, "backoffLimit"), "must be 0 in InteractiveMode")
    if mode != "SidecarMode":
        return
    for name in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
        if document.get("spec", name):
            yield document.problem((*SPEC, name), "has no place in SidecarMode")
    policy = ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "restartPolicy")
    if document.get(*policy) not in (None, "Never"):
        yield document.problem(policy, "must be Never, or left out, in SidecarMode")


def _runtime_env(document: Document) -> Iterator[Problem]:
    text = document.get("spec", "runtimeEnvYAML")
    if text is None:
        return
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict):
        yield document.problem((*SPEC, "runtimeEnvYAML"), "is no YAML mapping")
        return
    for key in content:
        if key not in RUNTIME_KEYS:
            message = f"{key!r} is no part of a runtime environment{nearest(str(key), RUNTIME_KEYS)}"
            yield document.problem((*SPEC, "runtimeEnvYAML"), message)
    folder = content.get("working_dir")
    if isinstance(folder, str) and not is_remote(folder):
        message = f"working_dir {folder!r}: only a URI can be fetched; the image has the code in {APP_FOLDER}"
        yield document.problem((*SPEC, "runtimeEnvYAML"), message)


def _entrypoint(document: Document, documents: list[Document], known: Surroundings) -> Iterator[Problem]:
    text = document.get("spec", "entrypoint")
    if not isinstance(text, str) or not text.strip():
        yield document.problem((*SPEC, "entrypoint"), "is required")
        return
    workers = [pod for pod in ray_pods(document) if pod.group != "head"]
    room = {name: sum((pod.amount(name) * pod.replicas for pod in workers), Decimal(0)) for name in ("cpu", GPU)}
    for command in commands(text):
        try:
            config = job_config(command, known)
        except ValueError as error:
            message = str(error).replace(f"{known.root}/", "")
            yield document.problem((*SPEC, "entrypoint"), message, shlex.join(command))
            continue
        needed = {"cpu": _needed(config, "cpu", room), GPU: _needed(config, GPU, room)}
        own = {"cpu": document.get("spec", "entrypointNumCpus"), GPU: document.get("spec", "entrypointNumGpus")}
        job = PurePosixPath(command[1]).stem
        if workers and job in OWN_WORK and not any(own.values()):
            message = f"is required: {job}.py {OWN_WORK[job]} in its own process, which runs on the head without it"
            yield document.problem((*SPEC, "entrypointNumCpus"), message)
        for name, amount in needed.items():
            wanted = amount + Decimal(str(own[name] or 0))
            if workers and wanted > room[name]:
                there = f"{float(wanted):g} of {name} at once, the workers have {float(room[name]):g}"
                message = f"needs {there}: it would wait for ever"
                yield document.problem((*SPEC, "entrypoint"), message, shlex.join(command))
        yield from _space(document, config, documents)


def commands(entrypoint: str) -> list[list[str]]:
    """The command lines that an entrypoint runs one after another. Raises: nothing; odd ones come back as they are."""
    try:
        words = shlex.split(entrypoint)
        if words[:2] != ["bash", "-c"] or len(words) != 3:
            return [words]
        return [shlex.split(part) for part in words[2].split("&&")]
    except ValueError:
        return [[entrypoint]]


def job_config(command: list[str], known: Surroundings) -> Config:
    """The config of `python jobs/….py …`, read as the job would. Raises: ValueError for what the job would refuse."""
    if len(command) < 2 or command[0] != "python" or not command[1].startswith("jobs/"):
        raise ValueError("is not of the form python jobs/….py --config FILE key.path=value …")
    job = PurePosixPath(command[1]).stem
    if job not in known.job_configs or command[1] != f"jobs/{job}.py":
        raise ValueError(f"{command[1]} is no job{nearest(job, known.job_configs)}")
    file, overrides = f"configs/demo/{job}.yaml", []
    rest = iter(command[2:])
    for word in rest:
        option, _, value = word.partition("=")
        if not word.startswith("--"):
            overrides.append(word)
        elif option not in JOB_OPTIONS:
            raise ValueError(f"{option} is no option of a job{nearest(option, JOB_OPTIONS)}")
        elif option == "--config":
            file = value or next(rest, "")
    path = known.root / file
    if not path.is_file():
        there = [str(other.relative_to(known.root)) for other in known.root.glob("configs/*/*.yaml")]
        raise ValueError(f"{file} is no file{nearest(file, there)}")
    return load_config(known.job_configs[job], path, overrides)


def _needed(config: Config, resource: str, room: dict[str, Decimal]) -> Decimal:
    """What a stage's workers hold at once. Each takes a CPU, and where the cluster has any a GPU."""
    workers = getattr(config, "num_workers", None)
    if workers is None or getattr(getattr(config, "backend", None), "kind", "") == "openai":
        return Decimal(0)
    if resource == "cpu":
        return Decimal(workers)
    if hasattr(config, "use_gpu"):
        return Decimal(workers if config.use_gpu else 0)
    share = getattr(config, "gpus_per_worker", None)
    if share is None:
        share = 1 if room[GPU] else 0
    return Decimal(str(workers * share))


def _space(document: Document, config: Config, documents: list[Document]) -> Iterator[Problem]:
    """Whether what a stage writes stays when its pods are gone, and fits into the volume that it is written to."""
    output = getattr(config, "output", "")
    head = next(ray_pods(document), None)
    if head is None or not output or is_remote(output):
        return
    volume = head.volume_of(f"{APP_FOLDER}/{output}")
    claim = None if volume is None else (volume.get("persistentVolumeClaim") or {}).get("claimName")
    if claim is None:
        message = f"{output} is lost with the pod: it is on no persistentVolumeClaim; mount one, or write to a URI"
        yield document.problem((*SPEC, "entrypoint"), message)
        return
    most = getattr(config, "max_cache_bytes", None)
    for one in named(documents, "PersistentVolumeClaim"):
        size = quantity(one.get("spec", "resources", "requests", "storage"))
        if one.name == claim and most is not None and size is not None and most > size:
            message = f"max_cache_bytes is {most:,}, but the volume of {output} has {int(size):,}"
            yield document.problem((*SPEC, "entrypoint"), message)
