"""The whole application on Ray Serve, asked by OpenAI's own client."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from dspark.serving.app import build
from dspark.serving.config import FleetConfig, ServeConfig
from dspark.serving.metrics import ENDINGS
from dspark.serving.scheduler_actor import connect_scheduler, scheduler_name
from dspark.speculation.fleet import FREE, ReplicaReport
from local_cluster import replicas_of, start_local_cluster
from tiny_drafter import make_tiny_drafter
from tiny_serving import MODEL, completion, serve_config
from tiny_target import make_tiny_target

pytestmark = pytest.mark.ray

LONG = 4000  # tokens of an answer that nobody waits for

CONFIG: dict[str, Any] = {
    "engine": {"page_size": 16, "kv_tokens": 65536, "max_running_requests": 8},
    "limits": {"max_output_tokens": LONG, "max_concurrent_requests": 40},
    "fleet": {"enabled": True, "report_every_s": 0.05, "lease_ttl_s": 0.4},
    "failover": {"wait_s": 1.0},  # there is one replica: what it began cannot go on elsewhere
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    folder = tmp_path_factory.mktemp("serving")
    target = make_tiny_target(folder / "target", max_length=LONG + 96)
    return serve_config(target, drafter=str(make_tiny_drafter(folder / "drafter", target)), **CONFIG)


@pytest.fixture(scope="module")
def url(config: ServeConfig) -> Iterator[str]:
    start_local_cluster()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(config.model_dump(mode="json")), name="dspark", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, content: str, **fields: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}} | fields
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **options)


def figures(url: str) -> dict[str, float]:
    """Counters and gauges; those with positions or reasons by name and value of that label."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("replica", "le")}
            found[":".join([sample.name, *labels.values()])] = sample.value
    return found


def wait_for(holds: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_empty(url: str) -> bool:
    found = figures(url)
    nothing = found["dspark_requests_running"] == found["dspark_requests_waiting"] == 0
    return nothing and found["dspark_kv_pages_free"] == found["dspark_kv_pages"]


def test_a_stream_joins_to_the_whole_answer_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    whole = ask(client, "hello")
    chunks = list(ask(client, "hello", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 40


def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI) -> None:
    text = ask(client, "hello").choices[0].message.content
    answer = ask(client, "hello", stop=[text[10:13]])
    assert answer.choices[0].message.content == text[: text.index(text[10:13])]
    assert answer.choices[0].finish_reason == "stop"


def test_completions_and_models(client: openai.OpenAI) -> None:
    body = completion()
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model=MODEL, prompt=body["prompt"], max_tokens=9, temperature=0, extra_body=extra
    )
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens == 9
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_request_keeps_its_name_and_texts_become_tokens(url: str, client: openai.OpenAI) -> None:
    answer = ask(client, "hello", extra_headers={"X-Request-Id": "order-66"})
    assert (answer.id, answer._request_id) == ("chatcmpl-order-66", "order-66")  # told once: Serve's proxy does it
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens}).json() == {"prompt": "hello"}


def test_answers_in_company_are_the_answers_alone(client: openai.OpenAI) -> None:
    prompts = [f"question {k}" for k in range(2)]
    alone = [ask(client, prompt).choices[0].message.content for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: ask(client, prompt).choices[0].message.content, prompts))
    assert together == alone


