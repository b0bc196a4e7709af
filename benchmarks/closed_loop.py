"""Serves a drafter whose confidences are deliberately mis-scaled, refits them from its own traffic, without a restart.

    python benchmarks/closed_loop.py --drafter runs/demo/drafter --folder runs/closed_loop --rounds 10000

The drafter's folder is copied, its calibration's temperatures divided by --stretch. Requests go over HTTP to what
`serve run` makes of the deployment file, half of them greedy, half sampled, until --rounds rounds are recorded; then
jobs/calibrate.py --from-traffic runs beside the server, and other prompts are sent until as many rounds again were seen
under the new scales. It fails unless the live calibration error (the mean over positions, by way of decoding, as
/metrics tells it) was above --bar before and is below it afterwards, in the same process of the same replica.

Killed, the same command goes on: recorded rounds stay, and what is in report.json is not done again. Every start begins
with the mis-scaled calibration, whose live error it measures over some thousand rounds at least.
"""

import argparse
import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from dspark.data.prompts import PromptSource, read_prompts
from dspark.engine.drafter_folder import CALIBRATION, COST_CURVE, DRAFTER_FILES, drafter_sha256
from dspark.evaluation.traffic_calibration import read_traffic
from dspark.provenance import read_json, write_json
from dspark.speculation.calibration import Calibration, SlotScales
from replica_here import ReplicaHere
from running_fleet import RunningFleet

REPOSITORY = Path(__file__).resolve().parents[1]
REPORT = "report.json"
MODES = ("greedy", "sampled")
RELOAD_S, POLL_S = 60.0, 5.0
MIN_SEEN = 1000
Server = RunningFleet | ReplicaHere
Scraped = dict[str, list[tuple[dict[str, str], float]]]
SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    folder = Path(options.folder).resolve()
    if (folder / REPORT).is_file() and not options.fresh:
        report = read_json(folder / REPORT)
    else:
        if options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        report = _measure(options, folder)
        write_json(folder / REPORT, report)
    print(json.dumps(report, indent=1))
    return int(not report["holds"])


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    drafter = _mis_scaled(Path(options.drafter), folder / "drafter", options.stretch)
    prompts = _prompts(options.prompts)
    before, after = prompts[::2], prompts[1::2]  # what is measured afterwards was not fitted on
    changes = {
        "drafter": str(drafter),
        "threads": options.threads,
        "traffic": {"folder": str(folder / "traffic"), "flush_s": 5.0, "whole_blocks": options.whole_blocks},
        "watch": {"window_rounds": max(1000, 2 * options.rounds), "calibration_check_s": 1.0},
    }
    with _server(options, changes) as fleet:
        replica = _replicas(_scrape(fleet))
        num_wanted = options.rounds - _num_recorded(folder / "traffic", drafter)
        num_wanted = max(num_wanted, min(MIN_SEEN, options.rounds))  # the live error is of this start
        asyncio.run(_send(fleet, before, num_wanted, options))
        time.sleep(6.0)  # until the last rounds are written
        mis_scaled = _live(_scrape(fleet))
        refit = _refit(options, folder, drafter)
        reload_s = _wait_for_reload(fleet) if refit["taken"] else None
        asyncio.run(_send(fleet, after, options.rounds, options))
        scraped = _scrape(fleet)
        mended, is_same = _live(scraped), _replicas(scraped) == replica
    errors = {mode: (mis_scaled[mode]["mean"], mended[mode]["mean"]) for mode in MODES}
    is_enough = refit["rounds_read"] >= options.rounds
    return {
        "holds": is_same and is_enough and all(_mended(*pair, options.bar) for pair in errors.values()),
        "bar": options.bar,
        "rounds_fitted_on": refit["rounds_read"],
        "same_process": is_same,
        "seconds_until_taken": reload_s,
        "live_error_before": mis_scaled,
        "live_error_after": mended,
        "refit": {name: refit[name] for name in ("mean_ece", "rounds", "taken", "temperatures", "shifts", "seconds")},
    }


def _mended(before: float | None, after: float | None, bar: float) -> bool:
    return before is not None and after is not None and before > bar > after


def _server(options: argparse.Namespace, changes: dict[str, Any]) -> Server:
    if options.in_process:
        return ReplicaHere(options.deployment, changes)
    return RunningFleet(options.deployment, changes, num_replicas=1)


def _mis_scaled(source: Path, copy: Path, stretch: float) -> Path:
    """A copy of the drafter whose confidences are `stretch` times as far from 1/2 as calibration has them."""
    copy.mkdir(parents=True, exist_ok=True)
    for name in (*DRAFTER_FILES, COST_CURVE):
        if (source / name).is_file():
            shutil.copyfile(source / name, copy / name)
    right = Calibration.load(source / CALIBRATION, drafter_sha256=drafter_sha256(source))
    size = read_json(source / "config.json")["block_size"]
    wrong = {}
    for mode in MODES:
        scales = right.scales.get(mode) or SlotScales((1.0,) * size, (0.0,) * size)
        stretched = tuple(temperature / stretch for temperature in scales.temperatures)
        wrong[mode] = SlotScales(stretched, tuple(shift * stretch for shift in scales.shifts))
    Calibration(wrong, drafter_sha256(copy), {"mis_scaled_by": stretch}).save(copy / CALIBRATION)
    return copy


def _prompts(paths: Sequence[str]) -> list[list[dict[str, str]]]:
    found = read_prompts([PromptSource(path=path) for path in paths], seed=0, heldout_fraction=0.0).prompts
    return [prompt.opening for prompt in sorted(found, key=lambda prompt: prompt.id[::-1])]


