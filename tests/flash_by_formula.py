"""What `flash_attn.flash_attn_varlen_func` documents of batches with a block table, sequence by sequence."""

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor,
) -> Tensor:
    """q: [B, H, D]; k, v: [pages, tokens of a page, K, D]. The mask is aligned to the end of both sequences; a window
    of (left, right) lets a query see keys from i + n_k - n_q - left to i + n_k - n_q + right. Rows of no sequence: NaN.
    """
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert {t.dtype for t in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
    scale = softmax_scale or q.shape[-1] ** -0.5
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i, pages in enumerate(block_table):
        n_q, n_k = starts[i + 1] - starts[i], ends[i + 1] - ends[i]
        assert n_q <= max_seqlen_q
        assert n_k <= max_seqlen_k
        if not n_q:
            continue
        group = q.shape[1] // k.shape[2]
        keys, values = (x[pages.long()].flatten(0, 1)[:n_k].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[starts[i] : starts[i + 1]], keys) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        place = torch.arange(n_q)[:, None] + n_k - n_q
        seen = torch.ones(n_q, n_k, dtype=torch.bool)
        left, right = window_size[0], 0 if causal else window_size[1]
        if right >= 0:
            seen &= torch.arange(n_k) <= place + right
        if left >= 0:
            seen &= torch.arange(n_k) >= place - left
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out
