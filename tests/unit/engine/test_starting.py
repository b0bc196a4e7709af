"""What a request begins with is its own, and none of it is memory."""

from pathlib import Path

import torch

from dspark.engine.estimates import PriorEstimate
from dspark.engine.lookup import Lookup, LookupConfig
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
