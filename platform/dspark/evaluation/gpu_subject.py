"""A target, a drafter and prompts on one device, and engines on them: what the checks of a GPU are made with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers

from dspark.attention.choice import as_capturable
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.initialize import DrafterShape, drafter_config, new_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.drafter_folder import check_drafter, is_drafter_folder
from dspark.engine.engine import Engine
from dspark.engine.graphs import use_graphs
from dspark.engine.loading import paged_runner
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import SamplingParams
from dspark.engine.target_runner import TargetRunner
from dspark.engine.token_buckets import Capture, captured, uncaptured
from dspark.evaluation.load import closed_loop
from dspark.targets import TargetConfig, load_target, load_tokenizer, vocabulary_size

GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE = 16


@dataclass(frozen=True)
class Subject:
    """What is checked, and how much of it. prompts: token ids; drafter: a folder, or none for a fresh one."""

    target: TargetConfig
    device: torch.device
    prompts: Sequence[Sequence[int]]
    drafter: str | None = None
    num_tokens: int = 48
    concurrency: tuple[int, ...] = (1, 16)
    batch_tokens: tuple[int, ...] = (1, 8, 32, 128, 256)
    context_tokens: int = 512
    repeats: int = 7

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.target)

    @property
    def has_trained_drafter(self) -> bool:
        return self.drafter is not None and is_drafter_folder(self.drafter)

    def load(self, dtype: str) -> Any:
        return load_target(self.target.with_changes(dtype=dtype, device=str(self.device)))

    def load_drafter(self, model: Any) -> Any:
        """In the target's type. Raises: Mismatch when it was trained for another target."""
        if self.has_trained_drafter:
            check_drafter(str(self.drafter), self.target)
            return load_drafter(str(self.drafter), dtype=model.dtype, device=str(self.device))
        return fresh_drafter(model, self.tokenizer).to(self.device, model.dtype).eval()

    def config(self, *, num_ahead: int = 0, max_requests: int | None = None) -> EngineConfig:
        most = max_requests or len(self.prompts)
        longest = max(len(prompt) for prompt in self.prompts) + self.num_tokens + PAGE_SIZE
        return EngineConfig(
            kv_tokens=most * -(-longest // PAGE_SIZE) * PAGE_SIZE,
            max_running_requests=most,
            verify_length=num_ahead or None,
            prefix_cache=False,
        )


def fresh_drafter(model: Any, tokenizer: Any) -> Any:
    """A drafter that was taught nothing: its proposals are rejected, what they cost is right."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    endings = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    shape = DrafterShape(num_layers=1, mask_token=next(i for i in range(8) if i not in endings), warm_start=False)
    config = drafter_config(
        shape,
        model.config,
        tokenizer,
        target_layer_ids=tuple(sorted({0, num_layers // 2, num_layers - 2})),
        valid_vocab_size=vocabulary_size(tokenizer),
    )
    ids = torch.arange(config.draft_vocab_size)
    return new_drafter(config, model, draft_to_target=ids, sample_features=torch.empty(0), warm_start=False, seed=0)


def new_runner(
    subject: Subject, model: Any, config: EngineConfig, *, layer_ids: tuple[int, ...] = (), attention: str | None = None
) -> TargetRunner:
    """With a scratch page, and no buckets yet. attention: an entry's name, or the one that serves best."""
    return TargetRunner(
        model,
        vocabulary_size=vocabulary_size(subject.tokenizer),
        layer_ids=layer_ids,
        num_pages=config.num_pages,
        page_size=config.page_size,
        attention=attention,
        has_scratch_page=True,
    )


def build_engine(
    subject: Subject, model: Any, drafter: Any = None, *, attention: str | None = None, max_requests: int | None = None
) -> tuple[Engine, TargetRunner]:
    """An engine that verifies whole blocks, its decode steps in buckets where its attention can be captured."""
    num_ahead = 0 if drafter is None else drafter.block_size
    config = subject.config(num_ahead=num_ahead, max_requests=max_requests)
    drafts = None
    if drafter is not None:
        drafts = paged_runner(drafter, num_pages=config.num_pages, page_size=config.page_size)
    layer_ids = () if drafts is None else drafts.target_layer_ids
    runner = new_runner(subject, model, config, layer_ids=layer_ids, attention=attention)
    if drafts is not None:
        drafts.use_attention(runner.attention.name)
    engine = Engine(runner, drafts, None, config=config)
    if as_capturable(runner.attention) is not None:
        use_graphs(runner, config, num_ahead=num_ahead, capture=capture_on(subject.device))
    return engine, runner


def engine_outputs(engine: Engine, subject: Subject) -> list[list[int]]:
    """Greedy output of all prompts, decoded together."""
    run = closed_loop(engine, requests_of(subject, len(subject.prompts)), concurrency=len(subject.prompts))
    return [answer.output_ids for answer in run.answers]


@torch.inference_mode()
def greedy_continuation(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The library's own, with nothing to stop it."""
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


def requests_of(subject: Subject, number: int) -> list[GenerationRequest]:
    """Greedy ones that nothing stops, over the prompts in turn."""
    prompts = [tuple(subject.prompts[i % len(subject.prompts)]) for i in range(number)]
    return [GenerationRequest(str(i), ids, GREEDY, subject.num_tokens, frozenset()) for i, ids in enumerate(prompts)]


def capture_on(device: torch.device) -> Capture:
    """Graphs where there are any, else their slow twin."""
    return captured if device.type == "cuda" else uncaptured
