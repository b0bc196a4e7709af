"""Two replicas on a cluster: what becomes of answers when one of them dies or is taken away."""

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from dspark.config import build_config
from dspark.serving.deployment_file import DeploymentFile
from local_cluster import replicas_of, start_local_cluster
from tiny_serving import MODEL, completion
from tiny_target import make_tiny_target

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
LONG = 1500
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def port() -> int:
    for number in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", number)):
                return number
    raise OSError("no free port")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, port: int) -> Any:
    """The demo's deployment file with two replicas of a tiny target."""
    target = make_tiny_target(tmp_path_factory.mktemp("failover") / "target", max_length=LONG + 96)
    content = yaml.safe_load((ROOT / "deployments" / "colocated.yaml").read_text())
    content["http_options"] |= {"port": port, "request_timeout_s": 660}
    content["applications"][0]["args"] |= {
        "target": {"name": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": "ngram",
        "served_model_name": MODEL,
        "engine": {"page_size": 16, "kv_tokens": 65536, "max_running_requests": 16},
        "limits": {"max_output_tokens": LONG, "max_concurrent_requests": 40, "request_timeout_s": 600},
        "threads": 1,
    }
    return content


SCALED = {
    "min_replicas": 0,
    "max_replicas": 1,
    "look_back_period_s": 2,
    "downscale_delay_s": 1,
    "policy": {
        "policy_function": "dspark.serving.autoscaling:HeadroomPolicy",
        "policy_kwargs": {"target_utilisation": 0.7},
    },
}


def deploy(content: Any, **replicas: Any) -> None:
    """As `serve run` does with a file. replicas: `num_replicas` or `autoscaling_config`."""
    (application,) = content["applications"]
    changed = []
    for options in application["deployments"]:
        if options["name"] == "TargetReplica":
            options = {k: v for k, v in options.items() if k != "num_replicas"} | replicas
        changed.append(options)
    args = application["args"] | {"scaling": {"to_zero": "autoscaling_config" in replicas}}
    file = {**content, "applications": [{**application, "args": args, "deployments": changed}]}
    build_config(DeploymentFile, file)
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema(**file))


@pytest.fixture(scope="module")
def url(content: Any, port: int) -> Iterator[str]:
    start_local_cluster()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    deploy(content, num_replicas=2)
    url = f"http://127.0.0.1:{port}"
    assert wait_for(lambda: num_ready(url) == 2, seconds=300)
    yield url
    serve.shutdown()


def wait_for(holds: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gauges(url: str, name: str) -> list[float]:
    try:
        response = httpx.get(f"{url}/metrics", timeout=20)
    except httpx.HTTPError:  # nobody listens yet, or the machine is busy
        return []
    lines = response.text.splitlines() if response.status_code == 200 else []
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]


def num_ready(url: str) -> int:
    return len(gauges(url, "dspark_steps_total"))


def ask(url: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json=completion(**fields), timeout=600)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return {"text": choice["text"], "usage": response.json()["usage"]["completion_tokens"]}


def bodies() -> list[dict[str, Any]]:
    """Greedy ones and some with a seed; plain decoding makes them last."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}]
    common = {"max_tokens": LONG, "verify_length": 0}
    return [{"prompt": f"the question {k}", **common, **kinds[k % 2]} for k in range(NUM_STREAMS)]


def begin(pool: ThreadPoolExecutor, url: str) -> list[Future[dict[str, Any]]]:
    """The answers, once all of them run: begun one by one, since of replicas that nobody knows yet any may get all."""
    answers = []
    for number, body in enumerate(bodies()):
        answers.append(pool.submit(ask, url, **body))
        assert wait_for(lambda most=number: sum(gauges(url, "dspark_requests_running")) > most, seconds=120)
    return answers


def busiest(url: str) -> Any:
    """The actor of the replica where most requests run."""
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    running = [line for line in lines if line.startswith("dspark_requests_running{")]
    found = re.search(r'replica="([^"]+)"', max(running, key=lambda line: float(line.rpartition(" ")[2])))
    assert found is not None
    return next(actor for name, actor in replicas_of("TargetReplica").items() if found[1] in name)


@pytest.fixture(scope="module")
def undisturbed(url: str) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return [answer.result() for answer in begin(pool, url)]


def test_a_prompt_goes_back_to_the_replica_that_read_it(url: str) -> None:
    prompt = "what is the number of answers to this question " * 20
    before = gauges(url, "dspark_prefix_cache_hits_total")
    for number in range(6):
        assert ask(url, prompt=f"{prompt}{number}")["usage"] == 24
    grown = [now - then for now, then in zip(gauges(url, "dspark_prefix_cache_hits_total"), before, strict=True)]
    assert sorted(value > 0 for value in grown) == [False, True]
    served = gauges(url, "dspark_output_tokens_total")
    assert sorted(served) == [0, 6 * 24]


def test_answers_outlive_the_replica_that_began_them(url: str, undisturbed: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = begin(pool, url)
        victim = busiest(url)
        os.kill(ray.get(victim.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        assert [answer.result() for answer in answers] == undisturbed
    assert sum(gauges(url, "dspark_requests_continued_total")) > 0
    assert wait_for(lambda: num_ready(url) == 2, seconds=300)


def test_a_replica_that_is_taken_away_ends_what_it_began_and_gets_nothing_new(
    url: str, content: Any, undisturbed: list[dict[str, Any]]
) -> None:
    continued = sum(gauges(url, "dspark_requests_continued_total"))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = begin(pool, url)
        before = set(replicas_of("TargetReplica"))
        deploy(content, num_replicas=1)
        assert ask(url)["usage"] == 24
        assert [answer.result() for answer in answers] == undisturbed
    assert wait_for(lambda: len(replicas_of("TargetReplica")) == 1, seconds=120)
    assert set(replicas_of("TargetReplica")) < before
    assert sum(gauges(url, "dspark_requests_continued_total")) <= continued  # nothing went on elsewhere


def test_from_none_the_first_request_starts_a_replica_and_asking_after_health_does_not(url: str, content: Any) -> None:
    """Deployed anew, so that its own process is asked that knows of scaling to zero."""
    deploy(content, autoscaling_config=SCALED)
    assert wait_for(lambda: not replicas_of("TargetReplica"), seconds=300)
    for _ in range(10):
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        assert gauges(url, "dspark_steps_total") == []
        time.sleep(0.3)
    assert not replicas_of("TargetReplica")
    assert ask(url)["usage"] == 24
    assert len(replicas_of("TargetReplica")) == 1
    assert wait_for(lambda: not replicas_of("TargetReplica"), seconds=300)
