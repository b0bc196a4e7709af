"""What /metrics shows. Every figure of speculation is a counter, so that any ratio can be taken over any time:

accepted length tau   = dspark_committed_tokens_total / dspark_rounds_total
mean verify length    = dspark_verified_tokens_total / dspark_decodes_total
drafted share         = dspark_drafted_decodes_total / dspark_decodes_total
survival at slot k    = dspark_position_accepted_total{position=k} / dspark_position_proposed_total{position=k}
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dspark.engine.engine import Engine
from dspark.engine.remote_draft_state import RemoteDraftStats

REFUSED = ("dspark_requests_refused", "Requests that were not begun, by status.")
FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
PER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
ENDINGS = ("stop", "length", "abort", "timeout", "error")


class ReplicaMetrics:
    """What the engine does not count: requests and latencies as the replica sees them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._endings = Counter(
            "dspark_requests", "Requests that ended, by what ended them.", ["finish_reason"], registry=self._registry
        )
        for ending in ENDINGS:
            self._endings.labels(ending)  # so that a rate can be taken before the first one
        self._refused = Counter(*REFUSED, ["status"], registry=self._registry)
        self._first_token = Histogram(
            "dspark_time_to_first_token_seconds",
            "Seconds from a request's arrival at the replica to its first token.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "dspark_inter_token_latency_seconds",
            "Seconds between two steps of a request divided by the tokens of the later one, counted once per token.",
            buckets=PER_TOKEN_BUCKETS_S,
            registry=self._registry,
        )

    def count_ending(self, ending: str) -> None:
        """A request that was begun has ended. ending: one of ENDINGS."""
        self._endings.labels(ending).inc()

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def count_tokens(self, num_tokens: int, seconds: float, *, is_first: bool) -> None:
        """Tokens of one step, `seconds` after the step before or the arrival."""
        if is_first:
            self._first_token.observe(seconds)
            return
        for _ in range(num_tokens):
            self._per_token.observe(seconds / num_tokens)

    def families(self) -> list[Metric]:
        return list(self._registry.collect())


def engine_families(engine: Engine) -> list[Metric]:
    """Counters and gauges of an engine, read while it runs: each is right, two may be a step apart."""
    stats, rounds, copies = engine.stats, engine.stats.rounds, engine.stats.copies
    counters = {
        "prompt_tokens": ("Prompt tokens read by the target.", stats.prompt_tokens),
        "output_tokens": ("Tokens of answers, stop tokens included.", stats.output_tokens),
        "prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", stats.prefix_cache_queries),
        "prefix_cache_hits": ("Prompt tokens found there, which were not read again.", stats.prefix_cache_hits),
        "num_preemptions": ("Times a running request gave its pages back and waited again.", stats.preemptions),
        "reread_tokens": ("Tokens that preempted and continued requests read to go on.", stats.reread_tokens),
        "requests_beyond_drafter": (
            "Requests that went on without speculation: longer than the drafter's context.",
            stats.requests_beyond_drafter,
        ),
        "steps": ("Engine steps.", stats.steps),
        "batch_tokens": ("Tokens the target computed.", stats.batch_tokens),
        "rounds": ("Verifications of at least one draft token.", rounds.rounds),
        "committed_tokens": ("Tokens those verifications committed, bonus tokens included.", rounds.committed_tokens),
        "plain_rounds": ("Decodes of a request without a draft token to verify.", rounds.plain_rounds),
        "decodes": ("Decodes of a request, drafted for, copied or plain.", stats.decodes),
        "drafted_decodes": ("Decodes of a request that was drafted for.", stats.drafted),
        "copied_decodes": ("Decodes of a request whose text was looked up instead.", stats.copied),
        "drafted_tokens": ("Draft tokens proposed.", stats.drafted_tokens),
        "verified_tokens": ("Draft tokens given to verification.", stats.scheduled_tokens),
        "accepted_tokens": ("Draft tokens committed.", rounds.accepted_tokens),
        "lookup_rounds": ("Verifications of tokens copied from the text itself, not drafted.", copies.rounds),
        "lookup_committed_tokens": ("Tokens those committed, bonus tokens included.", copies.committed_tokens),
        "lookup_verified_tokens": ("Copied tokens given to verification.", copies.proposed_tokens),
        "lookup_accepted_tokens": ("Copied tokens committed.", copies.accepted_tokens),
        "draft_seconds": ("Seconds of choosing, drafting and allocating.", stats.draft_s),
        "verify_seconds": ("Seconds of the target's passes and verification.", stats.verify_s),
        "step_seconds": ("Seconds of whole steps.", stats.step_s),
    }
    gauges = {
        "requests_running": ("Requests in the batch.", engine.num_running),
        "requests_waiting": ("Requests that wait for room.", engine.num_waiting),
        "kv_pages": ("Pages of KV memory.", engine.num_pages),
        "kv_pages_free": ("Pages of KV memory no request needs, cached ones included.", engine.num_free_pages),
        "kv_pages_cached": ("Free pages whose text new requests may share.", engine.pool.num_cached),
    }
    return [
        *(counter(name, text, value) for name, (text, value) in counters.items()),
        *(gauge(name, text, value) for name, (text, value) in gauges.items()),
        by_position("position_proposed", "Verifications that had a draft token at the position.", rounds.proposed),
        by_position("position_reached", "… whose tokens before it all stood.", rounds.reached),
        by_position("position_accepted", "… whose token at it stood too.", rounds.accepted),
    ]


