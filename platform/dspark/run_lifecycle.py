"""How a tracked run begins and ends: in whose name, asked to, by an exception, or without a word."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from dspark.provenance import git_revision

HOST, BOOT, NAMESPACE = "dspark.host", "dspark.boot_id", "dspark.pid_namespace"
PID, START = "dspark.pid", "dspark.process_start"

log = logging.getLogger("dspark.tracking")


class Store(Protocol):
    """The part of an MLflow client that is needed here, where mlflow itself is not imported."""

    def search_runs(self, experiment_ids: list[str], filter_string: str, /) -> Any: ...
    def create_run(self, experiment_id: str, *, tags: dict[str, Any], run_name: str | None) -> Any: ...
    def update_run(self, run_id: str, *, status: str, name: str | None) -> object: ...
    def set_tag(self, run_id: str, key: str, value: str, /) -> object: ...
    def set_terminated(self, run_id: str, status: str, /) -> object: ...


def process_tags(pid: int) -> dict[str, str]:
    """What tells the process from every other, also after its id is used again or the host was restarted."""
    return {
        HOST: f"{socket.gethostname()} {_content('/etc/machine-id')}".strip(),
        BOOT: _content("/proc/sys/kernel/random/boot_id"),
        NAMESPACE: os.readlink("/proc/self/ns/pid") if os.path.islink("/proc/self/ns/pid") else "",
        PID: str(pid),
        START: process_start(pid) or "",
    }


def process_start(pid: int) -> str | None:
    """Start of a live process in clock ticks after boot ("0" where the system does not tell); None if it is gone."""
    if not os.path.exists("/proc/self/stat"):
        return "0" if _answers(pid) else None
    # The name in parentheses may hold anything; state and start time are the 1st and 20th field after it.
    fields = _content(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def is_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process with these tags surely lives no more; False where that cannot be seen from here."""
    here = process_tags(os.getpid())
    if not here.keys() <= tags.keys() or tags[HOST] != here[HOST]:
        return False
    if tags[BOOT] != here[BOOT]:
        return True
    return tags[NAMESPACE] == here[NAMESPACE] and process_start(int(tags[PID])) != tags[START]


class Sigterm:
    """Notes a SIGTERM while the block runs, then does what was to be done before, by default SystemExit(143).

    Outside the main thread, where Python allows no handlers, and where SIGTERM is ignored it notes nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> "Sigterm":
        before = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and (before is signal.SIG_DFL or callable(before)):
            self._before = before
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever took the signal over in the meantime (ray.init does) keeps it.
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            return  # already ending: a second signal must not cut that short
        self.received = True
        if callable(self._before):
            self._before(number, frame)
        else:
            raise SystemExit(128 + number)


def status_for(error: BaseException | None, *, sigterm: bool) -> str:
    """MLflow's status for a run whose block was left with this exception, or None."""
    code = error.code if isinstance(error, SystemExit) else None
    # ray.init installs a handler of its own, which exits with the signal's number.
    if sigterm or isinstance(error, KeyboardInterrupt) or code in (signal.SIGTERM, 128 + signal.SIGTERM):
        return "KILLED"
    if error is None or (isinstance(error, SystemExit) and code in (None, 0)):
        return "FINISHED"
    return "FAILED"


def open_run(client: Store, experiment_id: str, run_id: str | None, *, name: str | None) -> str:
    """Id of a run in state RUNNING in this process's name: `run_id` if the experiment has it, else a new one."""
    tags = process_tags(os.getpid()) | {"mlflow.source.name": Path(sys.argv[0]).name}
    tags |= {"mlflow.source.git.commit": git_revision() or "unknown"}
    if run_id is not None:
        if client.search_runs([experiment_id], f"attributes.run_id = '{run_id}'"):
            for key, value in tags.items():  # before the status: nobody may find it RUNNING in a dead process's name
                client.set_tag(run_id, key, value)
            client.update_run(run_id, status="RUNNING", name=name)
            return run_id
        log.warning("run %s is not in the store; a new run takes its place", run_id)
        tags["dspark.continues"] = run_id
    return str(client.create_run(experiment_id, tags=tags, run_name=name).info.run_id)


def reap(client: Store, experiment_id: str) -> list[str]:
    """Mark the experiment's runs KILLED that are RUNNING in the name of a process that is gone; their ids."""
    running = client.search_runs([experiment_id], "attributes.status = 'RUNNING'")
    return [run.info.run_id for run in running if mark_if_dead(client, run)]


def mark_if_dead(client: Store, run: Any) -> bool:
    """Whether the run was RUNNING in the name of a process that is gone; it is KILLED then."""
    if run.info.status != "RUNNING" or not is_gone(run.data.tags):
        return False
    client.set_tag(run.info.run_id, "dspark.reaped", f"process {run.data.tags[PID]} vanished without ending the run")
    client.set_terminated(run.info.run_id, "KILLED")
    return True


def spawn_watcher(uri: str, run_id: str) -> "subprocess.Popen[bytes]":
    """A small process that marks the run KILLED when this process vanishes (kill -9, out of memory)."""
    pid = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "dspark.tracking", "watch", run_id, str(pid), str(process_start(pid))],
        env=os.environ | {"MLFLOW_TRACKING_URI": uri},  # it may hold a password: not for the command line
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
