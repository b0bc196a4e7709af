"""What a request runs with from its beginning."""

from typing import Any

import torch

from dspark.attention.page_pool import PageTable
from dspark.engine.detokenizer import Detokenizer, TokenKinds
from dspark.engine.estimates import AcceptanceEstimate, PriorEstimate
from dspark.engine.lookup import Lookup
from dspark.engine.output_text import OutputText
from dspark.engine.request import GenerationRequest
from dspark.engine.running import RunningRequest, new_generator


class RequestStarter:
    """Gives each request a text, an estimate, a memory of copies and random numbers of its own; no pages yet.

    tokenizer: None makes no text. lookup: None copies nothing. prior: what is known of drafts before a request's own.
    """

    def __init__(
        self, tokenizer: Any, lookup: Lookup | None, prior: PriorEstimate, *, page_size: int, device: torch.device
    ) -> None:
        self._tokenizer = tokenizer
        self._token_kinds = None if tokenizer is None else TokenKinds.of(tokenizer)
        self._lookup, self._prior = lookup, prior
        self._page_size, self._device = page_size, device

    def start(self, request: GenerationRequest) -> RunningRequest:
        """The request as it waits for its turn."""
        return RunningRequest(
            request=request,
            table=PageTable([], self._page_size),
            memory=None,
            text=self._new_text(request),
            generator=new_generator(request, self._device),
            estimate=AcceptanceEstimate(self._prior),
            copies=None if self._lookup is None else self._lookup.new_memory(),
            output_ids=list(request.output_ids),
        )

    def _new_text(self, request: GenerationRequest) -> OutputText | None:
        if self._tokenizer is None:
            return None
        before = request.prompt_ids if request.continues_prompt else ()
        detokenizer = Detokenizer(self._tokenizer, before, kinds=self._token_kinds)
        text = OutputText(detokenizer, request.stop_strings, num_unsearched=request.sampling.min_tokens)
        text.extend(request.output_ids)
        text.take()  # shown when those were output: what is out depends on the ids alone, not on the steps they came in
        return text
