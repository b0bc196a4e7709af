"""What has to hold on a machine with a GPU, as checks that take any device: on a CPU the same functions are tested.

Graphs are captured on CUDA only; elsewhere the slow twin of their replay stands for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from dspark.attention.choice import as_capturable, choose_entries, named_entry
from dspark.attention.flat_batch import Piece
from dspark.attention.kv_cache import PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.engine.config import EngineConfig
from dspark.engine.graphs import most_tokens, use_graphs
from dspark.engine.step_timer import BatchShape, StepTimer, page_tables
from dspark.engine.target_runner import TargetRunner
from dspark.engine.token_buckets import Bucket
from dspark.evaluation.attention_check import (
    DECODING,
    MIXED,
    SHAPES,
    TOLERANCE,
    AttentionShape,
    PagedProblem,
    relative_error,
)
from dspark.evaluation.gpu_subject import (
    PAGE_SIZE,
    Subject,
    build_engine,
    capture_on,
    engine_outputs,
    greedy_continuation,
    new_runner,
    requests_of,
)
from dspark.evaluation.load import closed_loop
from dspark.targets import vocabulary_size

Findings = Iterator[tuple[str, bool | None, str]]

PAGE_SIZES = {"flash": (256,), "flex": (16, 128), "cpu": (16,), "torch": (16,)}
NEAR_TIE = 1e-3  # logits that differ by less may swap when sums are formed in another order
PADDING_TOLERANCE = 0.05  # of the largest logit, in bfloat16: products of another shape round otherwise
WARMUP_STEPS = 2


def check_device(device: torch.device) -> Findings:
    """What is checked, with which libraries."""
    if device.type != "cuda":
        yield "", None, f"no GPU, torch {torch.__version__}"
        return
    found = torch.cuda.get_device_properties(device)
    memory = f"{found.total_memory / 2**30:.0f} GiB, compute capability {found.major}.{found.minor}"
    yield "", True, f"{found.name}, {memory}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def check_attention(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    *,
    shapes: Mapping[str, AttentionShape] = SHAPES,
    lengths: Sequence[tuple[int, int]] = MIXED,
) -> Findings:
    """Every entry of the device against the reference in float64, through plans of a step's and of fixed size."""
    for name in entry_names(device):
        for dtype in dtypes:
            errors: list[float] = []
            reasons: list[str] = []
            for page_size, shape in product(PAGE_SIZES[name], shapes.values()):
                options: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "device": device}
                problem = PagedProblem(shape, **options, lengths=lengths)
                reason = _unserved(name, problem.memory(), page_size)
                if reason is None:
                    errors.append(_attention_error(name, problem))
                    errors.append(_fixed_plan_error(name, PagedProblem(shape, **options, lengths=DECODING)))
                else:
                    reasons.append(reason)
            detail = f"{name} {str(dtype).removeprefix('torch.')}"
            if not errors:
                yield detail, None, reasons[0]
            else:
                said = f"{len(errors)} problems, largest error {max(errors):.1e} of the largest value"
                yield detail, max(errors) <= TOLERANCE[dtype], said


def check_greedy(subject: Subject) -> Findings:
    """Float32 output against the library's `generate`, with and without a drafter, for each entry that serves."""
    model = subject.load("float32")
    expected = [greedy_continuation(model, prompt, subject.num_tokens) for prompt in subject.prompts]
    drafter = subject.load_drafter(model)
    memory = TargetRunner(
        model, vocabulary_size=vocabulary_size(subject.tokenizer), num_pages=4, page_size=PAGE_SIZE
    ).kv_cache
    names = [entry.name for entry in choose_entries(memory, PAGE_SIZE).entries]
    for name in names:
        for kind, drafts in (("plain", None), ("drafted", drafter)):
            engine, runner = build_engine(subject, model, drafts, attention=name)
            found = engine_outputs(engine, subject)
            answers = zip(subject.prompts, found, expected, strict=True)
            ties = [_is_near_tie(model, prompt, a, b) for prompt, a, b in answers if a != b]
            said = f"{len(expected) - len(ties)} of {len(expected)} answers of {subject.num_tokens} tokens are the same"
            said += f", {sum(ties)} differ at a near-tie" if ties else ""
            said += f", {runner.num_bucket_runs} steps in buckets" if runner.num_bucket_runs else ""
            yield f"{name}, {kind}", all(ties), said


def check_buckets(subject: Subject) -> Findings:
    """A replay against the same computation without a graph, and against a step that is not padded."""
    model = subject.load("bfloat16")
    most = max(subject.concurrency)
    runner = new_runner(subject, model, subject.config(max_requests=most))
    entry = as_capturable(runner.attention)
    if entry is None:
        yield "", None, f"attention {runner.attention.name} cannot be captured"
        return
    assert runner.scratch_slot is not None
    for memory in (*runner.kv_cache.keys, *runner.kv_cache.values):
        memory.normal_(generator=torch.Generator(memory.device).manual_seed(0))
    for num_requests in subject.concurrency:
        size = num_requests + 1
        plan = entry.fixed_plan(num_tokens=size, num_requests=num_requests, max_pages=2)
        bucket = Bucket(size, runner.compute_padded, plan, scratch_slot=runner.scratch_slot, device=subject.device)
        with torch.inference_mode():
            replay = capture_on(subject.device)(bucket.compute)
            batch = runner.flatten([_decode(page) for page in range(num_requests)])
            bucket.fill(batch)
            replayed = replay()[0][:num_requests].clone()
            twin = bucket.compute()[0][:num_requests]
            alone = runner.run(batch).scores
        same, error = torch.equal(replayed, twin), relative_error(replayed, alone.double())
        said = f"replay {'' if same else 'NOT '}bit for bit its twin, padding moves logits by {error:.1e}"
        yield f"{num_requests} requests", same and error <= PADDING_TOLERANCE, said


