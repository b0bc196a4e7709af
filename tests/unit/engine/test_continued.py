"""A request that begins with output of its own goes on as if it had never been interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.ngram import NGramConfig, NGramDrafter
from dspark.engine.detokenizer import Detokenizer
from dspark.engine.draft_runner import NGramDraftRunner
from dspark.engine.loading import paged_runner
from dspark.engine.output_text import OutputText
from dspark.engine.running import new_generator
from dspark.engine.sampling import SamplingParams
from dspark.engine.step import StepOutput
from tiny_drafter import make_tiny_drafter
from tiny_engine import PROMPTS, ids_of, load, make_engine, request, run

NUM_NEW = 20
GREEDY = SamplingParams(temperature=0.0)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "seeded": {"sampling": SamplingParams(temperature=1.0), "seed": 5, "choice": 1},
    "penalties": {
        "sampling": SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3)
    },
    "min_tokens": {
        "sampling": SamplingParams(temperature=0.9, min_tokens=14),
        "seed": 7,
        "stop_ids": frozenset(range(60)),
    },
    "logprobs": {"sampling": SamplingParams(temperature=0.8, logprobs=3, top_p=0.9), "seed": 1},
}


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load(tiny_target)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_target)


def drafts_of(kind: str, folder: Path, target: Path) -> Any:
    if kind == "none":
        return None
    if kind == "ngram":
        return NGramDraftRunner(NGramDrafter(NGramConfig(block_size=4)))
    return paged_runner(load_drafter(make_tiny_drafter(folder / "drafter", target)), num_pages=512, page_size=4)


def shown(outputs: list[StepOutput]) -> str:
    return "".join(output.text for output in outputs)


def cuts(outputs: list[StepOutput]) -> list[int]:
    """Steps after which it is interrupted: never the last."""
    return [*range(1, min(6, len(outputs))), *range(6, len(outputs), 4)]


@pytest.mark.parametrize(
    ("kind", "name"), [*(("ngram", name) for name in ASKED), ("none", "greedy"), ("dspark", "seeded")]
)
def test_it_goes_on_from_every_step_as_it_went_on(
    model: Any, tokenizer: Any, tiny_target: Path, tmp_path: Path, kind: str, name: str
) -> None:
    options = {"max_tokens": NUM_NEW} | ASKED[name]
    drafts = drafts_of(kind, tmp_path, tiny_target)
    whole = run(make_engine(model, drafts, tokenizer=tokenizer), [request(PROMPTS[0], **options)])["0"]
    seen = {str(cut): tuple(ids_of(whole[:cut])) for cut in cuts(whole)}
    continued = [request(PROMPTS[0], cut, output_ids=ids, **options) for cut, ids in seen.items()]
    engine = make_engine(model, drafts, tokenizer=tokenizer, max_running_requests=3)
    rest = run(engine, continued)
    for cut, ids in seen.items():
        assert [*ids, *ids_of(rest[cut])] == ids_of(whole)
        assert shown(whole[: int(cut)]) + shown(rest[cut]) == shown(whole)
        last, expected = rest[cut][-1], whole[-1]
        assert (last.finish_reason, last.num_prompt_tokens) == (expected.finish_reason, expected.num_prompt_tokens)
        assert last.num_output_tokens == expected.num_output_tokens
        told = [one.token_id for output in rest[cut] for one in output.logprobs or []]
        assert told == (ids_of(rest[cut]) if name == "logprobs" else [])
    assert engine.stats.prompt_tokens == 0  # it was read before: that is counted as read again
    assert engine.stats.output_tokens == sum(len(ids_of(outputs)) for outputs in rest.values())


@pytest.mark.parametrize("stops", [(), ("zu",), ("ab", "é!")])
@pytest.mark.parametrize("num_unsearched", [0, 6])
def test_the_text_has_no_seam(stops: tuple[str, ...], num_unsearched: int) -> None:
    """Byte pieces of one character, and beginnings of stop strings, may lie on both sides of it."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer("a 한국 zu é! ab zz 🙂 b é", add_special_tokens=False)["input_ids"] * 3

    def new() -> OutputText:
        return OutputText(Detokenizer(tokenizer), stops, num_unsearched=num_unsearched)

    def written(text: OutputText, token_ids: list[int]) -> str:
        shown = ""
        for token_id in token_ids:
            text.extend([token_id])
            shown += text.take()
            if text.is_stopped:
                return shown
        return shown + text.finish()

    whole = written(new(), ids)
    for cut in range(1, len(ids)):
        first, second = new(), new()
        first.extend(ids[:cut])
        if first.is_stopped:
            break
        second.extend(ids[:cut])
        second.take()
        assert first.take() + written(second, ids[cut:]) == whole
    assert not stops or cut < len(ids) - 1


def test_a_seeded_generator_does_not_repeat_its_numbers() -> None:
    sampling = SamplingParams(temperature=1.0, seeded="rejection")
    draws = []
    for output_ids in ((), (5,), (5, 6), (5, 7)):
        generator = new_generator(request([1], sampling=sampling, seed=3, output_ids=output_ids), torch.device("cpu"))
        draws.append(torch.rand(4, generator=generator).tolist())
    assert draws[0] != draws[1] != draws[2]
    assert draws[2] == draws[3]  # the number of tokens decides, so that a repeat is one


@pytest.mark.parametrize(("output_ids", "message"), [((5,) * 24, "24 tokens are output"), ((320,), "outside of the")])
def test_what_cannot_go_on_is_refused(model: Any, output_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(model).add(request(PROMPTS[0], output_ids=output_ids))
