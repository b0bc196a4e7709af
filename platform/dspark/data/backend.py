"""Who answers the prompts."""

import os
from typing import Any, Literal

import pydantic
from pydantic import Field

from dspark.config import Config


class BackendConfig(Config):
    """Who answers the prompts: the target on this cluster's devices, or servers elsewhere that hold it."""

    kind: Literal["local", "openai"] = "local"
    base_urls: tuple[str, ...] = ()
    """Roots of OpenAI-compatible APIs, such as `http://host:8000/v1`, all of the target that `target` names."""
    model: str | None = None
    """The name the target is served under."""
    api: Literal["completions", "chat"] = "completions"
    """`completions` sends the prompt as token ids; `chat` sends messages, for servers that take nothing else."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself would be recorded with the config."""
    concurrency: int = Field(32, ge=1)
    """Requests that each endpoint works on at once."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for one answer."""
    max_retries: int = Field(6, ge=0)
    """Further tries of a request that failed for a passing reason; then its row is an error."""
    backoff_s: float = Field(0.5, gt=0)
    """Wait before the second try; doubled for each one after it, up to 30 s."""
    max_failures: int = Field(3, ge=1)
    """Failures in a row after which an endpoint is set aside. When all are, the job stops."""
    aside_s: float = Field(60.0, gt=0)
    """An endpoint that was set aside is tried again after so long."""
    send_seed: bool = True
    """Pass each row's seed, so that a server that honours it repeats its answers."""
    retokenize: bool = False
    """Where a server returns no token ids, take those of its text, if they are beyond doubt; else that is an error."""
    extra_body: dict[str, Any] = {}
    """Added to every request, over what it holds otherwise; null leaves a field out."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "BackendConfig":
        if self.kind == "local":
            for name, field in type(self).model_fields.items():
                if name != "kind" and getattr(self, name) != field.default:
                    raise ValueError(f"{name} has no effect with kind local; set kind: openai or leave it out")
            return self
        if not self.base_urls or self.model is None:
            raise ValueError("kind openai needs base_urls (http://host:port/v1, one or more) and model")
        if len(set(self.base_urls)) < len(self.base_urls):
            raise ValueError(f"base_urls names one endpoint twice: {list(self.base_urls)}")
        for url in self.base_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"base_urls holds {url!r}; it must start with http:// or https://")
        if self.max_failures > self.max_retries + 1:
            # Otherwise a dead endpoint would turn prompts into errors before it is set aside.
            raise ValueError(f"max_failures {self.max_failures} is over max_retries + 1 = {self.max_retries + 1}")
        return self

    def api_key(self) -> str | None:
        """Raises: ValueError if the variable that should hold the key is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ValueError(f"environment variable {self.api_key_env} (backend.api_key_env) is not set")
        return key
