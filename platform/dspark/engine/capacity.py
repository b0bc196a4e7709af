"""How many tokens of KV memory fit into the bytes given for it."""

import logging

from dspark.engine.config import EngineConfig

log = logging.getLogger("dspark.engine")


def with_capacity(
    config: EngineConfig, *, target_bytes: int, drafter_bytes: int = 0, request_bytes: int = 0
) -> EngineConfig:
    """The config with kv_tokens, a whole number of pages, in place of kv_memory_bytes; as it is without the latter.

    tokens = (bytes - max_running_requests * request_bytes) / (target_bytes + drafter_bytes)
    target_bytes, drafter_bytes: per token. request_bytes: that the drafter keeps of each running request besides.
    Raises: ValueError when not one page fits.
    """
    if config.kv_memory_bytes is None:
        return config
    besides = config.max_running_requests * request_bytes
    page_bytes = config.page_size * (target_bytes + drafter_bytes)
    num_pages = (config.kv_memory_bytes - besides) // page_bytes
    if num_pages < 1:
        raise ValueError(
            f"kv_memory_bytes {config.kv_memory_bytes:,} do not hold a page: it takes {page_bytes:,} bytes, windows of "
            f"{config.max_running_requests} requests {besides:,}; raise it or lower max_running_requests"
        )
    kv_tokens = num_pages * config.page_size
    log.info(
        "KV memory of %s bytes holds %s tokens (%s bytes each of the target, %s of the drafter; windows take %s)",
        *(f"{value:,}" for value in (config.kv_memory_bytes, kv_tokens, target_bytes, drafter_bytes, besides)),
    )
    return config.with_changes(kv_tokens=kv_tokens, kv_memory_bytes=None)
