"""Everything that `deployments/*.yaml` may say about a served target."""

import math
from typing import Self

from pydantic import Field, model_validator

from dspark.chat import ChatConfig
from dspark.config import Config
from dspark.engine.config import EngineConfig
from dspark.engine.draft_server import DraftServerConfig
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.engine.remote_draft_state import RemoteDraftConfig
from dspark.serving.fleet_config import FleetConfig
from dspark.targets import TargetConfig
from dspark.traffic.config import TrafficConfig, WatchConfig

URGENT = -1  # a priority that goes before others


class LimitsConfig(Config):
    """What a client may ask for; more is refused with the limit's name."""

    max_concurrent_requests: int = Field(256, ge=1)
    """Requests of one replica, running or waiting; the next one gets status 429. The API counts those of all replicas
    that run, so that what is too much is refused before it is read."""
    urgent_share: float = Field(0.125, ge=0)
    """How many more of those that go before others (a `priority` below 0) are let in, as a share of
    `max_concurrent_requests`: a queue that they would pass does not keep them out."""
    max_wait_s: float | None = Field(10.0, gt=0)
    """Seconds that a new request may be expected to wait before it runs, at the pace of lately; more gets status 429,
    with the seconds after which it would be taken. Longer for batches that nobody watches. None lets it wait, as long
    as `max_concurrent_requests` allows it."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Tokens of a prompt; None leaves it to the target's context."""
    max_output_tokens: int = Field(1024, ge=1)
    """Tokens of an answer, and what a chat request that names no limit gets."""
    allow_priority: bool = False
    """Take any request's `priority` and any `service_tier`; whoever may set it goes before everybody else. Off, only
    0 is taken, and the tiers that go before others only from the keys that `api_keys_file` gives them to."""
    service_tiers: dict[str, int] = {"default": 0, "flex": 1, "priority": -1}
    """The `priority` that a request's `service_tier` stands for; what is not here is refused by name."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Seconds from a request's arrival to its last token; then it is ended with an error."""
    max_body_bytes: int = Field(1_000_000, ge=1)
    """Bytes of a request's body."""

    def most_open(self, priority: int) -> int:
        """Requests of one replica, running or waiting, beside which one of this priority is let in."""
        extra = math.ceil(self.urgent_share * self.max_concurrent_requests) if priority < 0 else 0
        return self.max_concurrent_requests + extra


class DraftReplicasConfig(Config):
    """Drafters in replicas of their own, each for several target replicas. How many: `deployments` of the file."""

    threads: int = Field(1, ge=1)
    """CPU threads of a draft replica's tensor operations."""
    cpus_per_replica: float = Field(1.0, ge=0)
    """CPUs that Ray keeps for a draft replica; 0 where target replicas leave none, as on a small machine."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs of a draft replica; None takes one where the cluster has any."""
    contexts: DraftServerConfig = DraftServerConfig()
    """Memory of a draft replica."""
    link: RemoteDraftConfig = RemoteDraftConfig()
    """How target replicas ask it."""


class FailoverConfig(Config):
    """What becomes of an answer whose replica dies in its midst."""

    max_continuations: int = Field(2, ge=0)
    """Times that an answer is continued by another replica, behind the tokens that it has. Then, or with 0, it ends
    with an error. Replicas that are taken away on purpose do not count."""
    min_progress_tokens: int = Field(32, ge=0)
    """Tokens that an answer must have got from a replica it was continued by. One that loses it before is taken for the
    cause, ends with status 422 and is not continued: it would end them all. 0 continues it."""
    drain_s: float = Field(150.0, ge=20)
    """Seconds for which a target replica that is taken away goes on with what it began. What is left then is continued
    by others; so a rollout need not last as long as the longest answer. The API's own processes, whose streams nobody
    could continue, stay for `limits.request_timeout_s`."""
    wait_s: float = Field(60.0, gt=0)
    """Seconds that an answer waits for its next token from there, while replicas are busy or not yet there again."""


