"""Captured states are the ones that Transformers itself reports."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dspark.engine.hidden_states import HiddenStateCapture, check_layer_ids, decoder_of
from dspark.targets import TargetConfig, load_target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Any:
    return load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))


def captured(target: Any, layer_ids: tuple[int, ...], input_ids: torch.Tensor) -> torch.Tensor:
    with HiddenStateCapture(target, layer_ids) as capture:
        target(input_ids)
        return capture.hidden()


INPUT_IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))


def test_layer_i_is_hidden_state_i_plus_1_of_transformers(target: Any):
    theirs = target(INPUT_IDS, output_hidden_states=True).hidden_states
    ours = captured(target, (0, 1, 2), INPUT_IDS)
    assert torch.equal(ours, torch.cat([theirs[1], theirs[2], theirs[3]], dim=-1))


def test_an_id_that_is_off_by_one_would_be_noticed(target: Any):
    theirs = target(INPUT_IDS, output_hidden_states=True).hidden_states
    for layer in range(3):
        ours = captured(target, (layer,), INPUT_IDS)
        assert [bool(torch.allclose(ours, state)) for state in theirs].index(True) == layer + 1
        assert not torch.allclose(ours, theirs[layer])
        assert not torch.allclose(ours, theirs[layer + 2])


def test_minus_1_is_the_embeddings(target: Any):
    theirs = target(INPUT_IDS, output_hidden_states=True).hidden_states
    assert torch.equal(captured(target, (-1,), INPUT_IDS), theirs[0])


def test_the_two_ids_behind_the_layers_are_the_states_at_the_final_norm(target: Any):
    before, after = captured(target, (4, 5), INPUT_IDS).chunk(2, dim=-1)
    assert torch.equal(after, target(INPUT_IDS, output_hidden_states=True).hidden_states[-1])
    assert torch.equal(target.model.norm(before), after)
    assert not torch.allclose(before, after)


def test_states_are_joined_in_the_order_of_the_ids(target: Any):
    both = captured(target, (-1, 2), INPUT_IDS)
    parts = [captured(target, (layer,), INPUT_IDS) for layer in (-1, 2)]
    assert torch.equal(both, torch.cat(parts, dim=-1))


def test_the_latest_forward_pass_counts(target: Any):
    with HiddenStateCapture(target, (1,)) as capture:
        target(INPUT_IDS)
        target(INPUT_IDS[:1, :4])
        assert capture.hidden().shape == (1, 4, 64)


def num_hooks(target: Any) -> int:
    return sum(len(module._forward_hooks) for module in target.modules())  # Transformers has some of its own


def test_nothing_stays_hooked_after_the_block(target: Any):
    before = num_hooks(target)
    with HiddenStateCapture(target, (0, 1)):
        assert num_hooks(target) == before + 2
    assert num_hooks(target) == before


def test_hooks_are_removed_when_the_forward_pass_fails(target: Any):
    before = num_hooks(target)
    with pytest.raises(IndexError), HiddenStateCapture(target, (0, 1)):
        target(torch.tensor([[10**6]]))
    assert num_hooks(target) == before


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((0, 3), r"\[0, 3\]: layer 3 is not below the last layer of a target with 4 layers; use ids up to 2"),
        ((2, 1), r"strictly increasing and not empty, got \[2, 1\]"),
        ((1, 1), "strictly increasing"),
        ((), "not empty"),
        ((-2, 1), "ids start at -1, which means the embeddings"),
    ],
)
def test_layer_ids_that_the_target_cannot_give_are_refused(target: Any, layer_ids: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        check_layer_ids(layer_ids, 4)
    with pytest.raises(ValueError, match=message):
        HiddenStateCapture(target, layer_ids)


def test_a_model_without_decoder_layers_is_refused_by_name():
    config = transformers.CTRLConfig(vocab_size=50, n_embd=16, n_layer=2, n_head=2, dff=16)
    with pytest.raises(ValueError, match="CTRLLMHeadModel has no layers/h/blocks with a norm/"):
        decoder_of(transformers.CTRLLMHeadModel(config))
