"""Sends a fleet many times what it can do, and tells how each request was answered and how long admitted ones took.

    python benchmarks/overload.py --deployment deployments/dspark.yaml --seconds 60 --times 10

The fleet has as many target replicas as the deployment file says, unless --replicas does. First its own pace is
measured with as many clients as its replicas run at once. Then requests come at random times at that many times the
pace, whether or not earlier ones were answered; `sent_late_s` tells how far the sender itself fell behind. It fails if
any is left without an answer or gets another status than 200, 429 and 503, if one of the latter says no time to come
back, if none is admitted or one that is takes more than --most-s, or if anything is left running at the end.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from running_fleet import RunningFleet

EXPECTED = (200, 429, 503)
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """status: 0 for none. has_time: whether a refusal says when to come back."""

    status: int
    seconds: float
    has_time: bool


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    changes = {"threads": options.threads} | json.loads(options.changes)
    with RunningFleet(options.deployment, changes, num_replicas=options.replicas) as fleet:
        options.clients = options.clients or fleet.num_places
        body = {"model": fleet.model, "max_tokens": options.tokens, "ignore_eos": True, "temperature": 0}
        pace = asyncio.run(_pace(fleet.url, body, options))
        answers, late_s = asyncio.run(_overload(fleet.url, body, options.times * pace, options))
        free_s = fleet.seconds_until_free()
    size = {"replicas": fleet.num_replicas, "clients": options.clients}
    report = size | _report(answers, pace, free_s, options) | {"sent_late_s": round(late_s, 3)}
    print(json.dumps(report, indent=1))
    return int(_has_failed(report, options.most_s))


def _has_failed(report: dict[str, Any], most_s: float) -> bool:
    """most_s: seconds that an admitted request may take."""
    is_wrong = report["unanswered"] or report["unexpected"] or report["without_retry_after"]
    is_slow = not report["admitted_s"] or report["admitted_s"]["most"] > most_s
    return bool(is_wrong or is_slow or report["free_after_s"] is None)


async def _pace(url: str, body: dict[str, Any], options: argparse.Namespace) -> float:
    """Requests per second with `--clients` of them at once."""
    ends_at = time.monotonic() + options.warmup_s
    async with _client(options) as client:

        async def ask_on() -> int:
            count = 0
            while time.monotonic() < ends_at:
                count += (await _ask(client, url, body)).status == 200
            return count

        started = time.monotonic()
        counts = await asyncio.gather(*(ask_on() for _ in range(options.clients)))
        return sum(counts) / (time.monotonic() - started)


async def _overload(
    url: str, body: dict[str, Any], per_s: float, options: argparse.Namespace
) -> tuple[list[Answer], float]:
    """The answers, and the most seconds by which a request went out later than it was to."""
    draw, asked, late_s = random.Random(0), [], 0.0
    async with _client(options) as client:
        due = time.monotonic()
        ends_at = due + options.seconds
        while due < ends_at:
            now = time.monotonic()
            await asyncio.sleep(due - now)
            late_s = max(late_s, now - due)
            asked.append(asyncio.create_task(_ask(client, url, body)))
            due += draw.expovariate(per_s)
        return await asyncio.gather(*asked), late_s


async def _ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    asked_at = time.monotonic()
    content = json.dumps({**body, "prompt": f"{random.random()} is"})
    try:
        async with client.post(f"{url}/v1/completions", data=content, headers=JSON) as response:
            await response.read()
            status, has_time = response.status, "retry-after" in response.headers
    except (aiohttp.ClientError, TimeoutError):
        status, has_time = 0, False
    return Answer(status, time.monotonic() - asked_at, has_time)


def _client(options: argparse.Namespace) -> aiohttp.ClientSession:
    """One that costs little beside what it asks: it runs on the same machine."""
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def _report(
    answers: Sequence[Answer], pace: float, free_s: float | None, options: argparse.Namespace
) -> dict[str, Any]:
    admitted = sorted(answer.seconds for answer in answers if answer.status == 200)
    refused = sorted(answer.seconds for answer in answers if answer.status in EXPECTED[1:])
    return {
        "seconds": options.seconds,
        "pace_per_s": round(pace, 2),
        "sent_per_s": round(len(answers) / options.seconds, 2),
        "admitted_per_s": round(sum(answer.status == 200 for answer in answers) / options.seconds, 2),
        "statuses": dict(sorted(Counter(answer.status for answer in answers).items())),
        "unanswered": sum(answer.status == 0 for answer in answers),
        "unexpected": sum(answer.status not in (0, *EXPECTED) for answer in answers),
        "without_retry_after": sum(a.status in EXPECTED[1:] and not a.has_time for a in answers),
        "admitted_s": _percentiles(admitted),
        "refused_s": _percentiles(refused),
        "free_after_s": free_s,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    return {name: round(values[min(len(values) - 1, int(place * len(values)))], 3) for name, place in places.items()}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployment", default="deployments/dspark.yaml")
    parser.add_argument("--changes", default="{}", help="JSON that replaces parts of the application's args")
    parser.add_argument("--replicas", type=int, help="of the target; default: the deployment file's")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--clients", type=int, help="at once while the pace is measured; default: all places")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--warmup-s", type=float, default=10.0, help="seconds in which the pace is measured")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0, help="what the fleet can do")
    most = "seconds that an admitted request may take: limits.max_wait_s, and its own time in a full batch"
    parser.add_argument("--most-s", type=float, default=20.0, help=most)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="after which a request counts as unanswered")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
