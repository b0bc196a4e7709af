"""How float32 matrix products are computed on a CPU."""

import torch


def use_fast_float32_products() -> None:
    """Let float32 products on a CPU go through oneDNN where that loses nothing: about twice as fast.

    The setting allows reduced precision on some processors, so the result is checked before it is kept.
    """
    if torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double().T
    if float(((a @ b.T) - exact).abs().max()) > 1e-3:
        torch.set_float32_matmul_precision("highest")
