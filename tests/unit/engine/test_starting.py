"""What a request begins with is its own, and none of it is memory; raw prompts go on, conversations begin anew."""

from pathlib import Path

import pytest
import torch

from byte_fallback_tokenizer import byte_fallback_tokenizer
from dspark.engine.estimates import PriorEstimate
from dspark.engine.lookup import Lookup, LookupConfig
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.starting import RequestStarter
from dspark.targets import TargetConfig, load_tokenizer
from tiny_engine import request

CPU = torch.device("cpu")


def test_each_request_gets_a_text_copies_and_random_numbers_of_its_own_and_no_pages(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(TargetConfig(name=str(tiny_target), device="cpu"))
    starter = RequestStarter(tokenizer, Lookup(LookupConfig()), PriorEstimate(), page_size=4, device=CPU)
    sampled = SamplingParams(temperature=1.0)
    one, other = (starter.start(request([5, 6], name, sampling=sampled)) for name in "ab")
    assert one.table.pages == other.table.pages == []
    for first, second in ((one.text, other.text), (one.copies, other.copies), (one.generator, other.generator)):
        assert first is not None
        assert first is not second
    assert one.generator.initial_seed() != other.generator.initial_seed()


def test_nothing_is_made_that_is_not_asked_for() -> None:
    started = RequestStarter(None, None, PriorEstimate(), page_size=4, device=CPU).start(request([5]))
    assert (started.text, started.copies, started.generator, started.memory) == (None, None, None, None)


@pytest.mark.parametrize(("continues_prompt", "expected"), [(True, " the end"), (False, "the end")])
def test_output_that_goes_on_from_a_raw_prompt_keeps_its_first_space(continues_prompt: bool, expected: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    starter = RequestStarter(tokenizer, None, PriorEstimate(), page_size=4, device=CPU)
    prompt_ids, output_ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("hello", "the end"))
    request = GenerationRequest(
        "0", tuple(prompt_ids), SamplingParams(), 9, frozenset(), continues_prompt=continues_prompt
    )
    text = starter.start(request).text
    assert text is not None
    assert text.extend(output_ids) == len(output_ids)
    assert text.finish() == expected
