"""A replica of a deployment file in this process, behind HTTP on a free port: what `RunningFleet` is without Ray."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from dspark.config import build_config
from dspark.serving.config import ServeConfig
from dspark.serving.ingress import build_app
from dspark.serving.target_replica import TargetReplica

START_S = 60.0


class ReplicaHere:
    """Starts on entering. changes: replace parts of the args of the file's application; mappings are merged."""

    def __init__(self, deployment: str | Path, changes: dict[str, Any]) -> None:
        (application,) = yaml.safe_load(Path(deployment).read_text(encoding="utf-8"))["applications"]
        args = application["args"]
        for name, value in changes.items():
            is_merged = isinstance(value, dict) and isinstance(args.get(name), dict)
            args[name] = {**args[name], **value} if is_merged else value
        self._config = build_config(ServeConfig, args, source=str(deployment))
        self.model = self._config.model_name
        self.log = "the messages above"

    def __enter__(self) -> "ReplicaHere":
        self._replica = TargetReplica(self._config)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = uvicorn.Config(build_app(self._replica, self._config), port=port, log_level="warning")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        started = time.monotonic()
        while not self._server.started:
            if time.monotonic() - started > START_S:
                raise TimeoutError(f"no server at {self.url} within {START_S:g} s")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._replica.close()
