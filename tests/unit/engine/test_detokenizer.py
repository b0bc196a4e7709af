"""Text piece by piece against the tokenizer's own decoding of everything at once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.bundled_target import SMOLLM2_135M_INSTRUCT, cache_folder
from dspark.engine.detokenizer import CONTEXT_TOKENS, REPLACEMENT, WINDOW_TOKENS, Detokenizer, TokenKinds
from tiny_target import tiny_tokenizer

TEXT = "hello  there 👩‍👩‍👧‍👦🇰🇷\n안녕하세요 세계, naïve café — 你好 👍🏽! the ing" + "�" + " end. "


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "bundled"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "byte_level":
        return tiny_tokenizer()
    if request.param == "byte_fallback":
        return byte_fallback_tokenizer()
    folder = cache_folder() / "targets" / SMOLLM2_135M_INSTRUCT.folder_name
    if not folder.is_dir():
        pytest.skip("the bundled target is not in the cache folder")
    return transformers.AutoTokenizer.from_pretrained(folder)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token per byte, whatever the text."""
    if tokenizer.convert_tokens_to_ids("<0x00>") not in (None, tokenizer.unk_token_id):
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    letters = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in data]


def random_ids(tokenizer: Any, rng: random.Random, length: int) -> list[int]:
    """Words, broken and whole characters, special tokens, and runs of bytes, all mixed."""
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.3:
            ids += byte_ids(tokenizer, rng.choice("가👍é😀€").encode()[: rng.choice([1, 2, 3, 4, 4, 4])])
        elif kind < 0.5:
            ids += byte_ids(tokenizer, bytes(rng.choice([0x80, 0xE2, 0xF0, 0x9F, 0x41]) for _ in range(3)))
        elif kind < 0.6:
            ids.append(tokenizer.eos_token_id)
        else:
            ids.append(rng.randrange(len(tokenizer)))
    return ids[:length]


def pieces(detokenizer: Detokenizer, ids: Sequence[int], rng: random.Random) -> list[str]:
    """What comes out for ids appended in blocks of random size, the flush last."""
    out = []
    start = 0
    while start < len(ids):
        size = rng.randint(1, 8)
        out.append(detokenizer.append(ids[start : start + size]))
        start += size
    return [*out, detokenizer.flush()]


