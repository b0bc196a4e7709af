"""Scales from recorded rounds: whose rounds count, that no answer is on both sides, and that nothing gets worse."""

import os
import random
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from dspark.evaluation.traffic_calibration import (
    _fit_side,
    acceptance_levels,
    new_calibration,
    read_traffic,
    traffic_report,
)
from dspark.speculation.calibration import Calibration, SlotScales
from dspark.speculation.calibration_fit import MIN_ROUNDS
from dspark.speculation.statistics import Round
from dspark.storage import locate
from dspark.traffic.live_error import ConfidenceWindow
from dspark.traffic.rounds import Origin, RecordedRounds, RoundBuffer, decode
from dspark.traffic.shards import ROUNDS, ShardFolder

BLOCK = 3
TARGET = {"name": "target", "revision": "1"}
ORIGIN = Origin("d" * 16, "runs/drafter", TARGET, BLOCK, "r1", None, None)
OPTIONS = {"num_bins": 20, "with_shift": True, "seed": 0}


def buffer(number: int, *, mode: str = "greedy", stretch: float = 1.0, seed: int = 0, most: int = BLOCK) -> RoundBuffer:
    """Answers of ten rounds whose logits are `stretch` times as far from 0 as acceptance has them; cut where the
    predicted survival is low, as a scheduler would."""
    rng, found = np.random.default_rng(seed), RoundBuffer()
    for answer in range(number // 10):
        rounds = []
        for _ in range(10):
            true = rng.normal(0.8, 1.5, most)
            survival = np.cumprod(1 / (1 + np.exp(-true)))
            proposed = max(1, int((survival > 0.3).sum()))
            stands = rng.random(proposed) < 1 / (1 + np.exp(-true[:proposed]))
            accepted = int(np.cumprod(stands).sum())
            rounds.append(Round(proposed, accepted, accepted + 1, (true[:proposed] * stretch).tolist()))
        found.add(seed * 10_000 + answer, mode, rounds, is_whole=False)
    return found


def rounds_of(*buffers: RoundBuffer) -> RecordedRounds:
    return RecordedRounds.joined([decode(one.encode(ORIGIN))[1] for one in buffers], BLOCK)


def test_stretched_confidences_are_mended_although_rounds_were_cut_by_what_they_predict() -> None:
    rounds = rounds_of(
        buffer(8000, stretch=3.0),
        buffer(8000, mode="sampled", stretch=0.4, seed=1),
        buffer(8000, mode="seeded", stretch=2.5, seed=2),
    )
    report = traffic_report(rounds, Calibration(), **OPTIONS)
    for mode, stretch in (("greedy", 3.0), ("sampled", 0.4), ("seeded", 2.5)):
        content = report[mode]
        assert content["is_taken"]
        errors = content["mean_ece"]
        assert errors["before"] > 0.07
        assert errors["before"] > 2 * errors["after"]
        assert errors["after"] < 2 * errors["floor"]
        assert content["temperatures"][0] == pytest.approx(stretch, rel=0.35)
        assert abs(content["rounds"]["fit"] - content["rounds"]["test"]) < 800


def test_scales_that_are_right_already_are_not_replaced_by_worse_ones() -> None:
    rounds = rounds_of(buffer(4000, stretch=2.0))
    right = Calibration({"greedy": SlotScales((2.0,) * BLOCK, (0.0,) * BLOCK)}, "d" * 16)
    report = traffic_report(rounds, right, **OPTIONS)
    calibration = new_calibration(report, right, drafter_sha256="d" * 16, fitted_on={})
    content = report["greedy"]
    assert content["is_taken"] == (content["mean_ece"]["after"] <= content["mean_ece"]["before"])
    if not content["is_taken"]:
        assert calibration.scales == right.scales
    assert content["mean_ece"]["before"] < 2 * content["mean_ece"]["floor"] < content["raw"]


def test_seeded_rounds_are_held_against_the_scales_they_were_served_by() -> None:
    """As long as there are none of its own those are the scales of sampled decoding."""
    present = Calibration({"sampled": SlotScales((1.0,) * BLOCK, (3.0,) * BLOCK)}, "d" * 16)
    report = traffic_report(rounds_of(buffer(4000, mode="seeded", seed=2)), present, **OPTIONS)
    assert report["seeded"]["mean_ece"]["before"] > 0.1 > report["seeded"]["raw"]
    calibration = new_calibration(report, present, drafter_sha256="d" * 16, fitted_on={})
    assert calibration.scales.keys() == {"sampled", "seeded"}
    assert calibration.scales["sampled"] == present.scales["sampled"]


def test_too_few_rounds_change_no_scales() -> None:
    present = Calibration({"sampled": SlotScales((5.0,) * BLOCK, (0.0,) * BLOCK)}, "d" * 16)
    rounds = rounds_of(buffer(200, stretch=3.0), buffer(200, mode="seeded", stretch=3.0, seed=2))
    report = traffic_report(rounds, present, **OPTIONS)
    assert (report["greedy"]["is_taken"], report["sampled"]["is_taken"]) == (False, False)
    assert not report["seeded"]["is_taken"]
    assert new_calibration(report, present, drafter_sha256="d" * 16, fitted_on={}).scales == present.scales


def test_slots_that_traffic_hardly_saw_keep_the_scales_they_have() -> None:
    rounds = rounds_of(buffer(8000, stretch=3.0, most=2), buffer(60, stretch=3.0, seed=1))
    present = Calibration({"greedy": SlotScales((1.0, 1.0, 5.0), (0.0, 0.0, -0.5))}, "d" * 16)
    report = traffic_report(rounds, present, **OPTIONS)
    scales = new_calibration(report, present, drafter_sha256="d" * 16, fitted_on={}).scales["greedy"]
    assert report["greedy"]["is_taken"]
    assert [entry["is_fitted"] for entry in report["greedy"]["positions"]] == [True, True, False]
    assert scales.temperatures[0] == pytest.approx(3.0, rel=0.35)
    assert (scales.temperatures[2], scales.shifts[2]) == (5.0, -0.5)
    last = report["greedy"]["positions"][2]
    assert (last["temperature"], last["shift"]) == (5.0, -0.5)  # what is judged is what will be served


def test_slots_without_scales_get_those_of_the_slot_before() -> None:
    report = traffic_report(rounds_of(buffer(8000, stretch=3.0, most=2)), Calibration(), **OPTIONS)
    temperatures, shifts = report["greedy"]["temperatures"], report["greedy"]["shifts"]
    assert (temperatures[2], shifts[2]) == (temperatures[1], shifts[1])


def test_the_mean_error_is_of_slots_with_rounds_enough_to_tell_as_it_is_live() -> None:
    """Three rounds of a slot show an error of tens of per cent, whatever its scales."""
    rounds = rounds_of(buffer(4000, stretch=3.0, most=2), buffer(30, stretch=3.0, seed=1))
    content = traffic_report(rounds, Calibration(), **OPTIONS)["greedy"]
    first, second, last = content["positions"]
    assert 0 < last["n"] < 200 < second["n"]
    for name, mean in content["mean_ece"].items():
        assert mean == pytest.approx((first[f"ece_{name}"] + second[f"ece_{name}"]) / 2)
    assert content["raw"] == content["mean_ece"]["before"]  # nothing was scaled before
    window = ConfidenceWindow(BLOCK, len(rounds))
    test = rounds.where(~_fit_side(rounds.request, OPTIONS["seed"]))
    for logits, accepted, judged in zip(test.logits, test.num_accepted, test.num_judged, strict=True):
        window.add(logits[:judged].tolist(), int(accepted), int(judged))
    live = [slot.ece for slot in window.errors(None) if slot.num_rounds >= MIN_ROUNDS]
    assert content["mean_ece"]["before"] == pytest.approx(fmean(live), abs=1e-6)


def test_scales_that_too_few_rounds_judge_are_not_taken() -> None:
    rounds = rounds_of(buffer(8000, stretch=3.0))
    is_fit = _fit_side(rounds.request, OPTIONS["seed"])
    is_kept = is_fit | (np.cumsum(~is_fit) <= MIN_ROUNDS - 1)
    content = traffic_report(rounds.where(is_kept), Calibration(), **OPTIONS)["greedy"]
    assert content["rounds"]["test"] == MIN_ROUNDS - 1 < content["rounds"]["fit"]
    assert content["mean_ece"] == {"before": None, "after": None, "floor": None}
    assert not content["is_taken"]


def test_no_answer_is_on_both_sides_and_halves_are_halves() -> None:
    request = np.repeat(np.arange(1000, dtype=np.uint64) * 7919, 3)
    sides = _fit_side(request, 0)
    assert all(len(set(sides[request == answer])) == 1 for answer in np.unique(request)[::50])
    assert 0.45 < sides.mean() < 0.55
    assert (sides != _fit_side(request, 1)).any()


def test_only_rounds_of_this_drafter_on_this_target_count_and_the_others_are_named(tmp_path: Path) -> None:
    folder = ShardFolder(str(tmp_path), writer="r", max_bytes=10_000_000)
    for origin, number in (
        (ORIGIN, 100),
        (Origin("e" * 16, "runs/other", TARGET, BLOCK, "r1", None, None), 50),
        (Origin("d" * 16, "runs/drafter", {"name": "bigger"}, BLOCK, "r1", None, None), 30),
        (Origin("d" * 16, "runs/drafter", TARGET, 5, "r1", None, None), 20),
        (ORIGIN, 40),
    ):
        folder.write(ROUNDS, buffer(number).encode(origin))
    broken = folder.write(ROUNDS, b"PAR1 broken")
    wanted = {"drafter_sha256": "d" * 16, "target": TARGET, "block_size": BLOCK}
    traffic = read_traffic(tmp_path, max_rounds=1000, **wanted)
    assert len(traffic.rounds) == 140
    assert traffic.num_answers == 10
    named = {reason.partition(":")[0]: number for reason, number in traffic.refused.items()}
    assert named == {
        f"of another drafter (runs/other, {'e' * 16})": 50,
        "of another target (bigger)": 30,
        "of blocks of 5 slots": 20,
        f"file {broken}": 1,
    }
    assert len(read_traffic(tmp_path, max_rounds=10, **wanted).rounds) == 40  # the newest whole file


def test_an_empty_folder_and_one_elsewhere_are_read_alike(tmp_path: Path) -> None:
    wanted = {"drafter_sha256": "d" * 16, "target": TARGET, "block_size": BLOCK, "max_rounds": 1000}
    assert len(read_traffic(tmp_path / "nothing", **wanted).rounds) == 0
    uri = f"memory://traffic-{os.urandom(4).hex()}"
    ShardFolder(uri, writer="r", max_bytes=10_000_000).write(ROUNDS, buffer(100).encode(ORIGIN))
    assert len(read_traffic(locate(uri), **wanted).rounds) == 100


def test_levels_are_the_conditional_acceptance_counted_one_by_one() -> None:
    rng, one = random.Random(0), RoundBuffer()
    rounds = []
    for _ in range(600):
        proposed = rng.randint(1, BLOCK)
        accepted = rng.randint(0, proposed)
        rounds.append(Round(proposed, accepted, accepted + 1, [0.0] * proposed))
    one.add(1, "sampled", rounds, is_whole=False)
    levels = acceptance_levels(rounds_of(one))
    assert levels.keys() == {"sampled"}
    for k, level in enumerate(levels["sampled"]):
        reached = [r for r in rounds if r.num_proposed > k and r.num_accepted >= k]
        assert level == pytest.approx(sum(r.num_accepted > k for r in reached) / len(reached))
