"""An answer whose replicas die is the answer that one replica gives, byte for byte."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.config import FailoverConfig
from dspark.serving.ingress import build_app
from dspark.serving.openai_schema import Refusal
from dspark.serving.resuming import FIRST_PAUSE_S, FailoverCounts, Patience, ReplicaLost
from dspark.serving.target_replica import TargetReplica
from mortal_replicas import MortalReplicas
from tiny_serving import CHAT, TEXT, chat, completion, events, is_empty, post, serve_config

BUSY = Refusal(429, "full", code="rate_limit_exceeded")


@pytest.fixture(scope="module")
def replicas(tiny_target: Path) -> Iterator[list[TargetReplica]]:
    pair = [TargetReplica(serve_config(tiny_target, drafter=drafter)) for drafter in ("ngram", None)]
    yield pair
    assert all(is_empty(replica) for replica in pair)
    for replica in pair:
        replica.close()


def without_names(value: Any) -> Any:
    """But for what differs between two requests: ids, times, and how much of the prompt was known; numbers to what
    float32 keeps between batches of different sizes."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, list):
        return [without_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "top_logprobs" in value and isinstance(value["top_logprobs"], list):
        value = {**value, "top_logprobs": None}  # near ties may change places
    return {k: without_names(v) for k, v in value.items() if k not in ("id", "created", "prompt_tokens_details")}


def of_choices(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What a stream says of each choice, its parts joined."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "reason": []})
            own["text"] += choice.get("text", "") or choice.get("delta", {}).get("content") or ""
            own["ids"] += choice.get("token_ids") or []
            own["logprobs"].append(choice.get("logprobs"))
            own["reason"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    return choices


LOGPROBS: dict[str, Any] = {"logprobs": 2, "return_token_ids": True}
BODIES = {
    "greedy": completion(return_token_ids=True),
    "stop_string": completion(max_tokens=80, return_token_ids=True),
    "seeded": completion(temperature=1.0, seed=11, n=3, return_token_ids=True),
    "logprobs": completion(**LOGPROBS),
    "rules": completion(
        temperature=0.9, seed=4, min_tokens=20, frequency_penalty=0.8, repetition_penalty=1.2, **LOGPROBS
    ),
}


def body_of(name: str, replica: TargetReplica) -> dict[str, Any]:
    body = dict(BODIES[name])
    if name == "stop_string":
        text = post(replica, TEXT, body).json()["choices"][0]["text"]
        body["stop"] = [text[31:34], "never there"]
    return body


@pytest.mark.parametrize("deaths", [(0,), (1,), (5,), (3, 4), (2, 0, 1, 6)])
@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_the_same_however_often_its_replica_dies(
    replicas: list[TargetReplica], name: str, deaths: tuple[int, ...]
) -> None:
    body = body_of(name, replicas[0])
    alone = post(replicas[0], TEXT, body).json()
    mortal: Any = MortalReplicas(replicas, deaths)
    assert without_names(post(mortal, TEXT, body).json()) == without_names(alone)
    assert len(mortal.asked) == 1 + len(deaths)
    assert all(one is not None for one in mortal.asked[1 + sum(d == 0 for d in deaths[:1]) :])


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_has_no_seam(replicas: list[TargetReplica], name: str) -> None:
    body = {**body_of(name, replicas[0]), "stream": True, "stream_options": {"include_usage": True}}
    *alone, usage, _ = events(post(replicas[0], TEXT, body))
    mortal: Any = MortalReplicas(replicas, (2, 3))
    *chunks, usage_then, done = events(post(mortal, TEXT, body))
    assert done == "[DONE]"
    assert without_names(usage_then) == without_names(usage)
    told, expected = of_choices(chunks), of_choices(alone)
    for index, choice in expected.items():
        assert {**told[index], "logprobs": None} == {**choice, "logprobs": None}
        assert joined(told[index]["logprobs"]) == joined(choice["logprobs"])
    assert sum("prompt_token_ids" in choice for chunk in chunks for choice in chunk["choices"]) == 1


def joined(parts: list[Any]) -> dict[str, list[Any]]:
    """Logprobs of one choice."""
    lists: dict[str, list[Any]] = {}
    for part in parts:
        for key, values in without_names(part or {}).items():
            lists.setdefault(key, []).extend(values or [])
    return lists


def num_continued(replicas: list[TargetReplica]) -> float:
    samples = [s for one in replicas for family in asyncio.run(one.metrics()) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == "dspark_requests_continued_total")


def test_a_chat_goes_on_too_and_is_counted(replicas: list[TargetReplica]) -> None:
    before = num_continued(replicas)
    alone = post(replicas[0], CHAT, chat()).json()
    mortal: Any = MortalReplicas(replicas, (2,))
    assert without_names(post(mortal, CHAT, chat()).json()) == without_names(alone)
    assert num_continued(replicas) == before + 1


def test_choices_that_ended_are_not_made_again(replicas: list[TargetReplica]) -> None:
    """The choices of a seed end apart: the death comes when one of them has."""
    body = completion(temperature=1.0, seed=3, n=2, max_tokens=60, return_token_ids=True, ignore_eos=False)
    body["stop_token_ids"] = list(range(3, 40))
    alone = post(replicas[0], TEXT, body).json()
    lengths = sorted(len(choice["token_ids"]) for choice in alone["choices"])
    assert lengths[0] < lengths[1], "choose another seed"
    mortal: Any = MortalReplicas(replicas[1:], (2 * lengths[0] + 1,))  # without a drafter: a token a step
    assert without_names(post(mortal, TEXT, body).json()) == without_names(alone)
    assert len(mortal.asked[1].output_ids) == 1


def test_after_so_many_deaths_the_answer_ends_with_an_error(replicas: list[TargetReplica]) -> None:
    def asked() -> Any:
        failover = FailoverConfig(max_continuations=2, min_progress_tokens=0)
        return MortalReplicas(replicas, (2, 2, 2), failover=failover)

    response = post(asked(), TEXT, completion())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_failed")
    *chunks, last = events(post(asked(), TEXT, completion(stream=True, return_token_ids=True)))
    assert last["error"]["code"] == "replica_failed"
    assert len(chunks) == 6


def test_a_busy_replica_is_asked_again_only_by_an_answer_that_has_begun(replicas: list[TargetReplica]) -> None:
    later: Any = MortalReplicas(replicas, (2,), refusals={1: BUSY, 2: BUSY})
    assert post(later, TEXT, completion()).status_code == 200
    assert [one is None for one in later.asked] == [True, False, False, False]
    at_once: Any = MortalReplicas(replicas, refusals={0: BUSY})
    response = post(at_once, TEXT, completion())
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


def test_an_answer_does_not_wait_for_ever(replicas: list[TargetReplica]) -> None:
    always_busy = dict.fromkeys(range(1, 100), BUSY)
    impatient = FailoverConfig(wait_s=0.2)
    mortal: Any = MortalReplicas(replicas, (2,), refusals=always_busy, failover=impatient)
    assert post(mortal, TEXT, completion()).json()["error"]["code"] == "replica_failed"
    short: Any = MortalReplicas(replicas, (2,), refusals=always_busy, timeout_s=0.2)
    assert post(short, TEXT, completion()).json()["error"]["code"] == "timeout"


def test_a_refusal_of_the_request_itself_is_passed_on(replicas: list[TargetReplica]) -> None:
    mortal: Any = MortalReplicas(replicas)
    assert post(mortal, TEXT, completion(max_tokens=5000)).status_code == 400


def test_a_client_that_leaves_while_a_replica_is_looked_for_leaves_nothing(replicas: list[TargetReplica]) -> None:
    always_busy = dict.fromkeys(range(1, 100), BUSY)
    mortal: Any = MortalReplicas(replicas, (2,), refusals=always_busy)

    async def run() -> None:
        transport = httpx.ASGITransport(build_app(mortal, serve_config("unused")))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post(TEXT, json=completion()), 0.3)
        num_asked = len(mortal.asked)
        await asyncio.sleep(0.3)
        assert len(mortal.asked) <= num_asked + 1

    asyncio.run(run())


def test_a_request_under_which_two_replicas_die_one_after_the_other_is_not_tried_on_a_third(
    replicas: list[TargetReplica],
) -> None:
    """Were it what ends them, none would be left; whatever it had is told, and why it ends."""
    counts = FailoverCounts()

    def asked() -> Any:
        return MortalReplicas(replicas, (4, 2, 9, 9), failover=FailoverConfig(max_continuations=9), counts=counts)

    mortal = asked()
    response = post(mortal, TEXT, completion())
    assert (response.status_code, response.json()["error"]["code"]) == (422, "poison_request")
    assert len(mortal.asked) == 2
    *chunks, last = events(post(asked(), TEXT, completion(stream=True, return_token_ids=True)))
    assert last["error"]["code"] == "poison_request"
    assert len(chunks) == 6
    assert counts == FailoverCounts(continued=2, given_up=0, poison=2)


def test_one_death_never_ends_an_answer_not_even_before_its_first_token(replicas: list[TargetReplica]) -> None:
    alone = post(replicas[0], TEXT, completion(max_tokens=80, verify_length=0)).json()
    for deaths in ((0,), (70,), (2, 40), (0, 33)):  # a step a token: far enough from one to the next
        mortal: Any = MortalReplicas(replicas[1:], deaths, failover=FailoverConfig(max_continuations=2))
        answer = post(mortal, TEXT, completion(max_tokens=80, verify_length=0)).json()
        assert without_names(answer) == without_names(alone)


def died(how: Any = "died") -> ReplicaLost:
    return ReplicaLost("it was there", how)


def test_deaths_count_as_the_requests_doing_by_how_far_it_came_in_between() -> None:
    patience = Patience(FailoverConfig(max_continuations=9, min_progress_tokens=32))
    assert (patience.lost(died(), 5), patience.is_poison) == (0.0, False)
    patience.found()
    assert (patience.lost(died(), 37), patience.is_poison) == (0.0, False)
    patience.found()
    assert (patience.lost(died(), 68), patience.is_poison) == (None, True)


def test_having_no_replica_is_not_the_requests_doing() -> None:
    patience = Patience(FailoverConfig(max_continuations=4))
    patience.lost(died(), 5)
    for _ in range(3):
        assert patience.lost(died("missing"), 5) is not None
    assert patience.lost(died("missing"), 5) is None  # but it is looked for so many times only
    assert not patience.is_poison


def test_only_deaths_count_as_the_requests_doing() -> None:
    """A rollout takes replicas away one after the other; what is handed on in between says nothing of the request."""
    patience = Patience(FailoverConfig(max_continuations=9, min_progress_tokens=32))
    for how, num_tokens in (("taken_away", 5), ("taken_away", 6), ("died", 7), ("taken_away", 8), ("missing", 8)):
        assert patience.lost(died(how), num_tokens) is not None
        assert not patience.is_poison
        patience.found()
    assert (patience.lost(died(), 38), patience.is_poison) == (None, True)  # the second one, 31 tokens after the first


def test_replicas_that_are_taken_away_do_not_use_up_the_continuations() -> None:
    patience = Patience(FailoverConfig(max_continuations=1))
    for number in range(5):
        assert patience.lost(died("taken_away"), 100 * number) is not None
        patience.found()
    assert patience.lost(died(), 600) is not None
    patience.found()
    assert patience.lost(died(), 700) is None


def test_patience_ends_by_number_and_by_time() -> None:
    now = [0.0]
    patience = Patience(FailoverConfig(max_continuations=2, wait_s=1.0), clock=lambda: now[0])
    assert patience.left_s is None
    assert patience.lost(died(), 10) == 0.0
    assert patience.busy() == FIRST_PAUSE_S
    now[0] = 0.6
    assert patience.left_s == pytest.approx(0.4)
    patience.found()
    assert (patience.left_s, patience.is_searching) == (None, False)
    assert patience.lost(died(), 100) == 0.0
    now[0] = 1.7
    assert patience.busy() is None
    patience.found()
    assert patience.lost(died(), 200) is None
