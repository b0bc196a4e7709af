"""From answers to the target cache: which samples go where, and the worker that captures them.

Legend: B sequences of a batch, T padded tokens, m captured layers, d hidden size.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pydantic
import torch
import torch.nn.functional as F

from dspark.chat import training_sequences, truncate
from dspark.config import Config, build_config
from dspark.data.answers import AnswerSet
from dspark.data.cache_budget import SHARD_BYTES, AnswerSize, choose, entry_bytes, folder_bytes
from dspark.data.head_probe import describe_head
from dspark.data.target_cache import CachedSample, TargetCacheWriter, bytes_of
from dspark.drafters.base import FinalState, final_state_id
from dspark.engine.hidden_states import HiddenStateCapture, check_layer_ids, decoder_of
from dspark.numerics import use_fast_float32_products
from dspark.targets import TargetConfig, input_device, load_target, load_tokenizer, vocabulary_size
from dspark.tracking import TrackingConfig

LOG_Z_ROWS = 256  # a chunk of 256 rows over 150,000 tokens takes 150 MB


class CacheConfig(Config):
    """The cache stage.

    answers: folder made by jobs/generate.py. target_layer_ids: 0-based decoder layers to capture, -1 the embeddings;
    None spaces five evenly. final_states: the target's states at its final norm, captured besides for MTP drafters;
    where only they are wanted, target_layer_ids is []. min_loss_tokens: samples with fewer supervised tokens are left
    out and counted. max_cache_bytes: of the whole folder, temporary files included; whole answers are kept, in an order
    drawn by seed and id, as many as fit. shard_tokens, batch_tokens: tokens per file and per forward pass.
    gpus_per_worker: None gives each worker one where the cluster has any.
    """

    answers: str
    output: str
    target_layer_ids: tuple[int, ...] | None = None
    final_states: tuple[FinalState, ...] = ()
    dtype: str = "bfloat16"
    max_length: int = pydantic.Field(default=4096, gt=1)
    min_loss_tokens: int = pydantic.Field(default=14, ge=2)
    max_cache_bytes: int = pydantic.Field(default=50_000_000_000, gt=0)
    shard_tokens: int = pydantic.Field(default=16_384, gt=0)
    batch_tokens: int = pydantic.Field(default=4_096, gt=0)
    num_workers: int = pydantic.Field(default=2, gt=0)
    threads_per_worker: int = pydantic.Field(default=1, gt=0)
    gpus_per_worker: float | None = pydantic.Field(default=None, ge=0)
    seed: int = 0
    tracking: TrackingConfig = TrackingConfig()


class CaptureSettings(Protocol):
    """The fields of a stage's config that decide what is captured."""

    @property
    def target_layer_ids(self) -> tuple[int, ...] | None: ...
    @property
    def final_states(self) -> tuple[FinalState, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_length(self) -> int: ...
    @property
    def min_loss_tokens(self) -> int: ...


@dataclass(frozen=True)
class PlannedSample:
    """One sequence to capture; `id` is the answer's, with `#k` for its k-th sequence beyond the first."""

    id: str
    split: str
    domain: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class CachePlan:
    """samples in cache order; rows_in answers = rows kept + rejected by reason (counted in rows).

    num_usable: samples there would be without a byte budget. projected_bytes: of the states alone. disk_bytes: at most
    what the folder ever takes.
    """

    shards: list[list[PlannedSample]]
    rows_in: int
    rows_kept: int
    rejected: dict[str, int]
    num_tokens: int
    num_supervised: int
    projected_bytes: int
    num_usable: int
    disk_bytes: int


@dataclass(frozen=True)
class UsableAnswers:
    """rows: the samples of each answer that has any; rows_in answers = rows + rejected by reason."""

    rows: list[list[PlannedSample]]
    rows_in: int
    rejected: dict[str, int]


def default_layer_ids(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` ids evenly spaced from 1 to N-3, as DeepSpec's configs have them."""
    last = max(1, num_target_layers - 3)
    return tuple(sorted({round(1 + k * (last - 1) / (count - 1)) for k in range(count)}))


def usable_answers(answers: AnswerSet, *, max_length: int, min_loss_tokens: int) -> UsableAnswers:
    """Samples of the answers that can teach, in the answers' order; the same answers give the same samples."""
    rejected: Counter[str] = Counter()
    rows: list[list[PlannedSample]] = []
    rows_in = 0
    for row in answers.rows():
        rows_in += 1
        if row["status"] != "ok":
            rejected[f"answer {row['status']}"] += 1
            continue
        samples = [sample for sample in _samples(row, max_length) if sum(sample.loss_mask) >= min_loss_tokens]
        if samples:
            rows.append(samples)
        else:
            rejected[f"under {min_loss_tokens} supervised tokens"] += 1
    return UsableAnswers(rows, rows_in, dict(rejected))


def plan_cache(
    answers: AnswerSet,
    config: CacheConfig,
    *,
    hidden_size: int,
    num_layers: int,
    request: dict[str, Any] | None = None,
) -> CachePlan:
    """Sequences of all usable answers, cut to the byte budget and dealt into shards.

    The same answers and config give the same plan, so that a second run finds its finished shards again.
    request: what the cache will record as asked for; it counts for the budget.
    """
    usable = usable_answers(answers, max_length=config.max_length, min_loss_tokens=config.min_loss_tokens)
    sizes = [_size(row, hidden_size=hidden_size, num_layers=num_layers) for row in usable.rows]
    beside = folder_bytes(request or {})
    kept = choose(sizes, max_bytes=config.max_cache_bytes - beside, shard_tokens=config.shard_tokens, seed=config.seed)
    over = len(usable.rows) - len(kept)
    samples = [sample for place in kept for sample in usable.rows[place]]
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    num_supervised = sum(sum(sample.loss_mask) for sample in samples)
    shards = list(_deal(samples, config.shard_tokens))
    return CachePlan(
        shards=shards,
        rows_in=usable.rows_in,
        rows_kept=len(kept),
        rejected=usable.rejected | ({"over max_cache_bytes": over} if over else {}),
        num_tokens=num_tokens,
        num_supervised=num_supervised,
        projected_bytes=bytes_of(num_tokens, num_supervised, hidden_size=hidden_size, num_layers=num_layers),
        num_usable=sum(len(row) for row in usable.rows),
        disk_bytes=beside + SHARD_BYTES * len(shards) + sum(sizes[place].num_bytes for place in kept),
    )


class CaptureWorker:
    """Ray Data worker: a planned shard in (samples as JSON), a written shard and its counts out. Holds the target.

    Without a folder it only captures.
    """

    def __init__(
        self, target: dict[str, Any], layer_ids: tuple[int, ...], folder: str | None, batch_tokens: int, threads: int
    ):
        torch.set_num_threads(threads)
        config = build_config(TargetConfig, target)
        self._model = load_target(config)
        use_fast_float32_products()
        self._head = describe_head(self._model, vocabulary_size(load_tokenizer(config)))
        output = self._model.get_output_embeddings()
        self._weight = output.weight[: self._head.valid_vocab_size].float()
        self._bias = output.bias[: self._head.valid_vocab_size].float() if self._head.has_bias else None
        self._layer_ids = layer_ids
        self._batch_tokens = batch_tokens
        self._writer = None if folder is None else TargetCacheWriter(folder)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        assert self._writer is not None
        counts: dict[str, list[int]] = {name: [] for name in ("shard", "samples", "tokens", "non_finite")}
        for shard, samples in zip(batch["shard"], batch["samples"], strict=True):
            planned = [PlannedSample(**sample) for sample in json.loads(samples)]
            captured = {sample.id: sample for sample in self.capture(planned)}
            finite = [p for p in planned if is_finite(captured[p.id])]
            self._writer.write_shard(int(shard), ((captured[p.id], p.split, p.domain) for p in finite))
            counts["shard"].append(int(shard))
            counts["samples"].append(len(finite))
            counts["tokens"].append(sum(len(p.input_ids) for p in finite))
            counts["non_finite"].append(len(planned) - len(finite))
        return counts

    def capture(self, planned: list[PlannedSample]) -> Iterator[CachedSample]:
        """Hidden states of every sample, in batches of similar length; results carry their id, not their place."""
        by_length = sorted(planned, key=lambda sample: len(sample.input_ids))
        start = 0
        while start < len(by_length):
            stop = start + 1
            while stop < len(by_length) and (stop - start + 1) * len(by_length[stop].input_ids) <= self._batch_tokens:
                stop += 1
            yield from self._capture_batch(by_length[start:stop])
            start = stop

    @torch.no_grad()
    def _capture_batch(self, planned: list[PlannedSample]) -> Iterator[CachedSample]:
        # Padding is on the right and attention is causal: no real token ever sees a padding token.
        longest = max(len(sample.input_ids) for sample in planned)
        padded = [sample.input_ids + [0] * (longest - len(sample.input_ids)) for sample in planned]
        input_ids = torch.tensor(padded, device=input_device(self._model))
        with HiddenStateCapture(self._model, self._layer_ids) as capture:
            final = decoder_of(self._model)(input_ids=input_ids, use_cache=False).last_hidden_state
            hidden = capture.hidden()
        for row, sample in enumerate(planned):
            mask = torch.tensor(sample.loss_mask, dtype=torch.uint8)
            last = final[row, : len(sample.input_ids)][mask.bool().to(final.device)].to(self._weight.device)
            yield CachedSample(
                id=sample.id,
                input_ids=torch.tensor(sample.input_ids),
                loss_mask=mask,
                hidden=hidden[row, : len(sample.input_ids)].to("cpu", torch.bfloat16),
                last_hidden=last.to("cpu", torch.bfloat16),
                log_z=self._log_z(last.to(torch.bfloat16)).cpu(),
            )

    def _log_z(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Log-sum-exp of the target's logits over the real vocabulary, padding rows left out: [S] float32.

        After scale, bias and soft-cap, as the target itself has them.

        From the state as it is stored and with float32 products: logits rounded to bf16 put it off by up to 0.1, and
        the probabilities that training derives from it would not sum to one.
        """
        chunks = last_hidden.float().split(LOG_Z_ROWS)
        logits = (self._head.logits(F.linear(chunk, self._weight, self._bias)) for chunk in chunks)
        return torch.cat([torch.logsumexp(chunk, dim=-1) for chunk in logits])


def is_finite(sample: CachedSample) -> bool:
    """Whether all the target's states of a sample are numbers."""
    return all(bool(tensor.isfinite().all()) for tensor in (sample.hidden, sample.last_hidden, sample.log_z))


def resolve_layer_ids(config: CaptureSettings, num_target_layers: int) -> tuple[int, ...]:
    """The configured ids or the default ones. Raises: ValueError for ids the target cannot give."""
    layer_ids = default_layer_ids(num_target_layers) if config.target_layer_ids is None else config.target_layer_ids
    if max(layer_ids, default=0) >= num_target_layers:
        raise ValueError(
            f"target_layer_ids {list(layer_ids)}: a target with {num_target_layers} layers has no layer "
            f"{max(layer_ids)}; for its state at the final norm set final_states"
        )
    final = {final_state_id(name, num_target_layers) for name in config.final_states}
    layer_ids = (*layer_ids, *sorted(final))
    check_layer_ids(layer_ids, num_target_layers)
    return layer_ids


def _samples(row: dict[str, Any], max_length: int) -> Iterator[PlannedSample]:
    for number, sequence in enumerate(training_sequences(row["turns"])):
        sequence = truncate(sequence, max_length)
        name = row["id"] if number == 0 else f"{row['id']}#{number}"
        yield PlannedSample(name, row["split"], row["domain"], list(sequence.input_ids), list(sequence.loss_mask))


def _size(row: list[PlannedSample], *, hidden_size: int, num_layers: int) -> AnswerSize:
    tokens = sum(len(sample.input_ids) for sample in row)
    supervised = sum(sum(sample.loss_mask) for sample in row)
    entries = sum(entry_bytes(sample.id, sample.split, sample.domain) for sample in row)
    states = bytes_of(tokens, supervised, hidden_size=hidden_size, num_layers=num_layers)
    return AnswerSize(row[0].id, tokens, states + entries)


def _deal(samples: list[PlannedSample], shard_tokens: int) -> Iterator[list[PlannedSample]]:
    shard: list[PlannedSample] = []
    tokens = 0
    for sample in samples:
        if shard and tokens + len(sample.input_ids) > shard_tokens:
            yield shard
            shard, tokens = [], 0
        shard.append(sample)
        tokens += len(sample.input_ids)
    if shard:
        yield shard
