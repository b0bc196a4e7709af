"""All checks of all manifests: every overlay as it would be applied, and what no overlay takes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from dspark.config import UNKNOWN, Config
from dspark.errors import DsparkError
from dspark.manifests.cluster_rules import cluster_problems
from dspark.manifests.curve_rules import curve_problems
from dspark.manifests.documents import Document, Problem
from dspark.manifests.job_rules import job_problems
from dspark.manifests.kustomize import FILE, Tree, read_tree, render, unused_files
from dspark.manifests.pod_rules import pod_problems
from dspark.manifests.pods import pods_in
from dspark.manifests.reference_rules import reference_problems
from dspark.manifests.schema import Schemas
from dspark.manifests.service_rules import service_problems
from dspark.manifests.surroundings import EXTERNAL, Surroundings, surroundings

OVERLAYS, COMPONENTS, MONITORING, SCHEMAS = "overlays", "components", "monitoring", "schemas"
NO_MANIFESTS = ("core.yaml", EXTERNAL)


def check_manifests(
    folder: Path, root: Path, job_configs: Mapping[str, type[Config]], *, with_kubectl: bool = True
) -> list[Problem]:
    """What is wrong in the manifests of a folder, each once and in the file that says it.

    with_kubectl: render overlays. Without it only the form of each file is checked, and that all it names is there.
    Raises: ValueError where the folder's own files of names and versions cannot be read.
    """
    root, folder = root.resolve(), folder.resolve()
    known, schemas = surroundings(root, folder, job_configs), Schemas(folder / SCHEMAS)
    monitoring = read_tree(folder / MONITORING, root, schemas)
    trees = [monitoring]
    found: dict[Problem, None] = dict.fromkeys(monitoring.problems)
    for overlay in sorted(path.parent for path in (folder / OVERLAYS).glob(f"*/{FILE}")):
        tree = read_tree(overlay, root, schemas)
        trees.append(tree)
        found |= dict.fromkeys(tree.problems)
        if with_kubectl and not tree.problems:  # with some it would not be rendered, or not as it is meant
            whole = Tree([*tree.documents, *monitoring.documents], [*tree.patches, *monitoring.patches])
            problems = _rendered_problems(overlay, monitoring, known, schemas)
            found |= dict.fromkeys(whole.origin(problem) for problem in problems)
    if not with_kubectl:
        written = {(one.file, one.subject): one for tree in trees for one in tree.documents}
        found |= dict.fromkeys(problem for document in written.values() for problem in schemas.problems(document))
    for component in sorted(path.parent for path in (folder / COMPONENTS).glob(f"*/{FILE}")):
        trees.append(read_tree(component, root, schemas))  # whether an overlay takes it or not
        found |= dict.fromkeys(trees[-1].problems)
    unused = unused_files(folder, trees, root)
    found |= dict.fromkeys(one for one in unused if Path(one.file).name not in NO_MANIFESTS)
    return list(found)


def _rendered_problems(overlay: Path, monitoring: Tree, known: Surroundings, schemas: Schemas) -> list[Problem]:
    try:
        return list(set_problems([*render(overlay, known.root), *monitoring.documents], known, schemas))
    except DsparkError as error:
        return [Problem(str(overlay.relative_to(known.root)), (), None, str(error))]


def set_problems(documents: list[Document], known: Surroundings, schemas: Schemas) -> Iterator[Problem]:
    """Of manifests that are applied together. What they mean is asked when their form is right."""
    form = [problem for document in documents for problem in schemas.problems(document)]
    yield from form
    if any(not problem.message.startswith(UNKNOWN) for problem in form):
        return
    for document in documents:
        yield from cluster_problems(document, known.ray_version)
        yield from job_problems(document, documents, known)
        yield from service_problems(document, known)
    yield from curve_problems(documents, known)
    for pod in pods_in(documents):
        yield from pod_problems(pod)
    yield from reference_problems(documents, known)
