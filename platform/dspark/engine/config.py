"""The engine's settings."""

from pydantic import Field

from dspark.config import Config
from dspark.engine.lookup import LookupConfig


class EngineConfig(Config):
    """How much runs at once, and how far each step looks ahead."""

    page_size: int = Field(16, ge=1)
    """Tokens per page of KV memory."""
    kv_tokens: int = Field(16384, ge=1)
    """Tokens of KV memory, for all requests together; the target's and the drafter's memory have this length each."""
    prefix_cache: bool = True
    """Keep whole pages of read text after their request has ended, and share them with requests that begin alike. What
    is cached is given up as soon as running requests need the memory."""
    max_running_requests: int = Field(32, ge=1)
    """Requests in one step; others wait."""
    max_batch_tokens: int = Field(512, ge=1)
    """Tokens of one step, prompts being read included: lower it when long prompts make other streams stutter."""
    max_context_tokens: int | None = Field(None, ge=1)
    """Prompt and output of one request together; None takes what the target was made for."""
    verify_length: int | None = Field(None, ge=0)
    """Draft tokens verified per request and step; None lets the scheduler decide, which needs a cost curve."""
    min_gain: float = Field(0.12, ge=0)
    """Share by which drafting must be expected to raise tokens per second, else the batch decodes plainly. Curve and
    estimates are no more exact than a tenth on a machine that others share; lower it on one that is yours alone."""
    lookup: LookupConfig | None = None
    """Copy what the text repeats before the drafter is asked; None asks the drafter alone."""
    probe_every: int = Field(64, ge=1)
    """Steps after which a request that is not worth drafting for is tried again."""

    @property
    def num_pages(self) -> int:
        return -(-self.kv_tokens // self.page_size)


class MeasuredEngineConfig(EngineConfig):
    """The engine of the jobs that measure: what one request finds must not depend on those before it."""

    prefix_cache: bool = False
    """Off, so that figures compare; on, prompts that were read before cost nothing."""
