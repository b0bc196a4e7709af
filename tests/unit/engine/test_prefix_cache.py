"""A page is found by all tokens up to its end, and by those behind it that its content depends on; by nothing else."""

from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.engine.prefix_cache import PrefixCache
from dspark.engine.running import RunningRequest
from tiny_engine import request

PAGE_SIZE = 4
TEXT = list(range(100, 118))


def publish(pool: PagePool, cache: PrefixCache, ids: list[int], num_stored: int) -> RunningRequest:
    """A request whose text is published as far as it is stored."""
    table = PageTable(pool.allocate(-(-len(ids) // PAGE_SIZE)), PAGE_SIZE)
    running = RunningRequest(
        request=request(ids[:3]),
        table=table,
        memory=None,
        text=None,
        generator=None,
        estimate=AcceptanceEstimate(PriorEstimate()),
        output_ids=ids[3:],
    )
    cache.publish(running, num_stored)
    return running


def found(cache: PrefixCache, ids: list[int], num_tokens: int | None = None) -> list[int]:
    return cache.find(cache.digests(ids, len(ids) if num_tokens is None else num_tokens))


def test_whole_pages_of_the_same_text_are_found_up_to_where_texts_part() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, num_ids_behind=0)
    pages = publish(pool, cache, TEXT, 14).table.pages
    assert found(cache, TEXT) == pages[:3]  # 12 of 14 stored tokens
    assert found(cache, TEXT[:11]) == pages[:2]
    assert found(cache, TEXT, 8) == pages[:2]
    assert found(cache, [*TEXT[:7], 9, *TEXT[8:]]) == pages[:1]
    assert found(cache, [9, *TEXT[1:]]) == []
    assert found(cache, TEXT[4:]) == []  # the same tokens at another place are another text


def test_a_page_that_depends_on_the_tokens_behind_it_is_found_only_before_the_same_ones() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, num_ids_behind=2)
    pages = publish(pool, cache, TEXT, 12).table.pages
    assert found(cache, TEXT) == pages[:3]
    assert found(cache, [*TEXT[:8], 9, *TEXT[9:]]) == pages[:1]
    assert found(cache, [*TEXT[:9], 9, *TEXT[10:]]) == pages[:1]
    assert found(cache, [*TEXT[:10], 9, *TEXT[11:]]) == pages[:2]
    assert found(cache, TEXT[:9]) == pages[:1]  # what stands behind the second page is not known yet


def test_publishing_goes_on_where_it_stopped_and_a_text_keeps_its_first_page() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, page_size=PAGE_SIZE, num_ids_behind=0)
    first = publish(pool, cache, TEXT, 5)
    second = publish(pool, cache, TEXT, 12)
    assert found(cache, TEXT) == [first.table.pages[0], *second.table.pages[1:3]]
    cache.publish(first, 16)
    assert found(cache, TEXT) == [first.table.pages[0], *second.table.pages[1:3], first.table.pages[3]]
    pool.check([first.table.pages, second.table.pages])
