"""The training loop of one Ray Train worker: step, validate, checkpoint, resume."""

import logging
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch import Tensor

from dspark.config import build_config
from dspark.data.sample_counts import SampleCounts
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.errors import TrainingDiverged
from dspark.numerics import use_fast_float32_products
from dspark.training.batches import MicroBatch, StepSample, deal, make_micro_batch, step_samples, step_seed
from dspark.training.config import TrainConfig
from dspark.training.expert_loads import ExpertLoads
from dspark.training.expert_parallel import spread_experts
from dspark.training.losses import LossWeights
from dspark.training.objective import StepTotals, micro_batch_loss, step_totals, weight_sums
from dspark.training.precision import Autocast
from dspark.training.progress import DATA_COUNTED, History
from dspark.training.samples import rank_samples, split_indices
from dspark.training.zero import load_engine, local_device, save_engine, start_engine, warmup_cosine

log = logging.getLogger("dspark.train")

FINAL = "final"


class TrainLoop:
    """One rank of a training run. All ranks make the same collective calls in the same order."""

    def __init__(self, config: TrainConfig, run: dict[str, Any]) -> None:
        context = ray.train.get_context()
        self.config, self.rank, self.world = config, context.get_world_rank(), context.get_world_size()
        self.device = local_device()
        torch.set_num_threads(config.threads_per_worker)
        use_fast_float32_products()
        self.drafter = load_drafter(run["initial"], device=str(self.device), trainable=True)
        self.cache = rank_samples(config, run.get("samples"), rank=self.rank, layer_ids=self.drafter.target_layer_ids)
        self.train_indices = split_indices(config, self.cache, "train")
        self.validation_indices = split_indices(config, self.cache, "heldout")[: config.validation_samples]
        shape = self.drafter.config
        self.target_to_draft = torch.full((shape.vocab_size,), -1, dtype=torch.long)
        self.target_to_draft[self.drafter.backbone.d2t.cpu()] = torch.arange(shape.draft_vocab_size)
        self.experts = ExpertLoads(self.drafter)
        self.parallel = spread_experts(self.drafter, config)
        micro_batches = len(deal([1] * config.sequences_per_step, config.sequences_per_micro_batch, self.world)[0])
        self.model = Autocast(self.drafter, enabled=config.precision == "bfloat16")
        self.engine = start_engine(
            self.model,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            zero_stage=config.zero_stage,
            micro_batches=micro_batches,
            per_micro_batch=config.sequences_per_micro_batch,
            schedule=warmup_cosine(config.steps, config.warmup_ratio),
        )
        if self.parallel is not None:
            self.parallel.start_optimizer(self.engine, config)
        self._stand_in: MicroBatch | None = None
        self.step, self.skipped, self.skipped_now = 0, 0, 0
        self.announced, self.data_metrics = 0, dict[str, float]()
        self._resume()
        self.history = History(run, start_step=self.step) if self.rank == 0 else None

    def run(self) -> dict[str, Any]:
        """Train to the last step; rank 0 writes the drafter. Returns the closing figures."""
        config = self.config
        if self.step == 0:
            self._validate()
        while self.step < config.steps:
            factors = config.loss_weights(self.step)
            totals = self._train_step(factors)
            self.step += 1
            metrics = totals.metrics(factors) | self.data_metrics | self.experts.balance(self._sum_over_ranks)
            metrics |= {
                "learning_rate": self.engine.get_lr()[0],
                "grad_norm": float(self.engine.get_global_grad_norm() or 0.0),
            }
            self._watch(totals)
            if self.step % config.validate_every == 0 or self.step == config.steps:
                self._validate()
            if self.history is not None:
                self.history.add_step(
                    self.step,
                    config.steps,
                    metrics,
                    log_line=self.step % config.log_every == 0,
                    expert_loads=self.experts.last,
                )
            if self.step % config.checkpoint_every == 0 or self.step == config.steps:
                self._checkpoint()
        return {"steps": self.step, "skipped_micro_batches": self.skipped} | self._figures()

    def _figures(self) -> dict[str, Any]:
        """What rank 0 counted over the whole run, restarts included."""
        if self.history is None:
            return {}
        totals, seconds = self.history.totals, max(self.history.seconds, 1e-9)
        return {
            "validation": self.history.validation,
            "seconds": round(seconds, 1),
            "steps_per_s": round(self.step / seconds, 3),
            "tokens_per_s": round(totals["tokens"] / seconds, 1),
            "anchors": int(totals["blocks"]),
            "supervised_slots": int(totals["supervised_slots"]),
        } | {name: round(totals[name], 2) for name in DATA_COUNTED}

    def _train_step(self, factors: LossWeights) -> StepTotals:
        config, started = self.config, time.monotonic()
        torch.manual_seed(step_seed(config.seed, self.step, self.rank))  # dropout after a resume is as without one
        self._announce()
        micro_batches = self._micro_batches(self._samples_of(self.step), config.seed)
        weights = self._sum_over_ranks(sum((weight_sums(micro) for micro in micro_batches), torch.zeros(2).double()))
        num_blocks = torch.tensor(float(sum(micro.num_blocks for micro in micro_batches if micro is not None)))
        routed = float(self._sum_over_ranks(num_blocks)) * self.drafter.block_size
        # DeepSpeed averages over ranks and over accumulation; the loss is already normalised over the whole step.
        scale = self.world * len(micro_batches)
        totals, skipped = StepTotals.zeros(self.drafter.block_size), 0
        for micro in micro_batches:
            loss, micro_totals = self._forward(micro, weights, factors)
            balancing = self.experts.balancing_loss(routed)
            if loss is None:
                skipped += micro is not None
                loss = self._zero_loss()
            else:
                loss, totals = loss + balancing, totals + micro_totals
            self.engine.backward(loss * scale)
            (self.parallel or self.engine).step()
        parts = [totals.values, torch.tensor([float(skipped)], dtype=torch.float64), self.cache.take_counts().values]
        summed, skipped_sum, counts = self._sum_over_ranks(torch.cat(parts)).split([part.numel() for part in parts])
        self.skipped_now = int(skipped_sum)
        self.skipped += self.skipped_now
        self.data_metrics = SampleCounts.metrics(counts, num_ranks=self.world, step_s=time.monotonic() - started)
        return StepTotals(summed, totals.block_size)

    def _forward(
        self, micro: MicroBatch | None, weights: Tensor, factors: LossWeights
    ) -> tuple[Tensor | None, StepTotals]:
        """The loss of a micro-batch and its figures; None when there is nothing in it or it is not finite."""
        empty = StepTotals.zeros(self.drafter.block_size)
        given = self._or_stand_in(micro)
        if given is None:
            return None, empty
        with self.experts.uncounted(micro is None):
            loss, losses = micro_batch_loss(self.engine, self.drafter, given, weights, factors)
        is_finite = bool(loss.isfinite())
        if self.parallel is not None:
            is_finite = self.parallel.agree(is_finite)
        if not is_finite:
            log.warning("step %d: non-finite loss, micro-batch skipped", self.step)
            return None, empty
        if micro is None:
            return loss * 0.0, empty
        return loss, step_totals(losses, micro, self.drafter.block_size)

    def _or_stand_in(self, micro: MicroBatch | None) -> MicroBatch | None:
        """Where experts are spread over ranks, some sample for a rank without one: the others wait for its part."""
        if micro is not None or self.parallel is None:
            return micro
        if self._stand_in is None:
            tried = (self._micro_batch([StepSample(index, 0)], self.config.seed) for index in self.train_indices)
            self._stand_in = next((found for found in tried if found is not None), None)
        return self._stand_in

    def _zero_loss(self) -> Tensor:
        """Zero gradients for every trainable weight: keeps the ranks' collectives in step."""
        return sum((p.sum() * 0.0 for p in self.drafter.parameters() if p.requires_grad), torch.zeros(()))

    def _samples_of(self, step: int) -> list[StepSample]:
        return step_samples(self.train_indices, step, self.config.sequences_per_step, self.config.seed)

    def _announce(self) -> None:
        """Tell the source what this step and those it works ahead for will load."""
        stop = min(self.step + 1 + self.cache.steps_ahead, self.config.steps)
        for step in range(max(self.announced, self.step), stop):
            self._expect(self._samples_of(step))
        self.announced = stop

    def _expect(self, samples: list[StepSample]) -> None:
        self.cache.expect([[samples[place].index for place in places] for places in self._dealt(samples)])

    def _dealt(self, samples: list[StepSample]) -> list[list[int]]:
        """This rank's micro-batches, as places in `samples`."""
        lengths = [self.cache.entries[sample.index].num_tokens for sample in samples]
        return deal(lengths, self.config.sequences_per_micro_batch, self.world)[self.rank]

    def _micro_batches(self, samples: list[StepSample], seed: int) -> list[MicroBatch | None]:
        return [self._micro_batch([samples[place] for place in places], seed) for places in self._dealt(samples)]

    def _micro_batch(self, samples: list[StepSample], seed: int) -> MicroBatch | None:
        config = self.config
        return make_micro_batch(
            [(self.cache.load(sample.index), sample.epoch) for sample in samples],
            num_anchors=config.anchors_per_sequence,
            block_size=self.drafter.block_size,
            position_decay=config.position_decay,
            target_to_draft=self.target_to_draft,
            seed=seed,
            device=self.device,
            sliding_window=self.drafter.config.widest_window,
        )

    def _watch(self, totals: StepTotals) -> None:
        """Raises: TrainingDiverged when there is nothing to learn from, or too much that is not finite."""
        if self.skipped > self.config.max_skipped:
            raise TrainingDiverged(
                f"{self.skipped} micro-batches had a non-finite loss (max_skipped {self.config.max_skipped}); "
                "lower learning_rate or check the cache with jobs/cache.py"
            )
        if float(totals.values[0]) == 0.0 and self.skipped_now == 0:
            raise TrainingDiverged(
                f"step {self.step}: no supervised token in {self.config.sequences_per_step} sequences; "
                "the answers carry no loss, check jobs/generate.py's output"
            )

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        """Expected accepted length and acceptance on held-out samples, every sample once over all ranks."""
        if not self.validation_indices:
            return {}
        self.model.eval()
        totals = StepTotals.zeros(self.drafter.block_size)
        factors = self.config.loss_weights(self.step)
        samples = [StepSample(index, 0) for index in self.validation_indices]
        self._expect(samples)
        for micro in self._micro_batches(samples, self.config.seed + 1):
            given = self._or_stand_in(micro)
            if given is None:
                continue
            _, losses = micro_batch_loss(self.model, self.drafter, given, torch.ones(2), factors)
            if micro is not None:
                totals = totals + step_totals(losses, micro, self.drafter.block_size)
        self.model.train()
        self.cache.take_counts()  # of held-out samples; a step's own figures are without them
        metrics = StepTotals(self._sum_over_ranks(totals.values), totals.block_size).metrics(factors)
        if self.history is not None:
            self.history.add_validation(self.step, metrics)
        return metrics

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.world > 1:
            on_device = values.to(self.device)
            dist.all_reduce(on_device)
            return on_device.cpu()
        return values

    def _checkpoint(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = {"step": self.step, "skipped": self.skipped, "experts": self.experts.state()}
            save_engine(self.engine, folder, state)
            if self.parallel is not None:
                self.parallel.save(folder)
            if self.step == self.config.steps:
                self._export(Path(folder) / FINAL)
            if self.history is not None:
                self.history.flush()
            ray.train.report(
                {"step": self.step},
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                checkpoint_dir_name=f"step-{self.step:06d}",
            )

    def _export(self, folder: Path) -> None:
        """Rank 0 writes the drafter, whole: experts that lie on other ranks are gathered."""
        with nullcontext() if self.parallel is None else self.parallel.gathered():
            if self.rank == 0:
                save_drafter(self.drafter, folder, dtype=torch.bfloat16)

    def _resume(self) -> None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as folder:
            state = load_engine(self.engine, folder)
            if self.parallel is not None:
                self.parallel.load(folder)
        self.step, self.skipped = state["step"], state["skipped"]
        self.experts.load_state(state.get("experts", []))
        log.info("resumed at step %d from %s", self.step, checkpoint.path)


def train_worker(payload: dict[str, Any]) -> dict[str, Any]:
    """What Ray Train runs on every worker. payload: {"config": …, "run": …}, plain values."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    loop = TrainLoop(build_config(TrainConfig, payload["config"]), payload["run"])
    try:
        return loop.run()
    finally:
        if loop.history is not None:
            loop.history.close()
