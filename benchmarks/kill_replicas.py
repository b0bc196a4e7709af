"""Kills processes of a running fleet (kill -9) in the midst of streams; compares every text with an undisturbed one.

    python benchmarks/kill_replicas.py --deployment deployments/dspark.yaml --streams 32 --tokens 256

The fleet is what `serve run` makes of the deployment file, with two target replicas, on a Ray cluster of its own. Of
the streams a half is greedy, a quarter has a seed, and a quarter is drawn freely: of these only the length can be
compared. A text may differ where two tokens of the target tie, unless the engine is deterministic, as it is here.

A kind of process is back when as many of them run as before and every target replica has draft tokens proposed again
(dspark_drafted_tokens_total rises), within --wait-s. Where an ingress dies its clients have to see an error; each asks
again under the same X-Request-Id as soon as the fleet answers, and has to get the undisturbed text. Exit code 1 if
anything of this fails.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dspark.serving.request_ids import HEADER
from running_fleet import RunningFleet, pids_of

TITLES = {
    "target": "ray::ServeReplica:{app}:TargetReplica",
    "draft": "ray::ServeReplica:{app}:Draft",
    "scheduler": "ray::FleetScheduler",
    "controller": "ray::ServeController",
    "ingress": "ray::ServeReplica:{app}:Ingress",
}
DRAFTED = "dspark_drafted_tokens_total"
ENDED = "ended without a finish reason"
KINDS: Sequence[dict[str, Any]] = ({"temperature": 0}, {"seed": 7}, {"temperature": 0}, {})


@dataclass
class Stream:
    """What one client saw. arrivals: seconds, of every chunk."""

    body: dict[str, Any]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    arrivals: list[float] = field(default_factory=list)

    @property
    def is_repeatable(self) -> bool:
        return "seed" in self.body or self.body.get("temperature") == 0

    @property
    def saw_error(self) -> bool:
        """Whether the client was told that this is not the whole answer."""
        return self.error not in (None, ENDED)

    def gap_s(self, since: float) -> float:
        """The longest wait between two chunks that ended after `since`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((later - earlier for earlier, later in pairs if later > since), default=0.0)

    def problem(self, undisturbed: "Stream") -> str | None:
        """How it differs from what it should have been."""
        if self.error is not None:
            return self.error
        if len(self.ids) != len(undisturbed.ids):
            return f"{len(self.ids)} tokens in place of {len(undisturbed.ids)}"
        if self.is_repeatable and (self.ids, self.text) != (undisturbed.ids, undisturbed.text):
            same = [mine == other for mine, other in zip(self.ids, undisturbed.ids, strict=True)]
            return f"another text from token {same.index(False) if False in same else len(same)}"
        return None


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    changes = {"threads": options.threads, "engine": {"deterministic": True}} | json.loads(options.changes)
    with RunningFleet(options.deployment, changes, num_replicas=options.replicas) as fleet:
        bodies = _bodies(options, fleet.model)
        asyncio.run(_ask_all(fleet.url, bodies))  # once to warm up
        undisturbed = asyncio.run(_ask_all(fleet.url, bodies))
        broken = [stream.error for stream in undisturbed if stream.error is not None]
        assert not broken, f"the fleet fails undisturbed: {broken[0]}"
        assert asyncio.run(_drafts(fleet, options)), "nothing is drafted"
        is_shared = bool(fleet.metrics("dspark_draft_link_messages_total"))
        assert is_shared or "draft" not in options.victims, "no draft replica drafts: train the deployment's drafter"
        reports = [asyncio.run(_disturb(fleet, victim, bodies, undisturbed, options)) for victim in options.victims]
    print(json.dumps({"streams": options.streams, "tokens": options.tokens, "victims": reports}, indent=1))
    return int(any(_has_failed(report) for report in reports))


def _has_failed(report: dict[str, Any]) -> bool:
    """Whether an answer was spoilt, none was in its midst, or anything stayed behind or away.

    A killed ingress may spoil answers, if clients see it and get them when they ask again.
    """
    if report["victim"] == "ingress":
        is_spoilt = report["silently_spoilt"] or report["repeat_problems"] or not report["repeated"]
    else:
        is_spoilt = report["problems"]
    is_away = any(report[name] is None for name in ("process_back_s", "drafting_back_s", "free_after_s"))
    return bool(is_spoilt or is_away or not report["streams_open_at_the_kill"])


