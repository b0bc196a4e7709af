"""Bytes of KV memory become as many whole pages as they hold, of target and drafter together."""

from pathlib import Path

import pytest

from dspark.engine.capacity import with_capacity
from dspark.engine.config import EngineConfig
from dspark.engine.loading import load_engine
from dspark.targets import TargetConfig
from tiny_drafter import make_tiny_drafter


def test_the_bytes_hold_whole_pages_and_windows_come_off_first() -> None:
    config = EngineConfig(page_size=4, kv_memory_bytes=10_000, max_running_requests=3)
    sized = with_capacity(config, target_bytes=50, drafter_bytes=10, request_bytes=1_000)
    assert (sized.kv_tokens, sized.kv_memory_bytes, sized.num_pages) == (116, None, 29)  # 29 * 4 * 60 = 6960 of 7000


def test_tokens_given_as_such_stay() -> None:
    config = EngineConfig(kv_tokens=100)
    assert with_capacity(config, target_bytes=1) is config


def test_bytes_that_hold_no_page_are_refused() -> None:
    config = EngineConfig(page_size=16, kv_memory_bytes=1_000, max_running_requests=2)
    with pytest.raises(ValueError, match=r"kv_memory_bytes 1,000 do not hold a page: it takes 960 bytes, windows of 2"):
        with_capacity(config, target_bytes=60, request_bytes=30)


@pytest.mark.parametrize(
    "shape", [{}, {"sliding_window": 8, "num_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}]
)
def test_an_engine_takes_the_bytes_it_was_given_and_no_more(tmp_path: Path, tiny_target: Path, shape: dict) -> None:
    given = 500_000
    drafter = make_tiny_drafter(tmp_path, tiny_target, **shape)
    config = EngineConfig(page_size=4, kv_memory_bytes=given, max_running_requests=2, verify_length=2)
    loaded = load_engine(
        TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"), str(drafter), config=config
    )
    drafts = loaded.engine._drafts
    taken = loaded.target.kv_cache.num_bytes + drafts.kv_cache.num_bytes + 2 * drafts.bytes_per_request
    page_bytes = taken // loaded.engine.num_pages
    assert given - page_bytes < taken <= given
    assert loaded.engine.config.kv_tokens == 4 * loaded.engine.num_pages
    if shape:
        ring = drafts.new_memory(None).ring
        assert sum(t.numel() * t.element_size() for t in [*ring.keys, *ring.values]) == drafts.bytes_per_request > 0