def check_cost(subject: Subject) -> Findings:
    """Milliseconds of a target step by its tokens, as decode steps run and without buckets."""
    model = subject.load("bfloat16")
    most = max(subject.batch_tokens)
    tables = page_tables([subject.context_tokens + 1] * most, PAGE_SIZE)
    runner = TargetRunner(
        model,
        vocabulary_size=vocabulary_size(subject.tokenizer),
        num_pages=sum(len(table.pages) for table in tables),
        page_size=PAGE_SIZE,
        has_scratch_page=True,
    )
    timer = StepTimer(runner, None, tables, context_tokens=subject.context_tokens, seed=0)
    shapes = [BatchShape((1,) * number) for number in sorted(subject.batch_tokens)]
    eager = {shape.num_tokens: _median_ms(partial(timer.verify_s, shape), subject.repeats) for shape in shapes}
    yield "without buckets", all(ms > 0 for ms in eager.values()), _curve(eager)
    config = EngineConfig(max_running_requests=most, max_context_tokens=subject.context_tokens + 1)
    if as_capturable(runner.attention) is None:
        yield "in buckets", None, f"attention {runner.attention.name} cannot be captured"
        return
    reason = use_graphs(runner, config, num_ahead=0, capture=capture_on(subject.device))
    bucketed = {shape.num_tokens: _median_ms(partial(timer.verify_s, shape), subject.repeats) for shape in shapes}
    yield "in buckets", reason is None, reason or f"{_curve(bucketed)}, up to {most_tokens(config, 0)} tokens"


def check_speed(subject: Subject) -> Findings:
    """Tokens per second plain and drafted, bfloat16, closed loop."""
    model = subject.load("bfloat16")
    drafter = subject.load_drafter(model)
    kind = subject.drafter if subject.has_trained_drafter else "a fresh drafter, which proposes nothing that stands"
    most = max(subject.concurrency)
    engines = {
        name: build_engine(subject, model, drafts, max_requests=most)[0]
        for name, drafts in (("plain", None), ("drafted", drafter))
    }
    for concurrency in subject.concurrency:
        requests = requests_of(subject, max(2 * concurrency, 4))
        speeds, taus = {}, {}
        for name, engine in engines.items():
            closed_loop(engine, requests[:concurrency], concurrency=concurrency)  # warms up
            run = closed_loop(engine, requests, concurrency=concurrency)
            speeds[name], taus[name] = run.tokens_per_s, run.figures()["accepted_length"]
        ratio = speeds["drafted"] / speeds["plain"]
        said = f"{speeds['plain']:.0f} and {speeds['drafted']:.0f} tokens/s, ratio {ratio:.2f}"
        said += f", tau {taus['drafted']:.2f}" if taus["drafted"] else ""
        yield f"{concurrency} at once", min(speeds.values()) > 0, f"{said} ({kind})"


def check_memory(device: torch.device) -> Findings:
    """What all the other checks took at most."""
    if device.type != "cuda":
        yield "", None, "no GPU"
        return
    total = torch.cuda.get_device_properties(device).total_memory
    peak = torch.cuda.max_memory_allocated(device)
    yield "", peak < total, f"peak {peak / 2**30:.2f} of {total / 2**30:.0f} GiB"


def entry_names(device: torch.device) -> list[str]:
    """Entries that a device of this kind may have."""
    return ["flash", "flex", "torch"] if device.type == "cuda" else ["cpu", "flex", "torch"]


def _decode(page: int) -> Piece:
    """One token behind a context of a few, in a page of its own."""
    table = PageTable([page], PAGE_SIZE)
    table.num_tokens = 1 + page % (PAGE_SIZE - 1)
    return Piece(table, [7 + page], num_logits=1)


def _unserved(name: str, kv_cache: PagedKVCache, page_size: int) -> str | None:
    try:
        named_entry(name, kv_cache, page_size)
    except ValueError as error:
        return str(error)
    return None


def _attention_error(name: str, problem: PagedProblem) -> float:
    kv_cache = problem.memory()
    entry = named_entry(name, kv_cache, problem.page_size)
    return relative_error(problem.by_entry(entry, kv_cache), problem.by_reference())


def _fixed_plan_error(name: str, problem: PagedProblem) -> float:
    """0 where the entry has none."""
    kv_cache = problem.memory()
    entry = named_entry(name, kv_cache, problem.page_size)
    if as_capturable(entry) is None:
        return 0.0
    return relative_error(problem.by_fixed_plan(entry, kv_cache), problem.by_reference())


@torch.inference_mode()
def _is_near_tie(model: Any, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the first two tokens that differ have nearly the same logit."""
    place = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    if place is None:
        return False
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    ids = torch.tensor([[*prompt, *expected[:place]]], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1]
    return bool((logits[found[place]] - logits[expected[place]]).abs() < NEAR_TIE)


def _median_ms(time_one: Callable[[], float], repeats: int) -> float:
    return 1000.0 * median([time_one() for _ in range(repeats + WARMUP_STEPS)][WARMUP_STEPS:])


def _curve(ms: Mapping[int, float]) -> str:
    return "ms by tokens: " + ", ".join(f"{tokens}: {value:.2f}" for tokens, value in ms.items())
