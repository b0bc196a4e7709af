"""The Serve replica that this process is, as far as it is one."""

import logging
import os

from ray import serve
from ray.serve.exceptions import RayServeException

LOCAL = "local"  # id of a replica without Serve

log = logging.getLogger("dspark")


def replica_id() -> str:
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return LOCAL


def ingress_name() -> str:
    """Of this process of the API, where figures of replicas have the replica's."""
    return f"ingress-{replica_id()}"


def end_process() -> None:
    """At once: Serve starts another replica when a process is gone, but only after some failed checks when it answers,
    and until then requests would still come here, to fail."""
    log.error("this replica ends, its engine having failed")
    logging.shutdown()
    os._exit(1)


def replica_number() -> int:
    """Among the target replicas, from 0."""
    try:
        return int(serve.get_replica_context().rank.rank)
    except RayServeException:
        return 0
