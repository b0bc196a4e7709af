"""Text comes out in whole characters and ends before the stop string, with ids, usage and counters cut alike."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from dspark.engine.draft_runner import SequentialDraftRunner
from dspark.engine.sampling import SamplingParams
from scripted_drafters import ScriptedDrafter
from tiny_engine import PROMPTS, greedy_continuations, ids_of, load, make_engine, request, run

NUM_NEW = 40
BLOCK_SIZE = 7


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_target)


@pytest.fixture(scope="module")
def continuation(tiny_target: Path) -> list[int]:
    return greedy_continuations(load(tiny_target), PROMPTS[:1], NUM_NEW + BLOCK_SIZE + 1)[0]


def outputs_of(model: Any, tokenizer: Any, continuation: list[int], *, num_right: int = 99, **options: Any) -> Any:
    """One request decoded with a drafter that is right `num_right` times in each block; with the engine."""
    drafter = ScriptedDrafter(PROMPTS[0] + continuation, block_size=BLOCK_SIZE, num_right=num_right)
    engine = make_engine(model, SequentialDraftRunner(drafter), tokenizer=tokenizer)
    return engine, run(engine, [request(PROMPTS[0], **{"max_tokens": NUM_NEW} | options)])["0"]


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("num_right", [0, 2, 99])
def test_the_pieces_are_the_whole_text(model, tokenizer, continuation, num_right):
    _, outputs = outputs_of(model, tokenizer, continuation, num_right=num_right)
    assert "".join(output.text for output in outputs) == decoded(tokenizer, continuation[:NUM_NEW])


@pytest.mark.parametrize("position", range(2, 20))
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_a_stop_string_cuts_text_ids_and_counters_wherever_it_ends(
    model, tokenizer, continuation, position, num_tokens
):
    whole = decoded(tokenizer, continuation[:NUM_NEW])
    stop = decoded(tokenizer, continuation[position : position + num_tokens])
    if not stop or "�" in stop:
        pytest.skip("these tokens are no whole characters")
    engine, outputs = outputs_of(model, tokenizer, continuation, stop_strings=(stop,))
    text, ids = "".join(output.text for output in outputs), ids_of(outputs)
    assert text == whole[: whole.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert ids == continuation[: len(ids)]
    assert stop in decoded(tokenizer, ids)
    assert stop not in decoded(tokenizer, ids[:-1])
    assert outputs[-1].num_output_tokens == len(ids) == engine.stats.output_tokens
    assert sum(output.round.num_committed for output in outputs if output.round) == len(ids) - 1
    _, plain = outputs_of(model, tokenizer, continuation, num_right=0, stop_strings=(stop,))
    assert ("".join(output.text for output in plain), ids_of(plain)) == (text, ids)


class WithoutPages(SequentialDraftRunner):
    """A drafter that needs no page, so that pages are shared whatever it has seen."""

    def __init__(self, drafter: ScriptedDrafter) -> None:
        super().__init__(drafter)
        self.num_reread = 0

    def new_memory(self, table: Any, stored_ids: Any = ()) -> Any:
        return super().new_memory(table)

    def num_stored(self, memory: Any) -> int:
        return 1 << 30


@pytest.mark.parametrize("seed", range(6))
def test_after_a_stop_in_mid_block_the_text_goes_on_as_if_it_had_ended_there(model, tokenizer, seed):
    """Tokens that were verified behind the stop leave nothing, in the draws or on pages that others share (B10)."""
    options = {"max_tokens": NUM_NEW, "sampling": SamplingParams(temperature=0.8), "seed": seed}
    whole = ids_of(run(make_engine(model, tokenizer=tokenizer), [request(PROMPTS[0], **options)])["0"])
    drafter = ScriptedDrafter(PROMPTS[0] + whole + [7] * BLOCK_SIZE, block_size=BLOCK_SIZE, num_right=99)
    engine = make_engine(model, WithoutPages(drafter), tokenizer=tokenizer, prefix_cache=True)
    stop = next(text for token in whole[9:] if "�" not in (text := decoded(tokenizer, [token])) and text)
    (outputs,) = run(engine, [request(PROMPTS[0], stop_strings=(stop,), **options)]).values()
    kept = ids_of(outputs)
    assert outputs[-1].finish_reason == "stop"
    assert kept == whole[: len(kept)]
    assert outputs[-1].num_output_tokens == len(kept)
    assert outputs[-1].round.num_accepted > outputs[-1].round.num_committed  # the stop was in mid-block
    onward = request(PROMPTS[0] + kept + [7, 8], verify_length=0, **options)
    fresh = make_engine(model, tokenizer=tokenizer)
    (after,), (alone,) = (run(one, [onward]).values() for one in (engine, fresh))
    assert after[0].num_cached_tokens > 0
    assert ids_of(after) == ids_of(alone)


def test_a_stop_token_has_no_text(model, tokenizer, continuation):
    stop_id = continuation[6]
    first = continuation.index(stop_id)
    _, outputs = outputs_of(model, tokenizer, continuation, stop_ids=frozenset({stop_id}))
    assert ids_of(outputs) == continuation[: first + 1]
    assert "".join(output.text for output in outputs) == decoded(tokenizer, continuation[:first])
