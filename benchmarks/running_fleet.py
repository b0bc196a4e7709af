"""A fleet as `serve run` makes it of a deployment file, on a Ray cluster of its own that ends with it."""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml

from dspark.config import build_config
from dspark.engine.config import EngineConfig
from dspark.serving.deployment_file import DeploymentFile

LOGICAL_CPUS = 16  # bookkeeping only
START_S = 300.0
EMPTY_S = 30.0


class RunningFleet:
    """Starts on entering, once all its target replicas answer. Its processes are children of this one.

    changes: replace parts of the args of the file's application; mappings in them are merged. num_replicas: of the
    target; None takes the file's own number. log: of `serve run`.
    """

    def __init__(self, deployment: str | Path, changes: dict[str, Any], *, num_replicas: int | None = None) -> None:
        self._content: dict[str, Any] = yaml.safe_load(Path(deployment).read_text(encoding="utf-8"))
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-fleet-", ignore_cleanup_errors=True)
        self._serve: subprocess.Popen[bytes] | None = None
        (application,) = self._content["applications"]
        for name, value in changes.items():
            is_merged = isinstance(value, dict) and isinstance(application["args"].get(name), dict)
            application["args"][name] = {**application["args"][name], **value} if is_merged else value
        for options in application["deployments"]:
            if options["name"] == "TargetReplica":
                if num_replicas is None and "num_replicas" not in options:
                    raise ValueError(f"{deployment} has no fixed number of target replicas; say how many")
                self.num_replicas: int = options["num_replicas"] if num_replicas is None else num_replicas
                options["num_replicas"] = self.num_replicas
        self._content["http_options"] |= {"host": "127.0.0.1", "port": _free_port()}
        build_config(DeploymentFile, self._content)
        engine = build_config(EngineConfig, application["args"].get("engine", {}))
        self.num_places = self.num_replicas * engine.max_running_requests
        self.app: str = application["name"]
        self.model: str = application["args"].get("served_model_name") or application["args"]["target"]["name"]
        self.url = f"http://127.0.0.1:{self._content['http_options']['port']}"
        self.log = Path(self._folder.name) / "serve.log"

    def __enter__(self) -> "RunningFleet":
        file = Path(self._folder.name) / "fleet.yaml"
        file.write_text(yaml.safe_dump(self._content), encoding="utf-8")
        folder = str(Path(tempfile.gettempdir()) / f"dspark-fleet-{os.getuid()}")  # a socket's path must be short
        ray.init(address="local", _temp_dir=folder, num_cpus=LOGICAL_CPUS, include_dashboard=False, log_to_driver=False)
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
        with self.log.open("wb") as log:
            self._serve = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            self.wait_until_ready()
        except BaseException:
            sys.stderr.write(self.log.read_text(errors="replace")[-4000:])
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._serve is not None:
            self._serve.terminate()
            self._serve.wait(30)
        ray.shutdown()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Until every target replica tells its metrics. Raises: TimeoutError."""
        deadline = time.monotonic() + START_S
        while self.num_ready() < self.num_replicas:
            if self._serve is None or self._serve.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"the fleet did not come up within {START_S:g} s; see {self.log}")
            time.sleep(0.25)

    def num_ready(self) -> int:
        """Target replicas that answer."""
        return len({sample.partition('replica="')[2] for sample in self.metrics("dspark_steps_total")})

    def seconds_until_free(self) -> float | None:
        """Until no slot and no page is held any more; None if that takes longer than EMPTY_S."""
        started = time.monotonic()
        while time.monotonic() - started < EMPTY_S:
            busy = self.gauge("dspark_requests_running") + self.gauge("dspark_requests_waiting")
            if self.num_ready() and not busy and self.gauge("dspark_kv_pages_free") == self.gauge("dspark_kv_pages"):
                return round(time.monotonic() - started, 2)
            time.sleep(0.1)
        return None

    def metrics(self, name: str) -> list[str]:
        """Lines of /metrics that are samples of `name`; [] where nobody answers."""
        try:
            response = httpx.get(f"{self.url}/metrics", timeout=10)
        except httpx.HTTPError:
            return []
        lines = response.text.splitlines() if response.status_code == 200 else []
        return [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]

    def gauge(self, name: str) -> float:
        """A metric's sum over the replicas."""
        return sum(float(line.rpartition(" ")[2]) for line in self.metrics(name))

    def by_replica(self, name: str) -> dict[str, float]:
        """A metric of each target replica that answers."""
        found = ((re.search(r'replica="([^"]*)"', line), line) for line in self.metrics(name))
        return {match[1]: float(line.rpartition(" ")[2]) for match, line in found if match is not None}


def pids_of(title: str) -> list[int]:
    """Processes below this one whose title begins so, the eldest first."""
    parents, titles = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            titles[int(folder.name)] = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if status[0] != "Z":
            parents[int(folder.name)] = int(status[1])
    return sorted(pid for pid in parents if titles[pid].startswith(title) and _is_below(pid, os.getpid(), parents))


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def _free_port() -> int:
    """Below those that the system gives away by itself: Ray takes many of them before Serve binds this one."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 30000")