class RoutingConfig(Config):
    """Which replica a request goes to; see request_router.py."""

    prefix_affinity: bool = True
    """Prefer the replica that read the prompt's beginning lately: it is in its prefix cache."""
    piece_characters: int = Field(256, ge=1)
    """Beginnings are compared in steps of so many characters; shorter prompts have none."""
    most_prefixes: int = Field(20_000, ge=0)
    """Beginnings that are remembered, by each process that sends requests."""
    most_imbalance: float = Field(1.5, ge=1)
    """How many times as dear as at the cheapest replica a token may be where the prompt's beginning is known."""
    stats_period_s: float = Field(1.0, gt=0)
    """Seconds between two looks of Serve's controller at what a replica says of its costs."""


class ScalingConfig(Config):
    """What replicas say of themselves to an autoscaling policy, and what it means that there is none."""

    min_tokens_per_s: float | None = Field(None, gt=0)
    """Tokens per second that each request should get: a replica's capacity is the number of requests for which it can
    do that. None counts as many as it can run at once."""
    to_zero: bool = False
    """Set where `autoscaling_config` has `min_replicas: 0`: having no replica is healthy then, and none is started to
    answer /health."""


class HotConfig(Config):
    """`user_config` of TargetReplica, and of DraftReplica where there are any: what may change while replicas run.
    Where there is none, `args` count."""

    drafter: str | None
    """As `args.drafter`; a folder by its absolute path. Whoever runs goes on with it; one that was not trained for the
    target is refused. For a moment there is KV memory for both."""


class ServeConfig(Config):
    """The `args` of an application whose import path is `dspark.serving.app:build`."""

    target: TargetConfig
    drafter: str | None = None
    """Folder of a trained drafter, where n-gram speculation takes the place of a missing one; or "ngram"; or "mtp" for
    the modules that the target brings along; or None."""
    chat: ChatConfig | None = None
    """How messages become a prompt; None takes what the drafter was trained with, else the template's defaults."""
    served_model_name: str | None = None
    """Name by which clients ask for the model; None takes the target's."""
    engine: EngineConfig = EngineConfig()
    profile_without_curve: bool = True
    """Measure a cost curve when a replica starts and none was measured on this hardware, which takes seconds."""
    verify_length_without_curve: int = Field(3, ge=0)
    """Draft tokens verified per request and step where no curve is measured at the start either."""
    limits: LimitsConfig = LimitsConfig()
    fleet: FleetConfig = FleetConfig()
    draft_replicas: DraftReplicasConfig | None = None
    """Run the drafter in replicas of its own; None runs it beside each target replica."""
    failover: FailoverConfig = FailoverConfig()
    routing: RoutingConfig = RoutingConfig()
    scaling: ScalingConfig = ScalingConfig()
    traffic: TrafficConfig | None = None
    """Record rounds of served answers, for jobs/calibrate.py --from-traffic; None records nothing."""
    watch: WatchConfig = WatchConfig()
    """What is watched of a drafter with a confidence head."""
    threads: int = Field(2, ge=1)
    """CPU threads of a replica's tensor operations; replicas times threads should not pass a machine's cores."""
    gpus_per_replica: float | None = Field(None, ge=0)
    """GPUs of a replica; None takes one where the cluster has any."""
    api_keys_file: str | None = None
    """Text file with a key per line, of which a client must send one as `Authorization: Bearer …`; None lets everybody
    in. Words behind a key are tiers of `limits.service_tiers` that its holder may ask for: `KEY priority`. The keys do
    not stand here because Serve logs and shows this config."""

    @model_validator(mode="after")
    def _check_draft_replicas(self) -> Self:
        if self.draft_replicas is not None and self.drafter in WITHOUT_FOLDER:
            raise ValueError(
                f"draft_replicas run a trained drafter, but drafter is {self.drafter!r}; name its folder, or leave "
                "draft_replicas out"
            )
        return self

    @model_validator(mode="after")
    def _check_fine_tune(self) -> Self:
        if self.watch.fine_tune is not None and self.traffic is None:
            raise ValueError("watch.fine_tune has nothing to train on without traffic; add traffic, or leave it out")
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.target.name
