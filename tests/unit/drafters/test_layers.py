"""Parts of a draft layer against Transformers and against a slow, obvious attention."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from dense_attention import dense_attention, seen_context
from dspark.drafters.layers import DraftAttention, DraftLayer, RMSNorm, RotaryEmbedding, SwiGLU, rotate
from random_drafter import small_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("window", [None, 5])
def test_attention_equals_a_dense_mask_over_all_context_and_all_blocks(window: int | None):
    torch.manual_seed(0)
    config = small_config(block_size=3)
    attention, rotary = DraftAttention(config), RotaryEmbedding(config)
    length = 12
    context = torch.randn(length, config.hidden_size)
    anchors = torch.tensor([1, 4, 5, 11])
    u = torch.randn(4, 3, config.hidden_size)
    slots = anchors[:, None] + torch.arange(3)
    seen = seen_context(slots, length, window)
    context_kv = attention.keys_values(context[None], *rotary(torch.arange(length)))
    fast = attention(u[None], context_kv, *rotary(slots[None]), seen[None])[0]
    torch.testing.assert_close(fast, dense_attention(attention, u, context, slots, seen, rotary), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rope", [DEFAULT, LLAMA3, LINEAR, YARN], ids=lambda rope: rope["rope_type"])
def test_rotary_angles_are_those_of_transformers(rope: dict):
    config = small_config(rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
        )
    )
    positions = torch.arange(100)
    cos, sin = theirs(torch.zeros(1, 1), positions[None])
    ours = RotaryEmbedding(config)(positions)
    torch.testing.assert_close(ours[0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours[1], sin[0], atol=1e-6, rtol=0)


def test_rotate_turns_as_transformers_does():
    config = small_config()
    cos, sin = RotaryEmbedding(config)(torch.arange(7))
    x = torch.randn(1, 2, 7, config.head_dim)
    expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None])
    torch.testing.assert_close(rotate(x, cos, sin), expected)


def test_a_cast_to_bf16_does_not_round_the_rotary_frequencies():
    config = small_config()
    plain, cast = RotaryEmbedding(config), RotaryEmbedding(config).to(torch.bfloat16)
    positions = torch.arange(100)
    assert torch.equal(plain(positions)[0], cast(positions)[0])
    assert cast(positions)[0].dtype == torch.float32


def test_an_unknown_rope_type_is_an_error():
    with pytest.raises(ValueError, match="rope_type 'spiral' is not supported; supported: default, linear"):
        RotaryEmbedding(small_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}))


def test_a_missing_rope_theta_is_an_error():
    with pytest.raises(ValueError, match="has no rope_theta"):
        RotaryEmbedding(small_config(rope_parameters={"rope_type": "default"}))


def test_a_partial_rotary_target_is_an_error():
    rope = DEFAULT | {"partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        RotaryEmbedding(small_config(rope_parameters=rope))


def test_rms_norm_is_that_of_transformers():
    ours, theirs = RMSNorm(16, 1e-5), LlamaRMSNorm(16, 1e-5)
    weight = torch.randn(16)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    assert torch.equal(ours(x.bfloat16()), theirs.to(torch.bfloat16)(x.bfloat16()))


def test_a_layer_adds_to_its_input_twice():
    config = small_config()
    layer, rotary = DraftLayer(config, SwiGLU(config)), RotaryEmbedding(config)
    h = torch.randn(1, 2, 4, 16)
    context_kv = layer.self_attn.keys_values(torch.randn(1, 5, 16), *rotary(torch.arange(5)))
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    slots = rotary(torch.arange(4).expand(1, 2, 4))
    assert torch.equal(layer(h, context_kv, *slots, torch.ones(1, 2, 4, 5, dtype=torch.bool)), h)
