"""DeepSpec's EAGLE-3 numbers, computed by its public code: logits, loss, gradients and drafts have to be these."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.base import BlockBatch
from dspark.drafters.checkpoint import from_deepspec, load_drafter, save_drafter
from dspark.drafters.eagle3 import Eagle3Config
from dspark.training.batches import MicroBatch
from dspark.training.losses import LossWeights
from dspark.training.objective import micro_batch_loss
from dspark.training.precision import Autocast
from random_autoregressive import autoregressive_config, random_autoregressive_drafter
from random_drafter import packed

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "deepspec" / "eagle3"
LOGIT_TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
SOFT = LossWeights(ce=1.0, tv=0.0, confidence=0.0, soft_labels=True)


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    return load_file(str(FOLDER / "case.safetensors"))


@pytest.fixture
def drafter() -> AutoregressiveDrafter:
    drafter = load_drafter(FOLDER, trainable=True)
    assert isinstance(drafter, AutoregressiveDrafter)
    return drafter


def all_rows(arrays: dict[str, Tensor]) -> BlockBatch:
    """Row i is that of the anchor at i + 1."""
    length = arrays["input_ids"].shape[1]
    anchors = torch.arange(1, length + 1)[None]
    mask = torch.ones_like(anchors, dtype=torch.bool)
    return BlockBatch(arrays["input_ids"], arrays["target_hidden_states"], anchors, mask)


def test_the_logits_of_every_unrolled_step(arrays: dict[str, Tensor], drafter: AutoregressiveDrafter):
    logits = drafter.backbone.base_logits(drafter.block_states(all_rows(arrays)))
    for step in range(drafter.block_size):
        torch.testing.assert_close(logits[:, :, step], arrays[f"draft_logits.step{step}"], **LOGIT_TOLERANCE)


def loss_of(arrays: dict[str, Tensor], drafter: AutoregressiveDrafter) -> Tensor:
    """Sum over steps of 0.8^s times the soft cross-entropy, gated by the fixture's own mask, divided by L."""
    length, steps = arrays["input_ids"].shape[1], drafter.block_size
    gate = arrays["loss_mask"][0].bool()
    gate[length - 1] = False
    ahead = torch.arange(length)[:, None] + torch.arange(steps)  # row i in step s predicts what follows i + 1 + s
    slots = gate[ahead.clamp_max(length - 1)] & (ahead < length)
    positions = (ahead + 1)[slots]
    last_hidden = arrays["target_last_hidden_states"][0, positions]
    weights = (drafter.config.step_loss_decay ** torch.arange(steps)).expand(length, steps)[slots]
    micro = MicroBatch(
        blocks=packed(all_rows(arrays), drafter.config),
        slots=slots,
        weights=weights,
        ce_weights=weights,
        labels=torch.zeros(positions.numel(), dtype=torch.long),  # soft labels: the token that came does not matter
        last_hidden=last_hidden,
        log_z=torch.logsumexp(last_hidden @ drafter.backbone.head_weight().T, dim=-1),
        target_rows=torch.arange(positions.numel()),
        num_tokens=length,
    )
    model = Autocast(drafter, enabled=False)
    return micro_batch_loss(model, drafter, micro, torch.full((2,), float(length)), SOFT)[0]


def test_the_loss(arrays: dict[str, Tensor], drafter: AutoregressiveDrafter):
    expected = json.loads((FOLDER / "case.json").read_text())["loss"]
    assert float(loss_of(arrays, drafter).detach()) == pytest.approx(expected, abs=1e-5)


def test_the_gradient_of_every_parameter(arrays: dict[str, Tensor], drafter: AutoregressiveDrafter):
    loss_of(arrays, drafter).backward()
    named = {name.removeprefix("backbone."): p for name, p in drafter.named_parameters() if p.requires_grad}
    expected = {name.removeprefix("grad."): value for name, value in arrays.items() if name.startswith("grad.")}
    assert named.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            named[name].grad, gradient, **LOGIT_TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_the_greedy_chain_and_the_logits_behind_it(arrays: dict[str, Tensor], drafter: AutoregressiveDrafter):
    length = int(arrays["chain.prompt_length"])
    state, ids = drafter.new_state(), arrays["input_ids"][0, : length + 1].tolist()
    drafter.extend_ids(state, ids)
    drafter.extend_context(state, arrays["target_hidden_states"][0, :length])
    drafted = drafter.propose(state, ids[-1], max_tokens=4, temperature=0.0).token_ids
    assert drafted.tolist() == arrays["chain.tokens"].tolist()
    input_ids = torch.tensor([ids + drafted.tolist()])
    hidden = torch.zeros(1, input_ids.shape[1], drafter.config.feature_size)
    hidden[0, :length] = arrays["target_hidden_states"][0, :length]
    batch = BlockBatch(input_ids, hidden, torch.tensor([[length]]), torch.ones(1, 1, dtype=torch.bool))
    logits = drafter(batch, torch.ones(1, 1, 4, dtype=torch.bool)).logits
    torch.testing.assert_close(logits, arrays["chain.logits"], **LOGIT_TOLERANCE)


def test_a_checkpoint_of_deepspec_comes_back_bit_for_bit(drafter: AutoregressiveDrafter, tmp_path: Path):
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    theirs, ours = (load_file(str(folder / "model.safetensors")) for folder in (FOLDER, tmp_path))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    written, given = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDER))
    assert {name: written[name] for name in written.keys() & given.keys()} == {
        name: given[name] for name in written.keys() & given.keys()
    }
    assert load_drafter(tmp_path).config == drafter.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttt_length": None}, "has no ttt_length; take it from the checkpoint it belongs to"),
        ({"draft_num_hidden_layers": 2}, "has draft_num_hidden_layers 2; EAGLE-3 drafters have 1"),
        ({"attention_bias": True}, "has attention_bias True; EAGLE-3 drafters have False"),
        ({"rope_parameters": None}, "the rotary base is unknown"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change: dict[str, Any], message: str):
    content = json.loads((FOLDER / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        from_deepspec(content)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        autoregressive_config(num_key_value_heads=3)
    with pytest.raises(ValueError, match="draft_vocab_size 62 <= valid_vocab_size 61"):
        autoregressive_config(draft_vocab_size=62)


def test_a_reduced_vocabulary_survives_the_checkpoint(tmp_path: Path):
    drafter = random_autoregressive_drafter(draft_vocab_size=30)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded.config, Eagle3Config)
    assert torch.equal(loaded.backbone.d2t, drafter.backbone.d2t)
    assert loaded.config == drafter.config
