"""Fast products on a CPU agree with the plain ones."""

import pytest
import torch
from torch import nn

from dspark.numerics import PackedLinear, argmax, pack_linears, use_fast_float32_products

needs_packing = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this processor has no bfloat16 kernels",
)


def test_fast_products_are_still_float32_products():
    before = torch.get_float32_matmul_precision()
    try:
        use_fast_float32_products()
        a, b = torch.randn(64, 300), torch.randn(300, 80)
        exact = a.double() @ b.double()
        assert float(((a @ b) - exact).abs().max()) < 1e-3
    finally:
        torch.set_float32_matmul_precision(before)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (1, 5), (3, 70), (200,), (0,)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias: bool, shape: tuple[int, ...]):
    torch.manual_seed(0)
    plain = nn.Linear(96, 130, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(*shape, 96).bfloat16()
    with torch.inference_mode():
        packed = PackedLinear(plain)(x)
    assert packed.dtype == torch.bfloat16
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    torch.testing.assert_close(packed.double(), exact, rtol=2**-8, atol=1e-3)  # one rounding to 8 bits


@needs_packing
def test_a_packed_layer_takes_what_it_was_not_packed_for():
    plain = nn.Linear(8, 70)
    layer = PackedLinear(plain.bfloat16())
    x = torch.randn(2, 8).bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.float()(torch.ones(8)), nn.functional.linear(torch.ones(8), layer.weight, layer.bias))


@needs_packing
def test_only_plain_bfloat16_layers_worth_it_are_packed():
    class Own(nn.Linear):
        """A layer that computes something of its own."""

    model = nn.Sequential(nn.Linear(8, 128), nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1), Own(8, 128)))
    names = list(model.state_dict())
    assert pack_linears(model) == 0  # float32
    assert pack_linears(model.bfloat16()) == 2
    assert pack_linears(model) == 0
    assert list(model.state_dict()) == names
    assert type(model[0]) is type(model[1][0]) is PackedLinear
    assert type(model[1][2]) is Own


@needs_packing
def test_a_row_of_a_product_gets_the_same_bits_alone_and_among_others():
    torch.manual_seed(0)
    layer = PackedLinear(nn.Linear(96, 130).bfloat16().requires_grad_(False))
    if not layer.is_in_panels:
        pytest.skip("the products of this processor's library do not promise it")
    x = torch.randn(61, 96).bfloat16()
    alone = torch.cat([layer(row[None]) for row in x])
    for num_rows in (2, 7, 13, 61):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 1000, 5000])
def test_argmax_takes_the_first_of_the_largest(dtype: torch.dtype, columns: int):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, columns, generator=generator).mul(4).round().to(dtype)  # many equals
    rows[1] = -torch.inf
    rows[2, columns // 2 :] = -torch.inf
    expected = [next(i for i, x in enumerate(row) if x == max(row)) for row in rows.tolist()]
    assert argmax(rows).tolist() == expected
    assert argmax(rows.expand(9, columns)[::2]).tolist() == expected[::2]
