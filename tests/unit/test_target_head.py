"""The description of a target's head gives the target's own logits, for every family that it is made for."""

import math
from typing import Any

import pytest
import torch
import transformers

from dspark.target_head import TargetHead

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[dict[str, Any], TargetHead]] = {
    "llama": ({}, TargetHead(64, 60)),
    "gemma2": (
        {"head_dim": 8, "final_logit_softcapping": 0.5},
        TargetHead(64, 60, embedding_scale=math.sqrt(32), softcap=0.5),
    ),
    "gemma4_text": (
        GEMMA4 | {"final_logit_softcapping": 0.5},
        TargetHead(64, 60, embedding_scale=math.sqrt(32), softcap=0.5),
    ),
    "granite": (
        {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
        TargetHead(64, 60, embedding_scale=12.0, logit_scale=0.125),
    ),
    "cohere": ({"logit_scale": 0.0625}, TargetHead(64, 60, logit_scale=0.0625)),
    "phimoe": ({"lm_head_bias": True} | EXPERTS, TargetHead(64, 60, has_bias=True)),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, TargetHead]:
    """A random target with large weights, so that a soft-cap bends, and the description it should have."""
    options, expected = FAMILIES[request.param]
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **HEADS, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    output = model.get_output_embeddings()
    output.weight.mul_(10.0)
    if output.bias is not None:
        output.bias.normal_()
    return model, expected


def test_the_description_is_read_from_the_config(family: tuple[Any, TargetHead]):
    model, expected = family
    assert TargetHead.of(model.config, valid_vocab_size=60) == expected


def test_logits_and_embeddings_are_the_targets_own(family: tuple[Any, TargetHead]):
    model, head = family
    input_ids = torch.tensor([[3, 50, 7, 7, 21]])
    first_inputs: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _module, inputs: first_inputs.append(inputs[0]))
    own = model(input_ids).logits
    last_hidden = model.model(input_ids).last_hidden_state
    output = model.get_output_embeddings()
    products = torch.nn.functional.linear(last_hidden, output.weight, output.bias)
    torch.testing.assert_close(head.logits(products), own, atol=1e-5, rtol=1e-5)
    assert head.is_linear == torch.allclose(products, own, atol=1e-3)
    embedded = model.get_input_embeddings().weight[input_ids] * head.embedding_scale
    torch.testing.assert_close(first_inputs[0], embedded, atol=1e-5, rtol=1e-5)


def test_more_tokens_than_rows_are_as_many_as_there_are_rows():
    assert TargetHead.of(transformers.LlamaConfig(**SIZES), valid_vocab_size=70).valid_vocab_size == 64


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_slope_in_the_products_is_that_of_autograd(scale: float, softcap: float | None):
    head = TargetHead(9, 9, logit_scale=scale, softcap=softcap)
    products = (3.0 * torch.randn(5, 9, dtype=torch.float64)).requires_grad_()
    slope = torch.randn(5, 9, dtype=torch.float64)
    logits = head.logits(products)
    (expected,) = torch.autograd.grad(logits, products, slope)
    found = head.product_slope(slope.clone(), logits.detach().clone())
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
