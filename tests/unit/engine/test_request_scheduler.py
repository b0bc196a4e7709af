"""Who runs: by priority, then first come, first served; pages are given by need and taken from the least urgent."""

from typing import Any

import pytest

from dspark.attention.page_pool import PagePool, PageTable
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.engine.request_memory import RequestMemory
from dspark.engine.request_scheduler import RequestScheduler
from dspark.engine.running import RunningRequest
from dspark.engine.stats import EngineStats
from tiny_engine import request

PAGE_SIZE, NUM_AHEAD = 4, 3


def reserved(decoding: Any) -> int:
    return len(decoding) * (1 + NUM_AHEAD)


class Toy:
    """A scheduler without a model: `step` reads what there is to read and has every other request decode a token."""

    def __init__(self, num_pages: int, *, max_running: int = 8, prefix_cache: bool = False) -> None:
        self.stats = EngineStats()
        self.pool = PagePool(num_pages)
        memory = RequestMemory(
            self.pool,
            None,
            page_size=PAGE_SIZE,
            num_ahead=NUM_AHEAD,
            prefix_cache=prefix_cache,
            stats=self.stats,
        )
        self.scheduler = RequestScheduler(memory, max_running=max_running, stats=self.stats)

    def add(self, name: str, num_prompt: int, *, max_tokens: int = 40, **options: Any) -> RunningRequest:
        prompt = options.pop("prompt", range(1, num_prompt + 1))
        asked = request(prompt, name, max_tokens=max_tokens, **options)
        self.scheduler.check_new(asked)
        running = RunningRequest(
            request=asked,
            table=PageTable([], PAGE_SIZE),
            memory=None,
            text=None,
            generator=None,
            estimate=AcceptanceEstimate(PriorEstimate()),
        )
        self.scheduler.add(running)
        return running

    def step(self, num_tokens: int = 1000) -> list[str]:
        """Who was read or decoded, in order."""
        self.scheduler.make_room()
        self.scheduler.admit()
        reading, decoding = self.scheduler.split(num_tokens, reserved)
        for work in reading:
            running = work.running
            running.table.num_tokens = work.piece.stop
            if work.yields_token:
                running.output_ids.append(7)
            self.scheduler.memory.publish(running)
        for running in decoding:
            assert running.table.capacity_tokens >= running.table.num_tokens + 1 + NUM_AHEAD
            running.table.num_tokens += 1
            running.output_ids.append(7)
            self.scheduler.memory.publish(running)
        self.scheduler.check()
        return [work.running.request.request_id for work in reading] + [one.request.request_id for one in decoding]

    @property
    def running(self) -> set[str]:
        return set(self.scheduler.running)


def test_requests_run_in_the_order_in_which_they_came_and_none_is_overtaken() -> None:
    toy = Toy(num_pages=27, max_running=2)
    for name, num_prompt in (("a", 10), ("b", 90), ("c", 3)):
        toy.add(name, num_prompt, max_tokens=2)
    toy.step()
    assert toy.running == {"a"}  # b has no room yet, and c waits behind it
    toy.scheduler.release("a")
    toy.step()
    assert toy.running == {"b", "c"}


