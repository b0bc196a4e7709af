"""Whether replicas find a cost curve: it is looked for by the number of threads, among other things."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import yaml

from dspark.config import Config, build_config, read_content
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.manifests.documents import Document, Problem, named
from dspark.manifests.job_rules import commands, job_config
from dspark.manifests.served import KEY
from dspark.manifests.surroundings import APP_FOLDER, Surroundings
from dspark.serving.config import ServeConfig
from dspark.serving.deployment_file import DeploymentFile
from dspark.storage import is_remote

PROFILE_JOB = "profile_engine"


def curve_problems(documents: list[Document], known: Surroundings) -> Iterator[Problem]:
    """Of RayServices whose drafter a RayJob profiles, but none with the threads that it is served with."""
    profiled = profiled_threads(_profiles(documents, known))
    for document in named(documents, "RayService"):
        try:
            served = build_config(DeploymentFile, read_content(document.get("spec", KEY)))
        except (ValueError, TypeError, AttributeError, yaml.YAMLError):
            continue  # which is told of where it is read for its own sake
        for number, application in enumerate(served.applications):
            message = missing_curve(application.args, profiled)
            if message is not None:
                text = f"applications[{number}].args.threads = {application.args.threads}: {message}"
                yield document.problem(("spec", KEY), text, hidden=True)


def profiled_threads(configs: Iterable[Config]) -> dict[str, set[int]]:
    """Numbers of threads that cost curves are measured with, by the drafter's folder.

    configs: of the profile_engine job, whose class is in a layer that this one does not know.
    """
    found: dict[str, set[int]] = {}
    for config in configs:
        drafter: str | None = getattr(config, "drafter", None)
        if drafter is not None and drafter not in WITHOUT_FOLDER:
            found.setdefault(_folder(drafter), set()).add(getattr(config, "threads", 0))
    return found


def missing_curve(config: ServeConfig, profiled: Mapping[str, set[int]]) -> str | None:
    """What is wrong with a replica's threads; None where its drafter has a curve for them, needs none, or where nobody
    says how it is profiled."""
    if config.drafter is None or config.drafter in WITHOUT_FOLDER or config.engine.verify_length is not None:
        return None
    measured = profiled.get(_folder(config.drafter))
    if measured is None or config.threads in measured:
        return None
    numbers = ", ".join(map(str, sorted(measured)))
    return (
        f"the cost curve of {config.drafter} is measured with {numbers} threads, so that replicas would find none; "
        "profile with as many as are served"
    )


def _profiles(documents: list[Document], known: Surroundings) -> Iterator[Config]:
    """The configs that RayJobs profile by. What cannot be read is told of by the rules of jobs."""
    for document in named(documents, "RayJob"):
        for command in commands(str(document.get("spec", "entrypoint"))):
            if len(command) > 1 and PurePosixPath(command[1]).stem == PROFILE_JOB:
                try:
                    yield job_config(command, known)
                except ValueError:
                    continue


def _folder(drafter: str) -> str:
    """Of the image, where it is relative: jobs start there."""
    return drafter if is_remote(drafter) else str(PurePosixPath(APP_FOLDER, drafter))