def draft_link_families(stats: RemoteDraftStats) -> list[Metric]:
    """How it stands with the draft replica, where the drafter is not beside the target."""
    counters = {
        "draft_link_messages": ("Messages to the draft replica.", stats.messages),
        "draft_link_failures": ("Deadlines missed and links lost, after which steps decode plainly.", stats.failures),
        "draft_link_undrafted": ("Proposals that were wanted and did not come.", stats.undrafted),
        "draft_link_refused": ("Contexts that the draft replica had no room for.", stats.refused),
        "draft_link_rebuilt": ("Contexts that the draft replica had lost.", stats.rebuilt),
        "draft_link_wait_seconds": ("Seconds that steps waited for proposals.", stats.wait_s),
    }
    up = gauge("draft_link_up", "1 while the draft replica answers.", stats.is_up)
    return [up, *(counter(name, text, value) for name, (text, value) in counters.items())]


def counter(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """A counter of one value; `dspark_` and `_total` are added to its name."""
    family = CounterMetricFamily(f"dspark_{name}", text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """A gauge of one value; `dspark_` is added to its name."""
    family = GaugeMetricFamily(f"dspark_{name}", text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def refused_family(by_status: Mapping[int, int]) -> Metric:
    """Requests refused before they reached a replica, under the name of those that one refused."""
    family = CounterMetricFamily(*REFUSED, labels=["status"])
    for status, number in by_status.items():
        family.add_metric([str(status)], number)
    return family


def with_label(families: Iterable[Metric], name: str, value: str) -> list[Metric]:
    """The families with one more label on every sample. Times of creation are left out: they are no measurements."""
    labelled = []
    for family in families:
        copy = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                copy.add_sample(sample.name, {**sample.labels, name: value}, sample.value)
        labelled.append(copy)
    return labelled


def render(families: Sequence[Metric]) -> bytes:
    """Prometheus text; families of one name, from several replicas, become one."""
    joined: dict[str, Metric] = {}
    for family in families:
        first = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        first.samples.extend(family.samples)
    return generate_latest(_Collected(joined.values()))


class _Collected(CollectorRegistry):
    """Families that are there already, in the place of collectors."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def by_position(name: str, text: str, counts: Sequence[float]) -> Metric:
    family = CounterMetricFamily(f"dspark_{name}", text, labels=["position"])
    for position, count in enumerate(counts):
        family.add_metric([str(position)], count)
    return family