def test_several_answers_are_those_of_as_many_requests(client: openai.OpenAI) -> None:
    alone = ask(client, "hello").choices[0].message.content
    answer = ask(client, "hello", n=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, alone), (1, alone)]
    assert answer.usage.completion_tokens == 80


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "hello", extra_body={"suffix": "bye"})
    assert refused.value.param == "suffix"
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(client, "x" * 2 * LONG, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hello"}])


def test_the_counters_give_the_accepted_length_of_what_was_sent(url: str, client: openai.OpenAI) -> None:
    before = figures(url)
    extra = {"ignore_eos": True, "return_token_ids": True}
    steps = []
    for k in range(4):
        stream = ask(client, f"question {k}", stream=True, extra_body=extra)
        tokens = [getattr(chunk.choices[0], "token_ids", None) for chunk in stream]
        steps.append([len(ids) for ids in tokens if ids])
    after = figures(url)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    rounds = [count for one in steps for count in one[1:]]  # the prompt's own token is no round
    assert grown["dspark_output_tokens_total"] == sum(map(sum, steps)) == 160
    assert grown["dspark_rounds_total"] + grown["dspark_plain_rounds_total"] == len(rounds)
    assert grown["dspark_committed_tokens_total"] + grown["dspark_plain_rounds_total"] == sum(rounds)
    assert after["dspark_drafter_info:dspark"] == 1
    assert "dspark_fixed_verify_length" not in after  # a curve was measured at the start


def test_health(url: str) -> None:
    asked = time.monotonic()
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert time.monotonic() - asked < 1.0


def test_clients_that_hang_up_leave_nothing_behind(url: str, client: openai.OpenAI) -> None:
    before = figures(url)

    async def hang_up(http: httpx.AsyncClient, at_most: asyncio.Semaphore, k: int) -> None:
        """After the first chunk, or while nothing has come yet."""
        body = completion(f"question {k}", max_tokens=LONG, stream=k % 4 > 0, verify_length=0)
        async with at_most:
            if not body["stream"]:
                with pytest.raises(httpx.TimeoutException):
                    await http.post(f"{url}/v1/completions", json=body, timeout=0.3)
                return
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                assert response.status_code == 200
                await anext(response.aiter_lines())

    async def run() -> None:
        at_most = asyncio.Semaphore(30)  # far fewer than are cancelled in all: whatever leaks would add up to a limit
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as http:
            await asyncio.gather(*(hang_up(http, at_most, k) for k in range(100)))

    asyncio.run(run())
    assert wait_for(lambda: is_empty(url), seconds=5.0)
    after = figures(url)
    ended = {
        reason: after[f"dspark_requests_total:{reason}"] - before[f"dspark_requests_total:{reason}"]
        for reason in ENDINGS
    }
    assert 75 <= ended.pop("abort") <= 100  # a client that waits 0.3 s may be gone before its request is begun
    assert not any(ended.values()), ended
    assert ask(client, "hello").usage.completion_tokens == 40


def test_a_dead_scheduler_is_noticed_counted_and_replaced(url: str, client: openai.OpenAI, config: ServeConfig) -> None:
    assert wait_for(lambda: figures(url)["dspark_fleet_attached"] == 1, seconds=20)
    before = figures(url)
    text = ask(client, "hello").choices[0].message.content

    def scheduler() -> Any:
        return ray.get_actor(scheduler_name(config.fleet), namespace=config.fleet.namespace)

    ray.kill(scheduler())
    assert ask(client, "hello").choices[0].message.content == text
    lost = before["dspark_fleet_fallbacks_total"] + 1
    assert wait_for(lambda: figures(url)["dspark_fleet_fallbacks_total"] >= lost, seconds=5)
    assert wait_for(lambda: figures(url)["dspark_fleet_attached"] == 1, seconds=20)
    assert len(ray.get(scheduler().replicas.remote())) == 1
    assert ask(client, "hello").choices[0].message.content == text


def test_a_scheduler_without_replicas_ends_itself(url: str) -> None:
    alone = FleetConfig(name="idle", idle_exit_s=0.5, lease_ttl_s=30.0)  # time enough for the actor to start
    exchange = connect_scheduler(alone)
    assert exchange(ReplicaReport("r", 1)).share == FREE

    def is_gone() -> bool:
        try:
            ray.get_actor(scheduler_name(alone), namespace=alone.namespace)
        except ValueError:
            return True
        return False

    assert not is_gone()
    assert wait_for(is_gone, seconds=10)


def test_a_dead_replica_ends_its_streams_with_an_error_and_is_replaced(url: str, client: openai.OpenAI) -> None:
    text = ask(client, "hello").choices[0].message.content
    stream = iter(ask(client, "hello", stream=True, max_tokens=LONG))
    next(stream)
    (replica,) = replicas_of("TargetReplica").values()
    ray.kill(replica, no_restart=False)
    with pytest.raises(openai.APIError, match="try again"):
        list(stream)

    def is_back() -> bool:
        return httpx.get(f"{url}/health").status_code == 200

    assert wait_for(is_back, seconds=60)
    assert ask(client, "hello").choices[0].message.content == text