def test_joined_pieces_are_the_tokenizers_own_decoding(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(150):
        ids = random_ids(tokenizer, rng, rng.randint(0, 150))
        assert "".join(pieces(Detokenizer(tokenizer), ids, rng)) == decode(tokenizer, ids)


def test_every_token_alone_and_after_a_word_comes_out_whole(tokenizer: Any) -> None:
    word = tokenizer.encode("hello", add_special_tokens=False)
    kinds = TokenKinds.of(tokenizer)
    for token_id in random.Random(1).sample(range(len(tokenizer)), 300):
        for before in ([], word):
            detokenizer = Detokenizer(tokenizer, kinds=kinds)
            text = detokenizer.append(before) + detokenizer.append([token_id]) + detokenizer.flush()
            assert text == decode(tokenizer, [*before, token_id])


def test_text_of_whole_characters_streams_without_a_replacement_character(tokenizer: Any) -> None:
    text = TEXT.replace(REPLACEMENT, "")
    for ids in (tokenizer.encode(text, add_special_tokens=False), byte_ids(tokenizer, text.encode())):
        for seed in range(20):
            out = pieces(Detokenizer(tokenizer), ids, random.Random(seed))
            assert "".join(out) == decode(tokenizer, ids) == text
            assert not any(REPLACEMENT in piece for piece in out)


def test_a_replacement_character_in_the_text_itself_comes_out(tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert "".join(pieces(Detokenizer(tokenizer), ids, random.Random(0))) == TEXT


@pytest.mark.parametrize("character", ["é", "가", "😀"])
def test_a_split_character_waits_for_its_last_byte(tokenizer: Any, character: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = byte_ids(tokenizer, character.encode())
    before = detokenizer.append(tokenizer.encode("hello", add_special_tokens=False))
    assert before == "hello"
    assert [detokenizer.append([token_id]) for token_id in ids[:-1]] == [""] * (len(ids) - 1)
    after = detokenizer.append([*ids[-1:], *byte_ids(tokenizer, b"a")])
    assert after + detokenizer.flush() == character + "a"


def test_byte_level_text_comes_out_as_soon_as_it_is_complete() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    ids = random_ids(tokenizer, random.Random(2), 300)
    out = ""
    for count, token_id in enumerate(ids, start=1):
        out += detokenizer.append([token_id])
        assert out == decode(tokenizer, ids[:count]).removesuffix(REPLACEMENT)


def test_a_run_of_byte_pieces_is_out_when_the_next_piece_comes() -> None:
    tokenizer = byte_fallback_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.append(byte_ids(tokenizer, "😀가".encode())) == ""
    assert detokenizer.pending() == "😀가"
    assert detokenizer.append([tokenizer.convert_tokens_to_ids("▁a")]) == "😀가 a"
    assert detokenizer.pending() == ""


def test_what_a_run_of_byte_pieces_turns_into_is_its_end_that_decides() -> None:
    tokenizer = byte_fallback_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    ids = [*byte_ids(tokenizer, "가".encode()), *byte_ids(tokenizer, b"\x80")]
    assert detokenizer.append(ids[:3]) == ""
    assert detokenizer.append(ids[3:]) == ""
    assert detokenizer.pending() == ""
    assert detokenizer.flush() == decode(tokenizer, ids)


@pytest.mark.parametrize("tail", [b"\xe2", b"\xf0\x9f\x98", b"\x80\x80", b"a\xc3"])
def test_a_truly_invalid_tail_comes_out_at_the_end_as_the_tokenizer_has_it(tokenizer: Any, tail: bytes) -> None:
    ids = [*tokenizer.encode("the end", add_special_tokens=False), *byte_ids(tokenizer, tail)]
    detokenizer = Detokenizer(tokenizer)
    streamed = detokenizer.append(ids)
    last = detokenizer.flush()
    assert streamed + last == decode(tokenizer, ids)
    assert last
    assert set(last) == {REPLACEMENT}


def test_output_that_continues_raw_text_keeps_its_first_space(tokenizer: Any) -> None:
    for prompt in ("a", "hello there. " * 30):
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ids = tokenizer.encode("hello the end", add_special_tokens=False)
        whole = decode(tokenizer, [*prompt_ids, *ids])
        out = pieces(Detokenizer(tokenizer, prompt_ids), ids, random.Random(0))
        assert decode(tokenizer, prompt_ids) + "".join(out) == whole


def test_output_of_its_own_begins_as_the_tokenizer_decodes_it() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids("▁a")]
    assert Detokenizer(tokenizer).append(ids) == "a"
    assert Detokenizer(tokenizer, ids).append(ids) == " a"
    assert Detokenizer(tokenizer, [*ids, tokenizer.eos_token_id]).append(ids) == " a"


def test_special_tokens_have_no_text_and_may_stand_inside_a_character(tokenizer: Any) -> None:
    first, *rest = byte_ids(tokenizer, "가".encode())
    ids = [first, *[tokenizer.eos_token_id] * 100, *rest, *byte_ids(tokenizer, b"a")]
    assert "".join(pieces(Detokenizer(tokenizer), ids, random.Random(0))) == decode(tokenizer, ids) == "가a"


def test_ids_without_a_token_have_no_text(tokenizer: Any) -> None:
    padding_row = len(tokenizer) + 5
    word = tokenizer.encode(" a", add_special_tokens=False)
    ids = [*word, *[padding_row] * 100, *word]
    assert "".join(pieces(Detokenizer(tokenizer), ids, random.Random(0))) == decode(tokenizer, ids)


def test_a_broken_character_at_the_end_of_the_prompt_is_not_shown_again(tokenizer: Any) -> None:
    prompt_ids = tokenizer.encode("a" + REPLACEMENT, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    assert detokenizer.append([tokenizer.eos_token_id]) == ""
    assert detokenizer.append(tokenizer.encode("b", add_special_tokens=False)[-1:]).strip() == "b"


def test_output_does_not_complete_a_character_that_the_prompt_completed() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, byte_ids(tokenizer, "가".encode()))
    assert detokenizer.append(byte_ids(tokenizer, b"\xb0a")) == REPLACEMENT + "a"


class CountingTokenizer:
    """The real tokenizer, counting the ids it is asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("text", ["hello the ", "😀", None], ids=["words", "emoji", "invalid"])
def test_a_token_costs_the_same_however_long_the_output_is(tokenizer: Any, text: str | None) -> None:
    ids = byte_ids(tokenizer, b"\x80" if text is None else text.encode())
    ids = (ids * 3000)[:3000]
    counting: Any = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting, kinds=TokenKinds.of(tokenizer))
    out = "".join(detokenizer.append([token_id]) for token_id in ids)
    assert out + detokenizer.flush() == decode(tokenizer, ids)
    assert counting.num_decoded <= (WINDOW_TOKENS + CONTEXT_TOKENS) * len(ids)


def test_token_kinds_names_special_tokens_and_byte_pieces() -> None:
    byte_level, byte_fallback = TokenKinds.of(tiny_tokenizer()), TokenKinds.of(byte_fallback_tokenizer())
    assert byte_level.skipped_ids == {0, 1, 2} == byte_fallback.skipped_ids
    assert byte_level.byte_ids == frozenset()
    assert byte_fallback.byte_ids == frozenset(range(3, 259))
