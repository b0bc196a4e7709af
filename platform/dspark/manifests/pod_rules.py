"""What every pod here must say: who it runs as, what it may use, what it mounts, which image it runs."""

from collections.abc import Iterator

from dspark.config import nearest
from dspark.manifests.documents import Place, Problem
from dspark.manifests.pods import GPU, Pod, quantity

SECRET_WORDS = ("PASSWORD", "TOKEN", "SECRET", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
PROBES = ("readinessProbe", "livenessProbe")


def pod_problems(pod: Pod) -> Iterator[Problem]:
    """Of one pod. What the operator probes by itself (Ray's) needs no probes here."""
    yield from _identity(pod)
    yield from _volumes(pod)
    if not pod.containers:
        yield pod.document.problem((*pod.place, "spec"), "has no container", {})
    names = [container.get("name") for _, container in pod.containers]
    for place, container in pod.containers:
        if names.count(container.get("name")) > 1:
            yield pod.document.problem((*place, "name"), "is the name of another container too")
        yield from _container(pod, place)
        yield from _resources(pod, place)
        yield from _mounts(pod, place)
        if pod.document.kind == "Deployment":
            for probe in PROBES:
                if not container.get(probe):
                    yield pod.document.problem(place, f"{probe} is required", container.get("name"))


def _identity(pod: Pod) -> Iterator[Problem]:
    place = (*pod.place, "spec", "securityContext")
    context = pod.spec.get("securityContext") or {}
    if context.get("runAsNonRoot") is not True:
        yield pod.document.problem((*place, "runAsNonRoot"), "must be true")
    if context.get("runAsUser") in (None, 0):
        yield pod.document.problem((*place, "runAsUser"), "must be a user above 0")
    profile = context.get("seccompProfile") or {}
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        yield pod.document.problem((*place, "seccompProfile"), "must be of type RuntimeDefault")


def _container(pod: Pod, place: Place) -> Iterator[Problem]:
    document = pod.document
    context = document.get(*place, "securityContext") or {}
    if context.get("allowPrivilegeEscalation") is not False:
        yield document.problem((*place, "securityContext", "allowPrivilegeEscalation"), "must be false")
    if "ALL" not in ((context.get("capabilities") or {}).get("drop") or []):
        yield document.problem((*place, "securityContext", "capabilities", "drop"), "must hold ALL")
    if context.get("privileged"):
        yield document.problem((*place, "securityContext", "privileged"), "must not be set")
    image = str(document.get(*place, "image") or "")
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        yield document.problem((*place, "image"), "names no version; set newTag in the kustomization's images")
    for number, variable in enumerate(document.get(*place, "env") or []):
        name = str(variable.get("name"))
        if "value" in variable and any(word in name.upper() for word in SECRET_WORDS):
            at = (*place, "env", number, "value")
            yield document.problem(at, f"{name} stands here for all to read; use valueFrom.secretKeyRef", hidden=True)


def _resources(pod: Pod, place: Place) -> Iterator[Problem]:
    document = pod.document
    at = (*place, "resources")
    requests, limits = document.get(*at, "requests") or {}, document.get(*at, "limits") or {}
    for part, amounts in (("requests", requests), ("limits", limits)):
        for name in ("cpu", "memory"):
            if name not in amounts:
                yield document.problem((*at, part), f"{name} is required", amounts)
        for name, amount in amounts.items():
            if quantity(amount) is None:
                yield document.problem((*at, part, name), "is no quantity, such as 500m, 2 or 4Gi")
    for name in requests.keys() & limits.keys():
        asked, most = quantity(requests[name]), quantity(limits[name])
        if asked is not None and most is not None and asked > most:
            yield document.problem((*at, "requests", name), f"is over the limit {limits[name]}")
    if requests.get(GPU) != limits.get(GPU):
        yield document.problem((*at, "requests", GPU), f"must be its limit, {limits.get(GPU)}")


def _volumes(pod: Pod) -> Iterator[Problem]:
    place = (*pod.place, "spec", "volumes")
    names = [str(volume.get("name")) for volume in pod.spec.get("volumes") or []]
    mounts = [mount for _, container in pod.containers for mount in container.get("volumeMounts") or []]
    mounted = {str(mount.get("name")) for mount in mounts}
    for number, name in enumerate(names):
        if names.count(name) > 1:
            yield pod.document.problem((*place, number, "name"), "is the name of another volume too")
        if name not in mounted:
            yield pod.document.problem((*place, number, "name"), "is mounted nowhere; mount it, or leave it out")


def _mounts(pod: Pod, place: Place) -> Iterator[Problem]:
    names = [str(volume.get("name")) for volume in pod.spec.get("volumes") or []]
    mounts = pod.document.get(*place, "volumeMounts") or []
    paths = [mount.get("mountPath") for mount in mounts]
    for number, mount in enumerate(mounts):
        if mount.get("name") not in names:
            message = f"is no volume of the pod{nearest(str(mount.get('name')), names)}"
            yield pod.document.problem((*place, "volumeMounts", number, "name"), message)
        if paths.count(mount.get("mountPath")) > 1:
            yield pod.document.problem((*place, "volumeMounts", number, "mountPath"), "is mounted twice")
