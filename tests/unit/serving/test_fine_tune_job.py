"""Submission to Ray's job API, which a server in this process stands for: Ray's own client, over HTTP."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import ray

from dspark.serving.fine_tune_job import submit_job
from dspark.traffic.fine_tune import AlreadySubmitted


class JobApi(BaseHTTPRequestHandler):
    jobs: dict[str, Any]

    def do_GET(self) -> None:
        self._answer(200, {"version": "4", "ray_version": ray.__version__, "ray_commit": ray.__commit__})

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = job["submission_id"]
        if name in self.jobs:  # as Ray 2.60 says it
            self._answer(500, f"ValueError: Job with submission_id {name} already exists. Please use a different one.")
        elif name == "refused":
            self._answer(500, "RuntimeError: no")
        else:
            self.jobs[name] = job
            self._answer(200, {"job_id": name, "submission_id": name})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, content: Any) -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api() -> Iterator[ThreadingHTTPServer]:
    JobApi.jobs = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), JobApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_job_is_submitted_under_its_id_once(api: ThreadingHTTPServer) -> None:
    submit = submit_job(f"http://127.0.0.1:{api.server_port}", None)
    submit(["python", "jobs/train.py", "initialize_from=a folder", "x={}"], "one")
    assert JobApi.jobs["one"]["entrypoint"] == "python jobs/train.py 'initialize_from=a folder' 'x={}'"
    with pytest.raises(AlreadySubmitted, match="one"):
        submit(["other"], "one")
    with pytest.raises(RuntimeError, match="no"):
        submit(["other"], "refused")
    assert list(JobApi.jobs) == ["one"]
