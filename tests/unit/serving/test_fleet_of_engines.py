"""Real engines under the scheduler's own shares: their output stays the target's, and drafters are not overrun."""

from pathlib import Path
from typing import Any

import pytest

from dspark.engine.draft_runner import SequentialDraftRunner
from dspark.engine.engine import Engine
from dspark.serving.config import FleetConfig
from dspark.serving.fleet_link import FleetLink, LoadMeter
from dspark.serving.scheduler_actor import FleetScheduler
from dspark.speculation.cost_curve import CostCurve
from scripted_drafters import ScriptedDrafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request

NUM_NEW = 80
STEP_S = 0.1
CURVE = CostCurve((1, 256), (STEP_S, 1.05 * STEP_S))


class Fleet:
    """Engines that step in turn, ten times a second by a clock of the test's own; reports come every other step."""

    def __init__(self, engines: list[Engine], **settings: Any) -> None:
        self.now = 0.0
        config = FleetConfig(report_every_s=STEP_S, lease_ttl_s=10.0, **settings)
        self.scheduler = FleetScheduler(config, cpu_clock=lambda: 0.0)
        self.engines, self.links = engines, []
        for number, engine in enumerate(engines):
            meter = LoadMeter(engine, str(number))
            nothing = dict.fromkeys(meter._counters(), 0.0)
            meter._counters = lambda nothing=nothing: nothing
            self.links.append(FleetLink(config, report=meter.report, connect=self.connect, clock=lambda: self.now))

    def connect(self, config: FleetConfig) -> Any:
        return lambda report: self.scheduler.lease(report, now=self.now)

    def step(self, number: int) -> list[Any]:
        outputs = []
        if number % 2 == 0:
            for link in self.links:
                link.exchange_once()
        for engine, link in zip(self.engines, self.links, strict=True):
            engine.policy.share = link.share()
            outputs += engine.step()
        self.now += STEP_S
        return outputs


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def continuations(tiny_target: Path) -> list[list[int]]:
    return greedy_continuations(load(tiny_target), PROMPTS, NUM_NEW + 8)


def engine_for(model: Any, script: list[int], prompt: list[int], num_requests: int, name: str, tier: int) -> Engine:
    """Requests that are alike, drafted for by a script that is right."""
    drafter = ScriptedDrafter([*prompt, *script], block_size=4, num_right=4)
    engine = make_engine(model, SequentialDraftRunner(drafter), curve=CURVE, min_gain=0.0, probe_every=NUM_NEW)
    for r in range(num_requests):
        engine.add(request(prompt, f"{name}-{r}", max_tokens=NUM_NEW, priority=tier))
    return engine


@pytest.mark.parametrize("minimum", [{}, {-1: 25.0}], ids=["no minimum", "a tier's minimum"])
def test_leases_change_no_output_and_keep_to_the_drafters(model: Any, continuations: Any, minimum: Any) -> None:
    engines = [
        engine_for(model, continuations[0], PROMPTS[0], 2, "a", -1),
        engine_for(model, continuations[3], PROMPTS[3], 5, "b", 0),
    ]
    fleet = Fleet(engines, draft_blocks_per_s=30.0, max_draft_load=1.0, min_tokens_per_s=minimum)
    outputs: dict[str, list[Any]] = {}
    bounded = number = 0
    while any(engine.has_work for engine in engines):
        drafted = sum(engine.stats.drafted for engine in engines)
        for output in fleet.step(number):
            outputs.setdefault(output.request_id, []).append(output)
        shares = [engine.policy.share for engine in engines]
        if number > 4 and all(engine.num_running for engine in engines):
            bounded += any(share.max_drafted is not None for share in shares)
            assert sum(engine.stats.drafted for engine in engines) - drafted <= 3  # thirty a second, ten steps
        number += 1
        assert number < 400
    assert bounded > 3
    for name, expected in (("a", continuations[0]), ("b", continuations[3])):
        for r in range(2 if name == "a" else 5):
            assert ids_of(outputs[f"{name}-{r}"]) == expected[:NUM_NEW]
