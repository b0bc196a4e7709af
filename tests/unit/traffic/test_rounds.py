"""Rounds in columns: what is written is what is read, and what is no file of ours is refused."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark.speculation.statistics import Round
from dspark.traffic.rounds import MODES, Origin, RecordedRounds, RoundBuffer, decode, num_judged

ORIGIN = Origin("d" * 16, "runs/drafter", {"name": "t"}, 4, "r1", "c" * 16, None)


def some_rounds(draw: random.Random, number: int, block_size: int = 4) -> list[Round]:
    rounds = []
    for _ in range(number):
        proposed = draw.randint(1, block_size)
        accepted = draw.randint(0, proposed)
        committed = draw.randint(1, accepted + 1)
        rounds.append(Round(proposed, accepted, committed, [draw.gauss(0, 2) for _ in range(proposed)]))
    return rounds


def test_what_is_written_is_what_is_read() -> None:
    draw, buffer, expected = random.Random(0), RoundBuffer(), []
    for answer in range(30):
        mode, rounds = draw.choice(MODES), some_rounds(draw, draw.randint(0, 9))
        buffer.add(answer + 2**60, mode, rounds, is_whole=answer % 3 == 0)
        expected += [(answer + 2**60, mode, answer % 3 == 0, done) for done in rounds]
    assert len(buffer) == len(expected)
    origin, found = decode(buffer.encode(ORIGIN))
    assert origin == ORIGIN
    assert found.num_unusable == 0
    for i, (request, mode, is_whole, done) in enumerate(expected):
        assert (int(found.request[i]), MODES[found.mode[i]], bool(found.is_whole[i])) == (request, mode, is_whole)
        assert (found.num_accepted[i], found.num_judged[i]) == (done.num_accepted, num_judged(done))
        assert found.logits[i, : done.num_proposed] == pytest.approx(done.confidence_logits)
        assert np.isnan(found.logits[i, done.num_proposed :]).all()
    for mode in MODES:
        assert len(found.of_mode(mode)) == sum(row[1] == mode for row in expected)
    joined = RecordedRounds.joined([found, found], 4)
    assert len(joined) == 2 * len(found)
    assert len(RecordedRounds.joined([], 4)) == 0


def test_copies_have_no_confidences_and_are_passed_over() -> None:
    buffer = RoundBuffer()
    buffer.add(1, "greedy", [Round(3, 3, 4, None), Round(2, 0, 1, [0.5, 0.25])], is_whole=False)
    assert len(buffer) == 1


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (Round(4, 2, 3), 4),  # one was rejected
        (Round(4, 4, 5), 4),  # all stood
        (Round(4, 4, 2), 2),  # a stop token was the second
        (Round(4, 1, 1), 1),  # … the first, and it stood
        (Round(4, 0, 1), 4),  # … the target's own
    ],
)
def test_nothing_behind_a_stop_token_was_judged(done: Round, expected: int) -> None:
    assert num_judged(done) == expected


def test_a_logit_that_is_not_finite_where_it_counts_leaves_its_round_out() -> None:
    buffer = RoundBuffer()
    nan = float("nan")
    rounds = [
        Round(2, 1, 2, [0.5, nan]),
        Round(2, 2, 1, [0.5, nan]),
        Round(1, 1, 2, [float("inf")]),
        Round(1, 0, 1, [1.0]),
    ]
    buffer.add(1, "greedy", rounds, is_whole=False)
    _, found = decode(buffer.encode(ORIGIN))
    assert (len(found), found.num_unusable) == (2, 2)  # the second stopped before it


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def test_what_is_no_file_of_ours_is_refused() -> None:
    buffer = RoundBuffer()
    buffer.add(1, "greedy", some_rounds(random.Random(1), 5), is_whole=False)
    good = buffer.encode(ORIGIN)
    other_block = Origin("d" * 16, "runs/drafter", {"name": "t"}, 1, "r1", None, None)
    for content in (b"", b"PAR1", good[:-20], good[:100], parquet(pa.table({"a": [1]})), b"{}" * 50):
        with pytest.raises(ValueError, match="not recorded rounds"):
            decode(content)
    with pytest.raises(ValueError, match="more slots than the block of 1"):
        decode(buffer.encode(other_block))
