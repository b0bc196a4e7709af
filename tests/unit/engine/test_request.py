"""Tests of the one place where output is cut."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.engine.detokenizer import Detokenizer
from dspark.engine.output_text import OutputText
from dspark.engine.request import FinishReason, GenerationRequest, commit
from dspark.engine.sampling import SamplingParams
from tiny_target import tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
EOS = 2


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


def ids_of(text: str) -> list[int]:
    """One byte-level token per character."""
    return [BYTE_LEVEL.convert_tokens_to_ids(character) for character in text]


def run(
    blocks: Sequence[Sequence[int]],
    *stop_strings: str,
    max_tokens: int = 100,
    stop_ids: Sequence[int] = (EOS,),
    tokenizer: Any = BYTE_LEVEL,
) -> tuple[list[int], FinishReason | None, list[str]]:
    """Commit block after block until one ends output: ids, reason, and the text of each commit."""
    text = OutputText(Detokenizer(tokenizer), stop_strings)
    ids: list[int] = []
    shown: list[str] = []
    for block in blocks:
        result = commit(block, num_generated=len(ids), stop_ids=stop_ids, max_tokens=max_tokens, text=text)
        ids += result.kept
        shown.append(result.text)
        if result.finish_reason is not None:
            return ids, result.finish_reason, shown
    return ids, None, shown


def twin(
    tokenizer: Any, ids: Sequence[int], stop_strings: Sequence[str], stop_ids: Sequence[int], max_tokens: int
) -> tuple[list[int], FinishReason | None, str]:
    """Token by token, everything decoded and searched anew each time."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    for count, token_id in enumerate(ids, start=1):
        kept = list(ids[:count])
        if token_id in stop_ids:
            return kept, "stop", decode(kept[:-1])
        text = decode(kept)
        ends = {(text.find(stop) + len(stop), text.find(stop)) for stop in stop_strings if stop in text}
        if ends:
            return kept, "stop", text[: min(ends)[1]]
        if count == max_tokens:
            return kept, "length", text
    return list(ids), None, decode(ids)


def undecided(text: str, stop_strings: Sequence[str]) -> int:
    """The longest end of the text that is a beginning of a stop string but not the whole of it."""
    beginnings = {stop[:length] for stop in stop_strings for length in range(len(stop))}
    return max(len(beginning) for beginning in beginnings if text.endswith(beginning))


@pytest.mark.parametrize("position", range(1, 8))
@pytest.mark.parametrize("stop", ["Z", "YZ", "XYZ"])
def test_a_stop_string_is_cut_wherever_in_a_block_it_completes(stop: str, position: int) -> None:
    text = "1234567" + ("abcdefg"[:position] + "hijklmn")[:7]
    end = 7 + position
    text = text[: end - len(stop)] + stop + text[end:]  # begins in the block before where the position is small
    ids, reason, shown = run([ids_of(text[:7]), ids_of(text[7:])], stop)
    assert (ids, reason, "".join(shown)) == (ids_of(text[:end]), "stop", text[: end - len(stop)])


def test_a_stop_in_the_last_place_allowed_counts_as_stop() -> None:
    assert run([ids_of("abXYc")], "XY", max_tokens=4)[1] == "stop"
    assert run([ids_of("abXYc")], "XY", max_tokens=3) == (ids_of("abX"), "length", ["abX"])


def test_tokens_after_a_stop_token_inside_the_budget_do_not_leak() -> None:
    a, b, c, d, e = ids_of("abcde")
    assert run([[a, b, EOS, c, d, e]], max_tokens=5) == ([a, b, EOS], "stop", ["ab"])
    assert run([[a, b, c, d, e, EOS]], max_tokens=5) == ([a, b, c, d, e], "length", ["abcde"])


def test_one_token_is_output_when_one_is_allowed() -> None:
    assert run([ids_of("abc")], max_tokens=1) == (ids_of("a"), "length", ["a"])


def test_a_stop_token_before_a_stop_string_ends_output_with_what_was_held() -> None:
    assert run([[*ids_of("abX"), EOS, *ids_of("Y")]], "XY") == ([*ids_of("abX"), EOS], "stop", ["abX"])


def test_the_text_of_a_stop_token_is_never_shown() -> None:
    (newline,) = ids_of("Ċ")
    assert BYTE_LEVEL.decode([newline]) == "\n"
    assert run([[*ids_of("ab"), newline]], stop_ids=(newline,)) == ([*ids_of("ab"), newline], "stop", ["ab"])


def test_a_block_may_end_inside_a_character() -> None:
    blocks = [ids_of("aðŁ"), ids_of("ĺĢb")]
    assert run(blocks, max_tokens=7) == ([*blocks[0], *blocks[1]], None, ["a", "😀b"])
    assert run(blocks, max_tokens=3) == (blocks[0], "length", ["a�"])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_blocks_of_any_size_are_cut_as_token_by_token(tokenizer: Any) -> None:
    rng = random.Random(0)
    emoji = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "aaabbb"]
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("aa", "ab", "▁a", "▁b")]
    words = [token_id for token_id in words if token_id not in (None, tokenizer.unk_token_id)]
    special = 1
    reasons = set()
    for _ in range(2000):
        ids = [rng.choice([*letters, *words, *emoji, special]) for _ in range(rng.randint(1, 25))]
        if rng.random() < 0.5:
            ids[rng.randrange(len(ids)) :] = [*emoji, *letters[2:4], EOS]
        stops = ["".join(rng.choices("ab 😀", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        max_tokens = rng.randint(1, 30)
        expected_ids, expected_reason, expected_text = twin(tokenizer, ids, stops, (EOS,), max_tokens)
        blocks = [ids[i : i + 3] for i in range(0, len(ids), 3)] if rng.random() < 0.5 else [ids]
        got_ids, reason, shown = run(blocks, *stops, max_tokens=max_tokens, tokenizer=tokenizer)
        assert (got_ids, reason) == (expected_ids, expected_reason)
        reasons.add(reason)
        if reason is not None:
            assert "".join(shown) == expected_text
        elif tokenizer is BYTE_LEVEL:  # as much as can be shown is shown
            complete = expected_text.removesuffix("�")
            num_held = undecided(complete, stops) if stops else 0
            assert "".join(shown) == complete[: len(complete) - num_held]
    assert reasons == {None, "stop", "length"}


def test_decoded_ids_are_the_text_and_at_most_the_stop() -> None:
    ids, _, shown = run([ids_of("helloXYZbye")], "XY")
    assert BYTE_LEVEL.decode(ids) == "".join(shown) + "XY"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_strings \['a', ''\] holds an empty string; leave it out"):
        GenerationRequest("r", (1,), SamplingParams(), 5, frozenset({2}), stop_strings=("a", ""))
