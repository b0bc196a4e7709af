"""Hyper-connections: a plain residual network at the start, doubly stochastic mixing, float32 always."""

from typing import Any

import pytest
import torch

from dspark.drafters.layers import DraftLayer, SwiGLU
from dspark.drafters.mhc import Float32Module, HyperConnection, HyperHead, sinkhorn
from random_drafter import HYPER, random_batch, random_drafter, small_config

STREAMS = torch.randn(3, 5, 4, 16, generator=torch.Generator().manual_seed(0))


def random_connection(**changes: Any) -> HyperConnection:
    connection = HyperConnection(small_config(hyper_connections=HYPER | changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in connection.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return connection


@pytest.mark.parametrize("hc_mult", [2, 3, 4])
def test_a_drafter_starts_as_the_plain_residual_network(hc_mult: int):
    plain = random_drafter(num_hidden_layers=3).backbone
    wide = random_drafter(num_hidden_layers=3, hyper_connections={"hc_mult": hc_mult}).backbone
    fresh = small_config(num_hidden_layers=3, hyper_connections={"hc_mult": hc_mult})
    wide.load_state_dict(plain.state_dict(), strict=False)
    for layer in wide.layers:
        layer.attn_hc.load_state_dict(HyperConnection(fresh).state_dict())
        layer.ffn_hc.load_state_dict(HyperConnection(fresh).state_dict())
    wide.hc_head.load_state_dict(HyperHead(fresh).state_dict())
    batch = random_batch(plain.config, [[3, 8, 20]])
    torch.testing.assert_close(wide.block_states(batch), plain.block_states(batch), atol=2e-4, rtol=0)


def test_streams_part_from_the_first_step_on_and_every_map_learns():
    config = small_config(hyper_connections=HYPER, num_hidden_layers=1)
    layer = DraftLayer(config, SwiGLU(config))
    h = STREAMS[..., :1, :].expand(-1, -1, 4, -1)
    u, connect = layer.attn_hc(h)
    streams = connect(u * 0.5)
    assert not torch.allclose(streams[..., 0, :], streams[..., 3, :], atol=1e-2)
    _, connect = layer.ffn_hc(streams)
    (connect(u)[..., 0, :] * STREAMS[..., 0, :]).sum().backward()
    for name, parameter in layer.ffn_hc.named_parameters():
        if name != "scale":  # it has a gradient once fn is no longer zero
            assert bool((parameter.grad != 0).any()), name
    n = 4
    assert bool((layer.ffn_hc.base.grad[2 * n :] != 0).any())


def test_maps_and_update_are_those_of_the_definition():
    connection = random_connection()
    u, connect = connection(STREAMS)
    output = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))
    updated = connect(output)
    for row in range(3):
        for column in range(5):
            x = STREAMS[row, column]
            normed = x.flatten() / (x.square().mean() + 1e-6).sqrt()
            mixed = connection.fn @ normed
            pre = torch.sigmoid(connection.scale[0] * mixed[:4] + connection.base[:4])
            post = 2 * torch.sigmoid(connection.scale[1] * mixed[4:8] + connection.base[4:8])
            res = torch.exp(connection.scale[2] * mixed[8:] + connection.base[8:]).view(4, 4)
            for _ in range(20):
                res = res / res.sum(dim=1, keepdim=True)
                res = res / res.sum(dim=0, keepdim=True)
            read = sum(pre[i] * x[i] for i in range(4))
            torch.testing.assert_close(u[row, column], read, atol=1e-3, rtol=1e-4)
            for j in range(4):
                expected = sum(res[i, j] * x[i] for i in range(4)) + post[j] * output[row, column]
                torch.testing.assert_close(updated[row, column, j], expected, atol=1e-3, rtol=1e-4)


def test_sinkhorn_gives_doubly_stochastic_matrices_that_never_stretch():
    logits = 2.0 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(3))
    matrix = sinkhorn(logits, num_rounds=20, eps=1e-6)
    ones = torch.ones(50, 4)
    torch.testing.assert_close(matrix.sum(dim=-2), ones, atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.sum(dim=-1), ones, atol=2e-2, rtol=0)
    assert float(torch.linalg.matrix_norm(matrix, ord=2).max()) < 1.01
    better = sinkhorn(logits, num_rounds=200, eps=1e-9)
    torch.testing.assert_close(better.sum(dim=-1), ones, atol=1e-4, rtol=0)


def test_gradients_through_sinkhorn_are_those_of_differences():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, num_rounds=5, eps=1e-6), logits)


def test_bf16_streams_are_mixed_in_float32():
    connection = random_connection().to(torch.bfloat16)
    assert {p.dtype for p in connection.parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert {m.dtype for m in connection.maps(STREAMS.bfloat16())} == {torch.float32}
        u, connect = connection(STREAMS.bfloat16())
        assert u.dtype == connect(u).dtype == torch.bfloat16


def test_a_float32_module_keeps_its_values_to_the_last_bit_when_the_model_is_cast():
    drafter = random_drafter(hyper_connections=HYPER)
    before = {
        name: {key: value.clone() for key, value in module.state_dict().items()}
        for name, module in drafter.named_modules()
        if isinstance(module, Float32Module)
    }
    assert len(before) == 5
    drafter.to(torch.bfloat16)
    assert drafter.backbone.fc.weight.dtype == torch.bfloat16
    for name, state in before.items():
        for key, value in drafter.get_submodule(name).state_dict().items():
            assert torch.equal(value, state[key]), f"{name}.{key}"