def test_a_smaller_priority_number_runs_first_and_equals_run_as_they_came() -> None:
    toy = Toy(num_pages=60, max_running=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        toy.add(name, 3, priority=priority)
    order = []
    while toy.scheduler.waiting or toy.running:
        toy.step()
        (name,) = toy.running
        order.append(name)
        toy.scheduler.release(name)
    assert order == ["urgent", "first", "second", "late"]


def test_memory_for_all_that_may_come_is_not_reserved() -> None:
    toy = Toy(num_pages=20)
    for name in "abc":
        toy.add(name, 8, max_tokens=60)  # 18 pages each at most
    toy.step()
    assert toy.running == {"a", "b", "c"}


def test_without_pages_the_youngest_waits_at_its_old_place_and_goes_on_later() -> None:
    toy = Toy(num_pages=20)
    requests = {name: toy.add(name, 8, max_tokens=60) for name in "abc"}
    toy.add("d", 40, max_tokens=9)
    before: dict[str, int] = {}
    while toy.stats.preemptions == 0:
        before = {name: len(one.output_ids) for name, one in requests.items()}
        toy.step()
    assert toy.running == {"a", "b"}
    assert [one.request.request_id for one in toy.scheduler.waiting] == ["c", "d"]
    assert len(requests["c"].output_ids) == before["c"]
    assert (requests["c"].table.pages, requests["c"].memory) == ([], None)
    toy.scheduler.release("b")
    toy.step()
    assert "c" in toy.running
    assert len(requests["c"].output_ids) == before["c"]  # read again, nothing drawn
    toy.step()
    assert len(requests["c"].output_ids) == before["c"] + 1


def test_the_least_urgent_is_preempted_whenever_it_came() -> None:
    toy = Toy(num_pages=20)
    toy.add("old", 8, max_tokens=60, priority=1)
    for name in "bc":
        toy.add(name, 8, max_tokens=60)
    while toy.stats.preemptions == 0:
        toy.step()
    assert toy.running == {"b", "c"}


def test_spare_pages_are_taken_back_before_anybody_is_preempted() -> None:
    toy = Toy(num_pages=20)
    alone = toy.add("a", 8, max_tokens=60)
    toy.step()
    assert len(alone.table.pages) == 18  # all it may ever need: neighbours
    toy.add("b", 40, max_tokens=2)
    toy.step()
    assert toy.running == {"a", "b"}
    assert toy.stats.preemptions == 0
    assert len(alone.table.pages) < 18


def test_a_request_is_not_admitted_into_the_last_pages_of_those_who_run() -> None:
    toy = Toy(num_pages=9)
    toy.add("a", 8, max_tokens=20)
    toy.step()  # needs 3 pages of 9
    toy.add("b", 20, max_tokens=2)  # needs 6
    toy.step()
    assert toy.running == {"a"}


def test_every_request_ends_however_small_the_memory_is() -> None:
    toy = Toy(num_pages=13)
    requests = [toy.add(name, 5 + ord(name) % 7, max_tokens=30, priority=ord(name) % 2) for name in "abcdefgh"]
    for _ in range(2000):
        toy.step()
        for one in requests:
            if len(one.output_ids) == 30 and one.request.request_id in toy.running:
                toy.scheduler.release(one.request.request_id)
        if not toy.running and not toy.scheduler.waiting:
            break
    assert [len(one.output_ids) for one in requests] == [30] * 8
    assert toy.stats.preemptions > 0
    assert toy.pool.num_free == 13


def test_chunks_and_decodes_stay_within_the_budget_and_the_oldest_is_read_first() -> None:
    toy = Toy(num_pages=100)
    toy.add("a", 3)
    toy.step()
    toy.add("b", 30)
    toy.add("c", 30)
    sizes = []
    while any(not one.is_prefilled for one in toy.scheduler.running.values()) or toy.scheduler.waiting:
        toy.scheduler.admit()
        reading, _ = toy.scheduler.split(16, reserved)
        sizes.append([(work.running.request.request_id, len(work.piece.token_ids)) for work in reading])
        toy.step(16)
    assert sizes == [
        [("b", 12)],  # the decode of a may take 4
        [("b", 12)],
        [("b", 6), ("c", 6)],
        [("c", 8)],  # a and b decode
        [("c", 8)],
        [("c", 8)],
    ]


def test_aborting_frees_all_pages_at_once_at_any_moment() -> None:
    toy = Toy(num_pages=20)
    for name in "abcd":
        toy.add(name, 8, max_tokens=60)
    while toy.stats.preemptions == 0:
        toy.step(8)
    assert toy.running
    assert toy.scheduler.waiting
    for name in "abcd":
        held = len(toy.scheduler.running[name].table.pages) if name in toy.running else 0
        before = toy.pool.num_free
        toy.scheduler.release(name, is_aborted=True)
        assert toy.pool.num_free == before + held
        toy.scheduler.check()
    assert (toy.pool.num_free, toy.scheduler.waiting) == (20, [])


def test_a_request_that_could_not_run_alone_is_refused() -> None:
    toy = Toy(num_pages=4)
    toy.add("a", 8, max_tokens=5)
    with pytest.raises(ValueError, match="needs 5 pages of KV memory for 8 prompt tokens and max_tokens 6, but"):
        toy.add("b", 8, max_tokens=6)
    with pytest.raises(ValueError, match="'a' is in use"):
        toy.add("a", 3, max_tokens=5)


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    toy = Toy(num_pages=20, prefix_cache=True)
    requests = {name: toy.add(name, 8, prompt=[ord(name)] * 8, max_tokens=60) for name in "abc"}
    while toy.stats.preemptions == 0:
        toy.step()
    num_known = requests["c"].num_known
    toy.scheduler.release("b")
    toy.scheduler.admit()
    found = requests["c"].table.num_tokens
    assert num_known - 1 - 2 * PAGE_SIZE < found < num_known - 1
    assert toy.stats.prefix_cache_hits == 0  # a new request's only


def test_requests_that_come_together_wait_for_the_first_to_read_what_they_share() -> None:
    toy = Toy(num_pages=60, prefix_cache=True)
    first, *others = [toy.add(name, 30, max_tokens=4) for name in "abc"]
    other = toy.add("d", 30, prompt=range(100, 130), max_tokens=4)
    assert toy.step(16) == ["a"]
    assert toy.running == {"a"}  # none is overtaken
    assert toy.step(16) == ["a"]
    assert toy.step(60) == ["b", "c", "d", "a"]
    assert [one.num_cached for one in (first, *others, other)] == [0, 28, 28, 0]
    assert [one.table.pages[:7] for one in others] == [first.table.pages[:7]] * 2
    assert toy.stats.prefix_cache_hits == 56


def test_nobody_waits_for_less_than_half_of_what_is_to_be_read_or_for_what_is_given_up() -> None:
    toy = Toy(num_pages=60, prefix_cache=True)
    toy.add("a", 13)
    toy.add("b", 30, prompt=[*range(1, 13), *range(100, 118)])  # three pages of seven and a half
    toy.step()
    assert toy.running == {"a", "b"}
    toy.add("c", 30, prompt=range(200, 230))
    toy.add("d", 30, prompt=range(200, 230))
    toy.step(16)
    assert toy.running == {"a", "b", "c"}
    toy.scheduler.release("c", is_aborted=True)
    toy.step(16)
    assert toy.running == {"a", "b", "d"}


def test_who_came_during_a_step_is_admitted_and_who_runs_gets_pages_for_what_the_step_may_add() -> None:
    toy = Toy(num_pages=20, prefix_cache=True, max_running=2)
    first = toy.add("a", 8, max_tokens=60)
    toy.step()
    toy.pool.free(first.table.shorten(3))  # 8 tokens, the next one, 3 ahead
    toy.add("b", 5, max_tokens=3)
    waiting = toy.add("c", 9, prompt=range(50, 59), max_tokens=3)
    toy.scheduler.prepare(num_new=1 + NUM_AHEAD)
    assert toy.running == {"a", "b"}
    assert len(first.table.pages) == 4
    assert len(waiting.digests) == 2
    toy.scheduler.check()


def test_running_requests_share_the_pages_of_what_they_begin_with() -> None:
    toy = Toy(num_pages=14, prefix_cache=True)
    first = toy.add("a", 30, max_tokens=4)
    toy.step()
    second = toy.add("b", 30, max_tokens=4)
    toy.step()
    assert second.table.pages[:7] == first.table.pages[:7]
    assert toy.stats.prefix_cache_queries == 60
    assert toy.stats.prefix_cache_hits == 28
    toy.scheduler.release("a")
    toy.scheduler.check()
    toy.scheduler.release("b")
    assert (toy.pool.num_free, toy.pool.num_cached) == (14, 7)
