"""A Ray cluster that belongs to this test process alone, and jobs run on it as commands."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

import runner

ROOT = Path(__file__).resolve().parents[1]


def start_local_cluster() -> str:
    """Address of the cluster this process is connected to; started here if there is none yet."""
    if not ray.is_initialized():
        ray.init(
            address="local",
            # Not Ray's default folder: a job run elsewhere would find this cluster there and join it.
            _temp_dir=str(Path(tempfile.gettempdir()) / f"dspark-tests-{os.getuid()}"),
            num_cpus=runner.LOGICAL_CPUS,
            include_dashboard=False,
            runtime_env={"env_vars": runner.worker_environment()},
        )
    return str(ray.get_runtime_context().gcs_address)


def replicas_of(deployment: str) -> dict[str, Any]:
    """Actors of this Serve deployment's replicas by name; one that ends while they are listed is left out."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if deployment in actor["name"]:
            with suppress(ValueError):  # it was alive when the list was made
                found[actor["name"]] = ray.get_actor(actor["name"], namespace=actor["namespace"])
    return found


def start_job(name: str, *arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    """`python jobs/<name>.py …` in a process of its own on this process's cluster; its output goes to `log`."""
    environment = os.environ | {
        "RAY_ADDRESS": start_local_cluster(),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",  # it takes note of a checkpoint as seldom as this
    }
    with log.open("wb") as stream:
        command = [sys.executable, str(ROOT / "jobs" / f"{name}.py"), *arguments]
        return subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=environment)
