"""Pieces lie one behind the other: tokens, positions, slots and the rows whose logits are wanted."""

from dspark.attention.flat_batch import Piece, flatten
from dspark.attention.page_pool import PageTable


def table(pages: list[int], num_tokens: int) -> PageTable:
    made = PageTable(pages, page_size=4)
    made.num_tokens = num_tokens
    return made


def test_prefill_decode_and_verify_are_one_batch() -> None:
    batch = flatten(
        [
            Piece(table([0, 1], 0), [10, 11, 12], num_logits=0),  # a prompt that goes on
            Piece(table([7, 3], 5), [20], num_logits=1),  # a decode
            Piece(table([5, 6], 2), [30, 31, 32, 33], num_logits=4),  # a verification
            Piece(table([2], 1), [40, 41], num_logits=1),  # the end of a prompt
        ],
        "cpu",
    )
    assert batch.input_ids.tolist() == [10, 11, 12, 20, 30, 31, 32, 33, 40, 41]
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3, 4, 5, 1, 2]
    assert batch.slot_mapping.tolist() == [0, 1, 2, 13, 22, 23, 24, 25, 9, 10]
    assert batch.logit_rows.tolist() == [3, 4, 5, 6, 7, 9]
    assert batch.cu_seqlens_q == (0, 3, 4, 8, 10)
    assert batch.cu_logits == (0, 0, 1, 5, 6)
    assert batch.num_tokens == 10