async def _disturb(
    fleet: RunningFleet,
    victim: str,
    bodies: Sequence[dict[str, Any]],
    undisturbed: Sequence[Stream],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Kill one process of a kind when the streams have a third of their tokens; what became of all."""
    title = TITLES[victim].format(app=fleet.app)
    before = pids_of(title)
    assert before, f"nothing of this fleet runs as {title!r}"
    streams = [Stream(body) for body in bodies]
    asking = asyncio.create_task(_ask_all(fleet.url, bodies, streams))
    while _num_tokens(streams) < _num_tokens(undisturbed) / 3 and not asking.done():
        await asyncio.sleep(0.01)
    num_open = sum(stream.finish_reason is None for stream in streams)
    os.kill(before[0], signal.SIGKILL)
    killed_at = time.monotonic()
    back_s = await _wait_until_back(title, before, killed_at, options.wait_s)
    drafting = asyncio.create_task(_seconds_until_drafting(fleet, killed_at, options))
    await asking
    again = await _ask_again(fleet, streams)
    await _ask_until(drafting, fleet, options)
    gaps = sorted(stream.gap_s(killed_at) for stream in streams)
    pairs = list(zip(streams, undisturbed, strict=True))
    report = {
        "victim": victim,
        "streams_open_at_the_kill": num_open,
        "problems": _counted(pairs),
        "silently_spoilt": sum(one.problem(other) is not None and not one.saw_error for one, other in pairs),
        "repeated": len(again),
        "repeat_problems": _counted((again[i], undisturbed[i]) for i in again),
        "longest_gap_s": round(gaps[-1], 3),
        "median_longest_gap_s": round(gaps[len(gaps) // 2], 3),
        "undisturbed_longest_gap_s": round(max(stream.gap_s(0.0) for stream in undisturbed), 3),
        "process_back_s": back_s,
        "drafting_back_s": drafting.result(),
        "free_after_s": await asyncio.to_thread(fleet.seconds_until_free),
    }
    print(json.dumps(report), file=sys.stderr, flush=True)
    await asyncio.to_thread(fleet.wait_until_ready)
    return report


async def _ask_again(fleet: RunningFleet, streams: Sequence[Stream]) -> dict[int, Stream]:
    """By their places, repeats of the streams whose clients saw an error, under the same request ids.

    Target replicas may still be at the first ones, whose ingress is gone: that is when a repeat has to be safe.
    """
    again = {i: Stream(one.body, one.request_id) for i, one in enumerate(streams) if one.saw_error}
    if again:
        await asyncio.to_thread(fleet.wait_until_ready)
        repeats = list(again.values())
        await _ask_all(fleet.url, [stream.body for stream in repeats], repeats)
    return again


async def _drafts(fleet: RunningFleet, options: argparse.Namespace) -> bool:
    """Whether every target replica drafts."""
    drafting = asyncio.create_task(_seconds_until_drafting(fleet, time.monotonic(), options))
    await _ask_until(drafting, fleet, options)
    return drafting.result() is not None


async def _ask_until(done: "asyncio.Task[float | None]", fleet: RunningFleet, options: argparse.Namespace) -> None:
    """Give every target replica something to draft for: prompts that none has read, with a length of their own."""
    common = {"model": fleet.model, "max_tokens": 32, "ignore_eos": True, "stream": True, "verify_length": 2}
    while not done.done():
        await _ask_all(fleet.url, [common | {"prompt": uuid.uuid4().hex} for _ in range(4 * options.replicas)])
        await asyncio.sleep(0.1)


async def _seconds_until_drafting(fleet: RunningFleet, since: float, options: argparse.Namespace) -> float | None:
    """Seconds from `since` until every target replica has drafted after this call; None after --wait-s."""
    first: dict[str, float] = {}
    while time.monotonic() - since < options.wait_s:
        drafted = await asyncio.to_thread(fleet.by_replica, DRAFTED)
        risen = [number > first.setdefault(replica, number) for replica, number in drafted.items()]
        if len(risen) >= options.replicas and all(risen):
            return round(time.monotonic() - since, 2)
        await asyncio.sleep(0.1)
    return None


async def _wait_until_back(title: str, before: Sequence[int], killed_at: float, wait_s: float) -> float | None:
    """Seconds from the kill until as many processes of the kind run again; None after `wait_s`."""
    while time.monotonic() - killed_at < wait_s:
        pids = pids_of(title)
        if before[0] not in pids and len(pids) >= len(before):
            return round(time.monotonic() - killed_at, 2)
        await asyncio.sleep(0.1)
    return None


def _counted(pairs: Iterable[tuple[Stream, Stream]]) -> dict[str, int]:
    problems = [problem for stream, other in pairs if (problem := stream.problem(other)) is not None]
    return {problem: problems.count(problem) for problem in problems}


def _num_tokens(streams: Sequence[Stream]) -> int:
    return sum(len(stream.ids) for stream in streams)


async def _ask_all(
    url: str, bodies: Sequence[dict[str, Any]], streams: Sequence[Stream] | None = None
) -> Sequence[Stream]:
    streams = streams or [Stream(body) for body in bodies]
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        await asyncio.gather(*(_ask(client, url, stream) for stream in streams))
    return streams


async def _ask(client: httpx.AsyncClient, url: str, stream: Stream) -> None:
    """Fill in what comes of a stream. Whatever breaks stands in its `error`."""
    headers = {HEADER: stream.request_id}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=stream.body, headers=headers) as response:
            if response.status_code != 200:
                stream.error = f"status {response.status_code}"
                return
            if response.headers.get(HEADER) != stream.request_id:
                stream.error = f"answered under the request id {response.headers.get(HEADER)!r}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(stream, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        stream.error = f"connection: {type(error).__name__}"
    if stream.error is None and stream.finish_reason is None:
        stream.error = ENDED


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    stream.arrivals.append(time.monotonic())
    if "error" in chunk:
        stream.error = f"error event: {chunk['error']['code']}"
        return
    (choice,) = chunk["choices"]
    stream.ids += choice.get("token_ids") or []
    stream.text += choice["text"]
    stream.finish_reason = choice["finish_reason"] or stream.finish_reason


def _bodies(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["messages"][0]["content"] for line in lines]
    common = {"model": model, "max_tokens": options.tokens, "ignore_eos": True, "return_token_ids": True}
    return [
        {**common, "prompt": prompts[k % len(prompts)], "stream": True, **KINDS[k % len(KINDS)]}
        for k in range(options.streams)
    ]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", default="deployments/dspark.yaml")
    parser.add_argument("--changes", default="{}", help="JSON that replaces parts of the application's args")
    parser.add_argument("--replicas", type=int, default=2, help="of the target")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--prompts", default="prompts/heldout.jsonl")
    parser.add_argument("--victims", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--wait-s", type=float, default=120.0, help="seconds from the kill until all drafts again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
