"""EAGLE-3 and MTP go through the same loop, cache, anchors and figures as the parallel drafters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import build_config
from dspark.data.target_cache import TargetCache
from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.mtp_weights import target_mtp_drafter
from dspark.errors import MissingInput
from dspark.training.batches import MicroBatch, make_micro_batch
from dspark.training.config import TrainConfig
from dspark.training.losses import LossWeights, slot_losses
from dspark.training.objective import StepTotals, micro_batch_loss, step_totals, weight_sums
from dspark.training.precision import Autocast
from dspark.training.trainer import prepare
from random_autoregressive import AUTOREGRESSIVE_VARIANTS, random_autoregressive_drafter
from random_drafter import random_sample, target_to_draft
from tiny_cache import LAYER_IDS, make_tiny_cache
from tiny_mtp_target import write_mtp_target
from tiny_target import tiny_tokenizer

SOFT = LossWeights(ce=1.0, tv=0.5, confidence=0.0, soft_labels=True)
HARD = LossWeights(ce=1.0, tv=0.5, confidence=0.0)

every_variant = pytest.mark.parametrize("shape", AUTOREGRESSIVE_VARIANTS.values(), ids=AUTOREGRESSIVE_VARIANTS)


def micro_of(drafter: AutoregressiveDrafter, lengths: list[int]) -> MicroBatch:
    micro = make_micro_batch(
        [(random_sample(drafter.config, f"s{length}", length), 0) for length in lengths],
        num_anchors=5,
        block_size=drafter.block_size,
        position_decay=4.4814,
        target_to_draft=target_to_draft(drafter),
        seed=7,
        device=torch.device("cpu"),
    )
    assert micro is not None
    return micro


@every_variant
@pytest.mark.parametrize("factors", [SOFT, HARD], ids=["soft labels", "hard labels"])
def test_the_loss_and_its_gradients_are_those_of_the_slow_twin(shape: dict[str, Any], factors: LossWeights):
    drafter = random_autoregressive_drafter(**shape)
    micro = micro_of(drafter, [14, 20, 17])
    weights = weight_sums(micro)
    loss, losses = micro_batch_loss(Autocast(drafter, enabled=False), drafter, micro, weights, factors)
    loss.backward()
    found = gradients(drafter)

    output = drafter(micro.blocks, micro.slots)
    target_logits = (micro.last_hidden.float() @ drafter.backbone.head_weight().T)[micro.target_rows]
    log_z = micro.log_z[micro.target_rows]
    twin = slot_losses(output.logits, target_logits, log_z, micro.labels, None, soft_labels=factors.soft_labels)
    ce = (twin.ce * micro.ce_weights).sum() / weights[1]
    expected = factors.ce * ce + factors.tv * (twin.tv * micro.weights).sum() / weights[0]
    drafter.zero_grad()
    expected.float().backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    figures = step_totals(losses, micro, drafter.block_size).metrics(factors)
    assert {"loss", "expected_accepted_length", "acceptance_1", "acceptance_4"} <= figures.keys()
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)


def gradients(drafter: AutoregressiveDrafter) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@every_variant
def test_the_grouping_of_samples_changes_neither_gradient_nor_figures(shape: dict[str, Any]):
    drafter = random_autoregressive_drafter(**shape)
    lengths = [12, 14, 19, 16]
    results = []
    for size in (4, 1):
        drafter.zero_grad()
        micros = [micro_of(drafter, lengths[start : start + size]) for start in range(0, 4, size)]
        weights = torch.stack([weight_sums(micro) for micro in micros]).sum(0)
        totals = StepTotals.zeros(drafter.block_size)
        for micro in micros:
            loss, losses = micro_batch_loss(Autocast(drafter, enabled=False), drafter, micro, weights, SOFT)
            loss.backward()
            totals = totals + step_totals(losses, micro, drafter.block_size)
        results.append((gradients(drafter), totals.metrics(SOFT)))
    assert results[1][1] == pytest.approx(results[0][1], abs=1e-5)
    for name, gradient in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], gradient, atol=1e-5, rtol=0)


def test_the_first_answer_token_is_read_and_the_second_is_the_first_that_is_taught():
    """B05 for rows: the row whose input token is the first answer token is supervised."""
    drafter = random_autoregressive_drafter()
    micro = micro_of(drafter, [10])  # four prompt tokens
    assert int(micro.blocks.anchors[0]) == 4
    assert int(micro.labels[0]) == int(micro.blocks.previous_ids[0, 1])


@every_variant
@pytest.mark.parametrize("is_bf16", [False, True])
def test_losses_fall(shape: dict[str, Any], is_bf16: bool):
    drafter = random_autoregressive_drafter(**shape).train()
    micro = micro_of(drafter, [14, 20, 17])
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss, _ = micro_batch_loss(Autocast(drafter, enabled=is_bf16), drafter, micro, weight_sums(micro), HARD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    folder = tmp_path_factory.mktemp("cache")
    return make_tiny_cache(folder, tiny_target, train=4, heldout=1, final_states=("before_norm", "after_norm"))


def config_for(cache: TargetCache, output: Path, **drafter: Any) -> TrainConfig:
    shape = {"block_size": 3, "draft_vocab_size": 40, "warm_start": True} | drafter
    content = {
        "cache": str(cache.folder),
        "output": str(output),
        "drafter": shape,
        "steps": 4,
        "position_decay": 4.4814,
    }
    return build_config(TrainConfig, content)


@pytest.mark.parametrize(
    ("drafter", "layer_ids"),
    [
        ({"architecture": "eagle3"}, LAYER_IDS),
        ({"architecture": "mtp"}, (5,)),
        ({"architecture": "mtp", "hidden_state": "before_norm", "num_modules": 3}, (4,)),
        ({"architecture": "dflash", "mask_token": "system", "num_layers": 1}, LAYER_IDS),
    ],
)
def test_each_drafter_starts_on_the_states_it_reads(
    cache: TargetCache, tmp_path: Path, drafter: dict[str, Any], layer_ids: tuple[int, ...]
):
    initial = load_drafter(prepare(config_for(cache, tmp_path, **drafter), cache, fresh=False))
    assert initial.target_layer_ids == layer_ids
    assert initial.block_size == 3
    sample = TargetCache(cache.folder, layer_ids=layer_ids).load(0)
    assert sample.hidden.shape[1] == initial.config.feature_size
    if drafter["architecture"] == "eagle3":
        assert initial.config.step_loss_decay == 0.8


def test_mtp_needs_the_state_at_the_final_norm_at_every_token(tiny_target: Path, tmp_path: Path):
    cache = make_tiny_cache(tmp_path / "cache", tiny_target, train=2, heldout=0)
    with pytest.raises(
        MissingInput, match=r"state after the final norm at every token.*set final_states=\[after_norm\]"
    ):
        prepare(config_for(cache, tmp_path / "run", architecture="mtp"), cache, fresh=False)


def test_training_starts_from_the_modules_that_the_target_brings(tmp_path: Path):
    target = write_mtp_target(tmp_path / "target", "glm, two modules", vocab_size=320)
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    cache = make_tiny_cache(
        tmp_path / "cache", tmp_path / "target", train=2, heldout=0, final_states=("before_norm", "after_norm")
    )
    shape = {"architecture": "mtp", "from_target": True, "warm_start": False, "draft_vocab_size": None, "block_size": 2}
    initial = load_drafter(prepare(config_for(cache, tmp_path / "run", **shape), cache, fresh=False))
    own = target_mtp_drafter(target, valid_vocab_size=320)
    assert initial.config == own.config
    assert initial.target_layer_ids == (5,)
    expected = own.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in initial.state_dict().items())


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"architecture": "eagle3", "markov_rank": 8}, "markov_rank has no meaning for architecture eagle3"),
        ({"architecture": "mtp", "num_layers": 2}, "num_layers has no meaning for architecture mtp"),
        ({"architecture": "dspark", "num_modules": 2}, "num_modules has no meaning for architecture dspark"),
        ({"architecture": "eagle3", "from_target": True}, "from_target is for architecture mtp, not eagle3"),
        ({"architecture": "dspark", "from_target": True}, "from_target is for architecture mtp, not dspark"),
        (
            {"architecture": "mtp", "from_target": True, "warm_start": False},
            "draft_vocab_size has no meaning for architecture mtp from the target",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(
    cache: TargetCache, tmp_path: Path, drafter: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        config_for(cache, tmp_path, **drafter)
