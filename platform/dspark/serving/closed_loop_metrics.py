"""What /metrics shows of a drafter's confidences and acceptance while it serves, and of recorded traffic.

calibration error of slot k   dspark_confidence_ece{mode, position=k} over dspark_confidence_ece_rounds of them, beside
                              dspark_confidence_ece_floor, what a perfect head would show at that number
drift                         dspark_acceptance_drift{mode}: from 1 on an alarm is due
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dspark.serving.closed_loop import Belief, ClosedLoop
from dspark.serving.metrics import gauge
from dspark.speculation.calibration_fit import MIN_ROUNDS
from dspark.traffic.recorder import Recorder
from dspark.traffic.rounds import MODES

Rows = Iterable[tuple[Sequence[str], float]]


def closed_loop_families(loop: ClosedLoop) -> list[Metric]:
    """Nothing of what there is not: no drafter with confidences, no recording, no fine-tuning."""
    families = []
    if loop.belief is not None:
        families += [*_error_families(loop.belief), *_drift_families(loop.belief)]
        outcomes = dict(loop.calibrations)
        if loop.calibration_watch is not None:
            outcomes = {name: n + loop.calibration_watch.outcomes[name] for name, n in outcomes.items()}
        text = "Changes of calibration.json while it serves, by what became of them."
        families.append(_by_label("calibration_reloads", text, "outcome", outcomes))
        text = "The scales of the confidences that are in force."
        families.append(gauge("calibration_info", text, 1, {"fingerprint": loop.belief.found.digest or "none"}))
    if loop.recorder is not None:
        families += _traffic_families(loop.recorder)
    if loop.fine_tune is not None:
        text = "Alarms of drift by what became of them."
        families.append(_by_label("fine_tunes", text, "outcome", loop.fine_tune.outcomes))
    return families


def _error_families(belief: Belief) -> list[Metric]:
    errors, floors, numbers, means = [], [], [], []
    for mode in MODES:
        slots = belief.windows[mode].errors(belief.scales(mode))
        for k, slot in enumerate(slots):
            labels = (mode, str(k))
            errors.append((labels, slot.ece))
            floors.append((labels, slot.floor))
            numbers.append((labels, float(slot.num_rounds)))
        told = [slot.ece for slot in slots if slot.num_rounds >= MIN_ROUNDS]
        if told:
            means.append(((mode,), fmean(told)))
    text = "Expected calibration error of the survival predicted at the position, over the newest rounds."
    floor_text = "… that a perfect predictor would show at this number of rounds."
    mean_text = f"… in the mean over the positions that {MIN_ROUNDS} rounds or more were judged at."
    places = ("mode", "position")
    return [
        _gauges("confidence_ece", text, places, errors),
        _gauges("confidence_ece_floor", floor_text, places, floors),
        _gauges("confidence_ece_rounds", "… rounds that it is measured over.", places, numbers),
        _gauges("confidence_ece_mean", mean_text, ("mode",), means),
    ]


def _drift_families(belief: Belief) -> list[Metric]:
    tests = {mode: watch.test for mode, watch in belief.watches.items() if watch.test is not None}
    scores = [((mode,), test.score) for mode, test in tests.items()]
    ratios = [((mode,), test.ratio) for mode, test in tests.items() if test.ratio is not None]
    levels = [((mode, str(k)), level) for mode, test in tests.items() for k, level in enumerate(test.levels)]
    alarms = {mode: watch.num_alarms for mode, watch in belief.watches.items()}
    text = "Test of acceptance against its level at calibration: from 1 on it has fallen."
    return [
        _gauges("acceptance_drift", text, ("mode",), scores),
        _gauges("acceptance_ratio", "Draft tokens that stood lately over the level's.", ("mode",), ratios),
        _gauges("acceptance_level", "Conditional acceptance at calibration.", ("mode", "position"), levels),
        _by_label("acceptance_drift_alarms", "Times that acceptance was found to have fallen.", "mode", alarms),
    ]


def _traffic_families(recorder: Recorder) -> list[Metric]:
    counts, folder = recorder.counts, recorder.folder
    rounds = {"written": counts.written_rounds, "dropped": counts.dropped_rounds, "lost": counts.lost_rounds}
    texts = {"written": counts.written_texts, "lost": counts.lost_texts}
    files = {"written": folder.num_written, "removed": folder.num_removed, "failed": counts.failures}
    text = "Rounds recorded: dropped while the writer was behind, lost where a file could not be written."
    return [
        _by_label("traffic_rounds", text, "outcome", rounds),
        _by_label("traffic_texts", "Answers whose texts are kept.", "outcome", texts),
        _by_label("traffic_files", "Files of recorded traffic; the oldest are removed for new ones.", "outcome", files),
        _by_label("traffic_redactions", "Matches taken out of kept texts.", "rule", recorder.redactions),
        gauge("traffic_waiting", "Answers that wait for the writer.", recorder.num_waiting),
        gauge("traffic_bytes", "Bytes of recorded traffic, as of the last file.", folder.num_bytes),
    ]


def _gauges(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(f"dspark_{name}", text, labels=list(labels))
    for values, number in rows:
        family.add_metric(list(values), number)
    return family


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"dspark_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
