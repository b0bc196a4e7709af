"""Fast float32 products are still float32 products."""

import torch

from dspark.numerics import use_fast_float32_products


def test_fast_products_are_still_float32_products():
    before = torch.get_float32_matmul_precision()
    try:
        use_fast_float32_products()
        a, b = torch.randn(64, 300), torch.randn(300, 80)
        exact = a.double() @ b.double()
        assert float(((a @ b) - exact).abs().max()) < 1e-3
    finally:
        torch.set_float32_matmul_precision(before)