def _num_recorded(folder: Path, drafter: Path) -> int:
    """Rounds of an earlier start."""
    wanted = {
        "drafter_sha256": drafter_sha256(drafter),
        "target": read_json(drafter / "provenance.json")["target"],
        "block_size": read_json(drafter / "config.json")["block_size"],
    }
    return len(read_traffic(folder, max_rounds=10_000_000, **wanted).rounds)


async def _send(
    fleet: Server, prompts: Sequence[list[dict[str, str]]], num_rounds: int, options: argparse.Namespace
) -> None:
    """Requests, so many at once, until that many more rounds with confidences were seen."""
    number = itertools.count()
    most = _num_rounds(_scrape(fleet)) + num_rounds
    is_done = False
    async with httpx.AsyncClient(timeout=600.0) as client:

        async def ask_on() -> None:
            while not is_done:
                place = next(number)
                body = {
                    "model": fleet.model,
                    "messages": prompts[place // len(MODES) % len(prompts)],
                    "max_tokens": options.tokens,
                    "temperature": float(place % len(MODES)),
                }
                response = await client.post(f"{fleet.url}/v1/chat/completions", json=body)
                response.raise_for_status()

        clients = [asyncio.create_task(ask_on()) for _ in range(options.clients)]
        while not is_done:
            await asyncio.sleep(POLL_S)
            for client_task in clients:
                if client_task.done():
                    client_task.result()  # what broke there
            scraped = await asyncio.to_thread(_scrape, fleet)
            seen = _num_rounds(scraped)
            print(f"{seen:,.0f} of {most:,.0f} rounds, live error {_said(_live(scraped))}", file=sys.stderr)
            is_done = seen >= most
        await asyncio.gather(*clients)


def _refit(options: argparse.Namespace, folder: Path, drafter: Path) -> dict[str, Any]:
    """The job's result, from a process of its own beside the server."""
    command = [sys.executable, str(REPOSITORY / "jobs" / "calibrate.py"), "--from-traffic", str(folder / "traffic")]
    command += ["--config", options.config, f"drafter={drafter}", f"output={folder / 'refit'}"]
    done = subprocess.run([*command, "tracking.enabled=false"], stdout=subprocess.PIPE, check=True, text=True)
    print(done.stdout, file=sys.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _wait_for_reload(fleet: Server) -> float:
    """Seconds until the replica goes by the new calibration. Raises: TimeoutError."""
    started = time.monotonic()
    while not any(n for by, n in _scrape(fleet)["dspark_calibration_reloads_total"] if by["outcome"] == "taken"):
        if time.monotonic() - started > RELOAD_S:
            raise TimeoutError(f"the new calibration was not taken within {RELOAD_S:g} s; see {fleet.log}")
        time.sleep(0.2)
    return round(time.monotonic() - started, 1)


def _live(scraped: Scraped) -> dict[str, Any]:
    """Live calibration error by way of decoding: the mean, and by position with its floor and number of rounds."""
    found: dict[str, Any] = {mode: {"mean": None, "positions": {}} for mode in MODES}
    for labels, value in scraped.get("dspark_confidence_ece_mean", []):
        if labels["mode"] in found:
            found[labels["mode"]]["mean"] = value
    for name in ("ece", "ece_floor", "ece_rounds"):
        for labels, value in scraped.get(f"dspark_confidence_{name}", []):
            if labels["mode"] in found:
                found[labels["mode"]]["positions"].setdefault(labels["position"], {})[name] = round(value, 5)
    return found


def _said(live: dict[str, Any]) -> str:
    means = {mode: content["mean"] for mode, content in live.items()}
    return ", ".join(f"{mode} {'-' if mean is None else f'{100 * mean:.2f} %'}" for mode, mean in means.items())


def _num_rounds(scraped: Scraped) -> float:
    """Verifications of drafted tokens so far; copies have no confidences."""
    totals = [sum(n for _, n in scraped.get(f"dspark_{name}_total", [])) for name in ("rounds", "lookup_rounds")]
    return totals[0] - totals[1]


def _replicas(scraped: Scraped) -> list[str]:
    """Of which replica /metrics tells; another process would have another name."""
    return sorted({labels["replica"] for labels, _ in scraped["dspark_steps_total"]})


def _scrape(server: Server) -> Scraped:
    """/metrics, by name the samples with their labels."""
    found: Scraped = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=60.0).raise_for_status().text.splitlines():
        match = SAMPLE.fullmatch(line)
        if match is not None:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="with a confidence head; its folder is only read")
    parser.add_argument("--folder", required=True, help="gets the copy, the traffic, the refit and report.json")
    parser.add_argument("--deployment", default=str(REPOSITORY / "deployments" / "colocated.yaml"))
    parser.add_argument("--config", default=str(REPOSITORY / "configs" / "demo" / "calibrate.yaml"))
    prompts = [str(REPOSITORY / "prompts" / name) for name in ("train.jsonl", "heldout.jsonl")]
    parser.add_argument("--prompts", nargs="+", default=prompts)
    parser.add_argument("--rounds", type=int, default=10_000, help="recorded before the refit, and seen after it")
    parser.add_argument("--stretch", type=float, default=3.0, help="what the temperatures are divided by")
    parser.add_argument("--whole-blocks", type=float, default=0.3, help="share of requests with whole blocks verified")
    parser.add_argument("--bar", type=float, default=0.03, help="mean live calibration error to come below")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--in-process", action="store_true", help="the replica in this process, without Ray Serve")
    parser.add_argument("--fresh", action="store_true", help="start over")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
