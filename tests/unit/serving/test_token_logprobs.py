"""What a token looks like to a client: its text, and its own bytes where it is a part of a character."""

import math
from pathlib import Path
from typing import Any

import pytest

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.engine.step import TokenLogprobs
from dspark.serving.token_logprobs import LOWEST, TokenTexts
from tiny_target import tiny_tokenizer


def texts_of(tokenizer: Any, text: str) -> list[tuple[str, bytes]]:
    shown = TokenTexts(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = [shown.show(TokenLogprobs(token_id, -1.0, ())).own for token_id in ids]
    return [(token.text, token.raw) for token in tokens]


@pytest.mark.parametrize("text", ["hello the question", "é✓ 日本 \N{GRINNING FACE}"])
def test_the_bytes_of_a_byte_level_tokenizers_tokens_join_to_the_text(text: str):
    found = texts_of(tiny_tokenizer(), text)
    assert b"".join(raw for _, raw in found) == text.encode()
    assert all(shown == raw.decode() for shown, raw in found if "\N{REPLACEMENT CHARACTER}" not in shown)


def test_pieces_that_are_bytes_are_those_bytes():
    found = texts_of(byte_fallback_tokenizer(), "é")
    assert b"".join(raw for _, raw in found)[-2:] == "é".encode()


def test_a_word_keeps_the_space_before_it():
    found = texts_of(byte_fallback_tokenizer(), "hello the end")
    assert "".join(shown for shown, _ in found) == " hello the end"
    assert b"".join(raw for _, raw in found) == b" hello the end"


def test_a_token_without_probability_has_a_number_that_json_can_hold():
    shown = TokenTexts(tiny_tokenizer()).show(TokenLogprobs(5, -0.5, ((5, -0.5), (6, -math.inf))))
    assert [token.logprob for token in (shown.own, *shown.top)] == [-0.5, -0.5, LOWEST]


def test_special_tokens_have_their_name_for_a_text(tiny_target: Path):
    assert TokenTexts(tiny_tokenizer()).show(TokenLogprobs(2, -1.0, ())).own.text == "<|im_end|>"
