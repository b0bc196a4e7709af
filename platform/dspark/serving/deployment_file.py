"""The form of `deployments/*.yaml`: what Ray Serve reads there, but strict: Serve takes misspelt keys in silence."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dspark.config import Config
from dspark.engine.drafter_folder import WITHOUT_FOLDER
from dspark.serving.config import HotConfig, ServeConfig
from dspark.storage import absolute


class HttpOptions(Config):
    """Where the API listens."""

    host: str
    port: int = Field(8000, ge=1, le=65535)
    request_timeout_s: float | None = Field(None, gt=0)
    """Serve's own limit of a whole request; must leave room for `limits.request_timeout_s`."""
    keep_alive_timeout_s: int = Field(90, ge=1)


class LoggingOptions(Config):
    """Of Serve's own processes."""

    encoding: Literal["TEXT", "JSON"] = "TEXT"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    enable_access_log: bool = True


class BackpressureOptions(Config):
    """What Serve's proxy answers when too much is queued."""

    status_code: Literal[429, 503] = 503
    retry_after_s: float = Field(1.0, gt=0)


class HeadroomOptions(Config):
    """Of `dspark.serving.autoscaling:HeadroomPolicy`."""

    target_utilisation: float = Field(0.7, gt=0, le=1)
    """Share of what the replicas can carry that should be used."""


class PolicyOptions(Config):
    """Which policy decides how many replicas there are."""

    policy_function: Literal["dspark.serving.autoscaling:HeadroomPolicy"]
    policy_kwargs: HeadroomOptions = HeadroomOptions()


class AutoscalingOptions(Config):
    """Between how many replicas, decided how, and after how long."""

    min_replicas: int = Field(1, ge=0)
    initial_replicas: int | None = Field(None, ge=0)
    max_replicas: int = Field(ge=1)
    look_back_period_s: float = Field(30.0, gt=0)
    """Seconds over which requests and capacities are averaged."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which more replicas must be wanted; the first one starts at once."""
    downscale_delay_s: float = Field(600.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)
    """Of the last one; None takes `downscale_delay_s`."""
    policy: PolicyOptions

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is over max_replicas {self.max_replicas}; lower it")
        return self


class DeploymentOptions(Config):
    """How many replicas, how much each takes at once, how it is watched and ended."""

    name: Literal["Ingress", "TargetReplica", "DraftReplica"]
    num_replicas: int = Field(1, ge=1)
    autoscaling_config: AutoscalingOptions | None = None
    """In the place of `num_replicas`."""
    max_ongoing_requests: int = Field(ge=1)
    max_queued_requests: int = Field(-1, ge=-1)
    backpressure_config: BackpressureOptions | None = None
    user_config: HotConfig | None = None
    """Applied to running replicas when it is changed and deployed again."""
    graceful_shutdown_wait_loop_s: float = Field(2.0, gt=0)
    graceful_shutdown_timeout_s: float | None = Field(None, ge=120.0)
    """Seconds after which one that is taken away is ended, whatever it works on. None: `failover.drain_s` of a target
    replica, `limits.request_timeout_s` and 30 of the API."""
    health_check_period_s: float = Field(10.0, gt=0)
    health_check_timeout_s: float = Field(30.0, gt=0)

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling_config is None else self.autoscaling_config.max_replicas

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling_config is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(f"{self.name}: num_replicas and autoscaling_config exclude each other; leave one out")
        if self.user_config is not None and self.name == "Ingress":
            raise ValueError(f"{self.name}: user_config has no effect; it is for TargetReplica and DraftReplica")
        return self


