"""Text cut at stop strings, against a search in everything decoded so far."""

import pytest

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.engine.detokenizer import Detokenizer
from dspark.engine.output_text import OutputText, find_stop, num_undecided
from tiny_target import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    """One token per character."""
    return [TOKENIZER.convert_tokens_to_ids(character.replace(" ", "Ġ")) for character in text]


def output_text(*stop_strings: str) -> OutputText:
    return OutputText(Detokenizer(TOKENIZER), stop_strings)


def test_without_stop_strings_all_text_is_shown_at_once():
    text = output_text()
    assert text.extend(ids_of("abc")) == 3
    assert (text.take(), text.take(), text.finish()) == ("abc", "", "")


def test_what_may_begin_a_stop_string_is_held_until_it_is_decided():
    text = output_text("END")
    shown = []
    for character in "xEENEy":
        text.extend(ids_of(character))
        shown.append(text.take())
    assert shown == ["x", "", "E", "", "EN", "Ey"]


def test_what_is_held_is_shown_when_output_ends_otherwise():
    text = output_text("END")
    text.extend(ids_of("xEN"))
    assert (text.take(), text.finish()) == ("x", "EN")


def test_a_broken_character_at_the_end_is_shown_when_output_ends():
    text = output_text("END")
    text.extend([*ids_of("E"), TOKENIZER.convert_tokens_to_ids("â")])
    assert (text.take(), text.finish()) == ("", "E�")


def test_overlapping_candidates_are_followed():
    text = output_text("aab")
    assert text.extend(ids_of("aaabc")) == 4
    assert text.is_stopped
    assert text.finish() == "a"


def test_a_stop_string_inside_one_token_cuts_the_token():
    (token_id,) = (TOKENIZER.convert_tokens_to_ids("question"),)
    assert TOKENIZER.decode([token_id]) == "question"
    text = output_text("est")
    assert text.extend([token_id, *ids_of("a")]) == 1
    assert text.finish() == "qu"


def test_a_stop_string_may_lie_over_two_blocks():
    text = output_text("END")
    assert text.extend(ids_of("xE")) == 2
    assert text.take() == "x"
    assert text.extend(ids_of("NDy")) == 2
    assert (text.is_stopped, text.finish()) == (True, "")


def test_a_stop_string_may_end_with_a_split_character():
    text = output_text("b가")
    ids = [*ids_of("ab"), *[TOKENIZER.convert_tokens_to_ids(letter) for letter in "ê°Ģ"], *ids_of("c")]
    assert text.extend(ids) == 5
    assert text.finish() == "a"


def test_a_stop_string_is_seen_in_byte_pieces_that_could_go_on():
    tokenizer = byte_fallback_tokenizer()
    text = OutputText(Detokenizer(tokenizer), ["가"])
    pieces = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é가".encode()]
    assert text.extend([tokenizer.convert_tokens_to_ids("▁a"), *pieces, *pieces]) == 6
    assert text.finish() == "aé"


def test_stop_strings_are_not_looked_for_in_the_first_tokens():
    text = OutputText(Detokenizer(TOKENIZER), ["ab"], num_unsearched=3)
    assert text.extend(ids_of("ab")) == 2
    assert text.take() == "ab"
    assert text.extend(ids_of("abxab.")) == 5  # the third token is still free, and what begins in it, too
    assert text.is_stopped
    assert text.finish() == "abx"


@pytest.mark.parametrize(
    ("text", "stop_strings", "start"),
    [
        ("abcd", ["cd"], 2),
        ("abcd", ["x", "abx"], None),
        ("abcd", ["abcd", "bc"], 1),  # "bc" is complete before "abcd"
        ("abcd", ["cd", "bcd"], 1),  # complete at once: the longer
        ("bcbc", ["bc"], 0),
    ],
)
def test_find_stop_takes_the_one_that_is_complete_first(text: str, stop_strings: list[str], start: int | None):
    assert find_stop(text, stop_strings) == start


@pytest.mark.parametrize(
    ("text", "stop_strings", "length"),
    [("xaa", ["aab"], 2), ("aaa", ["aab"], 2), ("ab", ["b"], 0), ("xab", ["bc", "abd"], 2), ("", ["ab"], 0)],
)
def test_num_undecided_is_the_longest_beginning_at_the_end(text: str, stop_strings: list[str], length: int):
    assert num_undecided(text, stop_strings) == length
