"""DeepSpec's numbers, computed by its public code: logits, losses, gradients and greedy drafts have to be these."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.drafters.anchors import BlockTargets, block_targets, slot_weights
from dspark.drafters.base import BlockBatch, BlockOutput
from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.training.batches import MicroBatch
from dspark.training.losses import LossWeights, SlotLosses, slot_losses
from dspark.training.objective import micro_batch_loss, step_totals, weight_sums
from dspark.training.precision import Autocast
from random_drafter import packed

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "deepspec"
LOGIT_TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
LOSS_TOLERANCE = 1e-5


@dataclass
class Case:
    """A drafter, its input, what it says, and what it ought to say."""

    arrays: dict[str, Tensor]
    figures: dict[str, Any]
    drafter: DSparkDrafter | DFlashDrafter
    batch: BlockBatch
    targets: BlockTargets
    output: BlockOutput

    @property
    def supervised(self) -> Tensor:
        return self.arrays["supervised"].bool()

    @property
    def factors(self) -> LossWeights:
        return LossWeights(**self.figures["weights"])

    def loss(self) -> tuple[Tensor, MicroBatch, SlotLosses]:
        """Through the path that training takes; log Z and states as the cache would hold them."""
        positions = self.targets.positions[self.targets.supervised]
        weights = slot_weights(self.targets.supervised, self.figures["position_decay"])[self.targets.supervised]
        micro = MicroBatch(
            blocks=packed(self.batch, self.drafter.config),
            slots=self.targets.supervised[0],
            weights=weights,
            ce_weights=weights,
            labels=self.targets.labels[self.targets.supervised],
            last_hidden=self.arrays["target_last_hidden_states"][0, positions],
            log_z=torch.logsumexp(self.arrays["target_logits"][self.supervised], dim=-1),
            target_rows=torch.arange(len(positions)),
            num_tokens=self.batch.input_ids.numel(),
        )
        model = Autocast(self.drafter, enabled=False)
        loss, losses = micro_batch_loss(model, self.drafter, micro, weight_sums(micro), self.factors)
        return loss, micro, losses


@pytest.fixture(params=["dspark_vanilla", "dspark_gated", "dspark_rnn", "gemma4_dspark_vanilla", "dflash"])
def case(request: pytest.FixtureRequest) -> Case:
    folder = FOLDER / request.param
    arrays = load_file(str(folder / "case.safetensors"))
    drafter = load_drafter(folder, trainable=True)
    anchors = arrays["anchor_positions"]
    batch = BlockBatch(
        arrays["input_ids"], arrays["target_hidden_states"], anchors, torch.ones_like(anchors, dtype=torch.bool)
    )
    targets = block_targets(batch.input_ids, arrays["loss_mask"], anchors, batch.anchor_mask, drafter.block_size)
    output = drafter(batch, targets.supervised)
    return Case(arrays, json.loads((folder / "case.json").read_text()), drafter, batch, targets, output)


def test_the_same_slots_are_supervised_with_the_same_labels(case: Case):
    assert torch.equal(case.targets.supervised, case.supervised)
    assert torch.equal(case.targets.labels[case.supervised], case.arrays["target_ids"][case.supervised])


def test_teacher_forced_logits(case: Case):
    torch.testing.assert_close(case.output.logits, case.arrays["draft_logits"][case.supervised], **LOGIT_TOLERANCE)


def test_the_target_logits_of_a_slot_are_the_head_on_the_state_at_its_position(case: Case):
    last_hidden = case.arrays["target_last_hidden_states"][0, case.targets.positions[case.supervised]]
    logits = case.drafter.backbone.base_logits(last_hidden)
    torch.testing.assert_close(logits, case.arrays["target_logits"][case.supervised], **LOGIT_TOLERANCE)


def test_confidence_logits(case: Case):
    expected = case.arrays.get("confidence_logits")
    if expected is None:
        assert case.output.confidence_logits is None
    else:
        torch.testing.assert_close(case.output.confidence_logits, expected[case.supervised], **LOGIT_TOLERANCE)


def test_the_loss_and_its_terms(case: Case):
    loss, micro, losses = case.loss()
    named = step_totals(losses, micro, case.drafter.block_size).metrics(case.factors)
    for name in ("loss", "ce", "tv", "confidence"):
        if case.figures[name] is not None:
            assert named[name] == pytest.approx(case.figures[name], abs=LOSS_TOLERANCE)
    assert float(loss.detach()) == pytest.approx(case.figures["loss"], abs=LOSS_TOLERANCE)


def test_the_terms_of_the_slow_twin(case: Case):
    target_logits = case.arrays["target_logits"][case.supervised]
    log_z = torch.logsumexp(target_logits, dim=-1)
    labels = case.targets.labels[case.supervised]
    losses = slot_losses(case.output.logits, target_logits, log_z, labels, case.output.confidence_logits)
    weights = slot_weights(case.supervised, case.figures["position_decay"])[case.supervised]
    for name in ("ce", "tv", "confidence"):
        if case.figures[name] is not None:
            mean = (getattr(losses, name) * weights).sum() / weights.sum()
            assert float(mean.detach()) == pytest.approx(case.figures[name], abs=LOSS_TOLERANCE)


def test_the_gradient_of_every_parameter(case: Case):
    case.loss()[0].backward()
    found = {
        name.removeprefix("backbone."): parameter.grad
        for name, parameter in case.drafter.named_parameters()
        if parameter.requires_grad
    }
    expected = {name.removeprefix("grad."): value for name, value in case.arrays.items() if name.startswith("grad.")}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, **LOGIT_TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def greedy_arrays(case: Case, name: str) -> Tensor:
    if name not in case.arrays:
        pytest.skip("the public code's greedy drafts of this case are not in the fixture")
    return case.arrays[name]


def greedy(case: Case, number: int) -> tuple[int, Any]:
    """The anchor's position and the greedy draft from it."""
    anchor = int(case.batch.anchors[0, number])
    state = case.drafter.new_state()
    case.drafter.extend_context(state, case.batch.target_hidden[0, :anchor])
    anchor_id = int(case.batch.input_ids[0, anchor])
    return anchor, case.drafter.propose(state, anchor_id, max_tokens=case.drafter.block_size, temperature=0.0)


def test_greedy_drafts_and_their_confidence(case: Case):
    for number, expected in enumerate(greedy_arrays(case, "greedy.tokens")):
        _, proposal = greedy(case, number)
        assert proposal.token_ids.tolist() == expected.tolist()
        if "greedy.confidence_logits" in case.arrays:
            torch.testing.assert_close(
                proposal.confidence_logits,
                case.arrays["greedy.confidence_logits"][number],
                **LOGIT_TOLERANCE,
                check_stride=False,
            )


def test_the_logits_behind_greedy_drafts(case: Case):
    for number, expected in enumerate(greedy_arrays(case, "greedy.logits")):
        anchor, proposal = greedy(case, number)
        input_ids = torch.zeros(1, anchor + 1 + case.drafter.block_size, dtype=torch.long)
        input_ids[0, : anchor + 1] = case.batch.input_ids[0, : anchor + 1]
        input_ids[0, anchor + 1 :] = proposal.token_ids
        hidden = torch.zeros(1, input_ids.shape[1], case.batch.target_hidden.shape[2])
        hidden[0, :anchor] = case.batch.target_hidden[0, :anchor]
        batch = BlockBatch(input_ids, hidden, torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool))
        slots = torch.ones(1, 1, case.drafter.block_size, dtype=torch.bool)
        torch.testing.assert_close(case.drafter(batch, slots).logits, expected, **LOGIT_TOLERANCE)
