"""The form of `deployments/*.yaml`: what Ray Serve reads there, but strict: Serve takes misspelt keys in silence."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dspark.config import Config
from dspark.serving.config import ServeConfig


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


class DeploymentOptions(Config):
    """How many replicas, how much each takes at once, how it is watched and ended."""

    name: Literal["Ingress", "TargetReplica", "DraftReplica"]
    num_replicas: int = Field(1, ge=1)
    max_ongoing_requests: int = Field(ge=1)
    max_queued_requests: int = Field(-1, ge=-1)
    graceful_shutdown_wait_loop_s: float = Field(2.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(ge=120.0)
    health_check_period_s: float = Field(10.0, gt=0)
    health_check_timeout_s: float = Field(30.0, gt=0)


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
    def _check_draft_replicas(self) -> Self:
        is_deployed = any(deployment.name == "DraftReplica" for deployment in self.deployments)
        if is_deployed and self.args.draft_replicas is None:
            raise ValueError("DraftReplica is among the deployments, but args.draft_replicas is not set; add it: {}")
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
