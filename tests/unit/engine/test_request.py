"""Tests of the one place where output is cut."""

import pytest

from dspark.engine.request import commit


@pytest.mark.parametrize("stop_id", [2, 0])
def test_any_declared_stop_token_ends_output_and_is_kept(stop_id: int) -> None:
    result = commit([7, stop_id, 9], num_generated=3, stop_ids=(2, 0), max_tokens=10)
    assert result.kept == [7, stop_id]
    assert result.finish_reason == "stop"


def test_output_goes_on_while_nothing_ends_it() -> None:
    result = commit([7, 8], num_generated=0, stop_ids=(2,), max_tokens=10)
    assert result.kept == [7, 8]
    assert result.finish_reason is None


def test_the_limit_cuts_inside_a_block() -> None:
    result = commit([7, 8, 9], num_generated=4, stop_ids=(2,), max_tokens=6)
    assert result.kept == [7, 8]
    assert result.finish_reason == "length"


def test_a_stop_token_beyond_the_limit_is_not_seen() -> None:
    result = commit([7, 8, 2], num_generated=0, stop_ids=(2,), max_tokens=2)
    assert result.kept == [7, 8]
    assert result.finish_reason == "length"


def test_a_stop_token_at_the_limit_counts_as_stop() -> None:
    result = commit([7, 2], num_generated=0, stop_ids=(2,), max_tokens=2)
    assert result.kept == [7, 2]
    assert result.finish_reason == "stop"
