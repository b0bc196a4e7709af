"""What /metrics shows of the scheduler's own beliefs and bounds, which no other engine tells:

verify budget of a request     dspark_verify_length histogram, one observation per decode
predicted survival at slot k   dspark_position_expected_total{position=k} / dspark_position_judged_total{position=k}
what came of it                dspark_position_stood_total{position=k} / dspark_position_judged_total{position=k}
predicted over measured step   dspark_predicted_step_seconds_total / dspark_measured_step_seconds_total
"""

from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily

from dspark.engine.engine import Engine
from dspark.serving.fleet_link import FleetLink
from dspark.serving.metrics import by_position, counter, gauge


def schedule_families(engine: Engine) -> list[Metric]:
    """Budgets, survival and step times as they were expected and as they came."""
    counts = engine.stats.schedule
    text = "Draft tokens verified for a request in a step, 0 where it decoded plainly."
    budgets = HistogramMetricFamily("dspark_verify_length", text)
    within = list(accumulate(counts.budgets))
    buckets = [(f"{length}.0", float(number)) for length, number in enumerate(within)]
    total = sum(length * number for length, number in enumerate(counts.budgets))
    budgets.add_metric([], [*buckets, ("+Inf", float(within[-1] if within else 0))], sum_value=float(total))
    predicted = "Seconds that the cost curve predicted for the steps it speaks of, drafting included."
    return [
        budgets,
        by_position("position_judged", "Verifications of a draft token at the position.", counts.judged),
        by_position("position_expected", "… the sum of the survival they were admitted with.", counts.expected),
        by_position("position_stood", "… those whose token stood.", counts.stood),
        counter("predicted_step_seconds", predicted, counts.predicted_s),
        counter("measured_step_seconds", "Seconds that these steps took.", counts.measured_s),
    ]


def fleet_families(link: FleetLink) -> list[Metric]:
    """How it stands with the fleet scheduler, and what its lease says; bounds only where there are any."""
    age_s, share = link.lease_age_s, link.share()
    families = [
        counter(
            "fleet_fallbacks", "Times a lease ran out and the replica went on by its local rule.", link.num_fallbacks
        ),
        gauge("fleet_attached", "1 while a lease of the fleet scheduler holds.", age_s is not None),
        gauge("lease_floor", "Draft tokens of a step verified whatever the cost curve says.", share.floor),
    ]
    if age_s is not None:
        families.append(gauge("lease_age_seconds", "Since the lease that holds was asked for.", age_s))
    if share.capacity is not None:
        families.append(gauge("lease_capacity", "Most draft tokens of a step.", share.capacity))
    if share.max_drafted is not None:
        families.append(gauge("lease_max_drafted", "Most requests of a step to draft for.", share.max_drafted))
    return families