class ApplicationOptions(Config):
    """One served target."""

    name: str
    route_prefix: str
    import_path: Literal["dspark.serving.app:build"]
    args: ServeConfig
    deployments: tuple[DeploymentOptions, ...]

    @model_validator(mode="after")
    def _check_room_for_requests(self) -> Self:
        most = self.args.limits.max_concurrent_requests
        for deployment in self.deployments:
            if deployment.name != "DraftReplica" and deployment.max_ongoing_requests <= most:
                raise ValueError(
                    f"{deployment.name}: max_ongoing_requests {deployment.max_ongoing_requests} must be over "
                    f"limits.max_concurrent_requests {most}: requests would wait in Serve without an answer"
                )
        return self

    @model_validator(mode="after")
    def _check_room_in_the_api(self) -> Self:
        """What all target replicas may have open must fit into the processes of the API that are always there."""
        named = {one.name: one for one in self.deployments}
        ingress, targets = named.get("Ingress"), named.get("TargetReplica")
        if ingress is None or targets is None:
            return self
        scaled = ingress.autoscaling_config
        num_ingresses = ingress.num_replicas if scaled is None else max(1, scaled.min_replicas)
        needed = self.args.limits.max_concurrent_requests * targets.most_replicas
        if ingress.max_ongoing_requests * num_ingresses <= needed:
            raise ValueError(
                f"Ingress: max_ongoing_requests {ingress.max_ongoing_requests} of {num_ingresses} replica(s) must be "
                f"over the {needed} requests that {targets.most_replicas} target replica(s) may have open; raise it "
                "or num_replicas of Ingress"
            )
        return self

    @model_validator(mode="after")
    def _check_drains(self) -> Self:
        """A stream that goes through a process of the API ends with it."""
        longest_s = self.args.limits.request_timeout_s
        for one in self.deployments:
            drain_s = one.graceful_shutdown_timeout_s
            if one.name == "Ingress" and drain_s is not None and drain_s < longest_s:
                raise ValueError(
                    f"Ingress: graceful_shutdown_timeout_s {drain_s:g} must be at least limits.request_timeout_s "
                    f"{longest_s:g}, or it cuts streams; leave it out for that and 30 s"
                )
        return self

    @model_validator(mode="after")
    def _check_draft_replicas(self) -> Self:
        is_deployed = any(deployment.name == "DraftReplica" for deployment in self.deployments)
        if is_deployed and self.args.draft_replicas is None:
            raise ValueError("DraftReplica is among the deployments, but args.draft_replicas is not set; add it: {}")
        target, drafts = self._drafter_of("TargetReplica"), self._drafter_of("DraftReplica")
        if self.args.draft_replicas is not None and target not in (*WITHOUT_FOLDER, drafts):
            raise ValueError(
                f"TargetReplica goes by the drafter {target}, DraftReplica by {drafts}: nothing would be drafted; name "
                "one in the user_config of both"
            )
        return self

    def _drafter_of(self, deployment: str) -> str | None:
        """Its folder as an absolute path, or one of WITHOUT_FOLDER."""
        hot = next((one.user_config for one in self.deployments if one.name == deployment), None)
        drafter = self.args.drafter if hot is None else hot.drafter
        return drafter if drafter is None or drafter in WITHOUT_FOLDER else absolute(drafter)

    @model_validator(mode="after")
    def _check_scaling_to_zero(self) -> Self:
        scaled = [one.autoscaling_config for one in self.deployments if one.autoscaling_config is not None]
        if any(one.min_replicas == 0 for one in scaled) != self.args.scaling.to_zero:
            raise ValueError(
                f"args.scaling.to_zero is {self.args.scaling.to_zero}; set it exactly where an autoscaling_config has "
                "min_replicas 0: /health would start a replica, or call none at all healthy"
            )
        return self


class DeploymentFile(Config):
    """What `serve run` is given."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"]
    http_options: HttpOptions
    logging_config: LoggingOptions = LoggingOptions()
    applications: tuple[ApplicationOptions, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        timeout_s = self.http_options.request_timeout_s
        for application in self.applications:
            if timeout_s is not None and timeout_s <= application.args.limits.request_timeout_s:
                raise ValueError(
                    f"http_options.request_timeout_s {timeout_s} must be over limits.request_timeout_s "
                    f"{application.args.limits.request_timeout_s} of {application.name!r}"
                )
        return self
