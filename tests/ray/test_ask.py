"""The ask job serves a deployment as a user does, asks it, and leaves nothing running."""

import socket
from pathlib import Path

import pytest
import yaml

import ask
from dspark.config import build_config
from dspark.errors import DsparkError
from dspark.evaluation.questions import AskConfig
from local_cluster import ROOT, start_local_cluster
from tiny_drafter import make_tiny_drafter

pytestmark = pytest.mark.ray


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def config(tmp_path: Path, tiny_target: Path, port: int) -> AskConfig:
    content = yaml.safe_load((ROOT / "deployments" / "colocated.yaml").read_text())
    content["http_options"]["port"] = port
    (application,) = content["applications"]
    application["args"] |= {
        "target": {"name": str(tiny_target), "dtype": "float32", "device": "cpu"},
        "drafter": str(make_tiny_drafter(tmp_path / "drafter", tiny_target)),
        "engine": {"page_size": 4, "kv_tokens": 4096},
        "threads": 1,
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(content))
    return build_config(
        AskConfig,
        {
            "deployment": str(tmp_path / "serve.yaml"),
            "questions": ["how many?", "and why?"],
            "max_tokens": 20,
            "output": str(tmp_path / "answers"),
            "tracking": {"enabled": False},
        },
    )


def test_a_deployment_is_served_asked_and_stopped(config, port):
    start_local_cluster()
    result = ask.run(config)
    assert [answer["question"] for answer in result["answers"]] == config.questions
    for answer in result["answers"]:
        assert 0 < answer["completion_tokens"] <= 20
        assert answer["chunks"] <= answer["completion_tokens"]
    assert result["accepted_length_served"] >= 1.0
    assert ask.run(config) == result | {"skipped": True}
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server still listens"


def test_a_port_that_is_taken_is_said_before_anything_is_started(config, port):
    start_local_cluster()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(DsparkError, match=f"something listens at 127.0.0.1:{port}"):
            ask.run(config)


def test_a_server_that_does_not_start_is_an_error_that_names_its_log(config, tmp_path):
    start_local_cluster()
    path = tmp_path / "serve.yaml"
    content = yaml.safe_load(path.read_text())
    content["applications"][0]["args"]["target"]["name"] = str(tmp_path / "nothing")
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(DsparkError, match=r"serve\.log"):
        ask.run(config.with_changes(startup_timeout_s=20))
