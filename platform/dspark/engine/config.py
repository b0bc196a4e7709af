"""The engine's settings."""

import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.engine.lookup import LookupConfig

KV_TOKENS = 16_384


class EngineConfig(Config):
    """How much runs at once, and how far each step looks ahead."""

    page_size: int = Field(16, ge=1)
    """Tokens per page of KV memory."""
    kv_tokens: int | None = Field(None, ge=1)
    """Tokens of KV memory, for all requests together; the target's and the drafter's memory have this length each. None
    takes 16,384, or what kv_memory_bytes holds."""
    kv_memory_bytes: int | None = Field(None, ge=1)
    """Bytes of KV memory of target and drafter together, instead of kv_tokens; the tokens it holds are logged."""
    prefix_cache: bool = True
    """Keep whole pages of read text after their request has ended, and share them with requests that begin alike. What
    is cached is given up as soon as running requests need the memory."""
    max_running_requests: int = Field(32, ge=1)
    """Requests in one step; others wait."""
    max_batch_tokens: int = Field(512, ge=1)
    """Tokens of one step, prompts being read included: lower it when long prompts make other streams stutter. Only a
    token for each running request, fixed verify lengths and a page's worth of reading may go over it."""
    max_context_tokens: int | None = Field(None, ge=1)
    """Prompt and output of one request together; None takes what the target was made for."""
    verify_length: int | None = Field(None, ge=0)
    """Draft tokens verified per request and step; None lets the scheduler decide, which needs a cost curve."""
    min_gain: float = Field(0.01, ge=0)
    """Share by which drafting must be expected to raise tokens per second, else the batch decodes plainly."""
    correct_curve: bool = True
    """Hold the cost curve to what steps are seen to take: a curve is measured once, and drifts on a machine that others
    share. Off, the scheduler goes by the curve as it was measured."""
    deterministic: bool = False
    """Give a token the same logits, to the last bit, whatever is computed beside it: greedy and seeded output is then
    the same with and without speculation, alone and in company, in bfloat16 too. Where whole layers run on our CPU
    kernels the work stays the same; elsewhere steps run in slices of 8 tokens, mixtures of experts token by token, on
    PyTorch's attention of one row at a time and without CUDA graphs."""
    lagged_capacity: bool = False
    """Settle how many draft tokens a step verifies while the step before it computes, from what was known of the one
    before that; which ones they are is still decided by the newest confidences. For devices that compute while the host
    decides: on a CPU there is nothing to gain."""
    lookup: LookupConfig | None = None
    """Copy what the text repeats before the drafter is asked; None asks the drafter alone."""
    probe_every: int = Field(16, ge=1)
    """Steps after which a request that was not worth drafting for may be tried again: once half a hundredth of the time
    pays for it, and not where even a very good proposal would be of no use."""
    cuda_graphs: bool | None = None
    """Replay decode and verify steps as CUDA graphs, padded to one of a few sizes. None does so where it can be done,
    on a CUDA device with attention that can be captured, and says in the log where it cannot; true refuses to start
    there; false saves the seconds and the memory that capturing takes."""

    @pydantic.model_validator(mode="after")
    def _check_memory(self) -> "EngineConfig":
        if self.kv_tokens is not None and self.kv_memory_bytes is not None:
            raise ValueError(
                f"kv_tokens ({self.kv_tokens}) and kv_memory_bytes ({self.kv_memory_bytes}) both size the KV memory; "
                "give one of them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_lengths(self) -> "EngineConfig":
        if self.lagged_capacity and self.verify_length is not None:
            raise ValueError(
                f"lagged_capacity has no effect with verify_length ({self.verify_length}); leave one of them out"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_graphs(self) -> "EngineConfig":
        if self.deterministic and self.cuda_graphs:
            raise ValueError("cuda_graphs pads steps, which deterministic rules out; leave one of them out")
        return self

    def num_ahead(self, block_size: int) -> int:
        """Tokens that a request may hold memory for beyond its committed ones. block_size: what a drafter proposes."""
        return max(block_size, 0 if self.lookup is None else self.lookup.block_size)

    @property
    def num_pages(self) -> int:
        assert self.kv_memory_bytes is None, "how many pages the bytes hold depends on target and drafter"
        return -(-(self.kv_tokens or KV_TOKENS) // self.page_size)


class MeasuredEngineConfig(EngineConfig):
    """The engine of the jobs that measure: what one request finds must not depend on those before it."""

    prefix_cache: bool = False
    """Off, so that figures compare; on, prompts that were read before cost nothing."""
