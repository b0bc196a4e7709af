"""Paged attention gives what dense attention over each request alone gives, to 1e-5 in float32."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dspark.attention.flat_batch import Piece, flatten
from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable
from dspark.attention.paged import AttentionCalls, PagedStep, attend, causal_mask, paged_attention

HEADS, KV_HEADS, DIM = 6, 2, 8


def dense(queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Softmax attention written out. queries: [H, n, D] at positions start …; keys, values: [K, S, D] from 0."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (keys, values))
    scores = queries @ keys.transpose(1, 2) * DIM**-0.5
    for row in range(queries.shape[1]):
        for column in range(keys.shape[1]):
            distance = start + row - column
            if distance < 0 or (window is not None and distance >= window):
                scores[:, row, column] = -torch.inf
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_every_piece_sees_its_own_request_up_to_itself(window: int | None) -> None:
    torch.manual_seed(0)
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    tables = [PageTable([4, 1, 9], 4), PageTable([2, 3], 4), PageTable([6, 7, 8], 4)]
    kv_cache = PagedKVCache([LayerShape(KV_HEADS, DIM, DIM)], num_slots=48, dtype=torch.float32, device="cpu")
    seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in tables]
    for lengths in ((5, 1, 9), (1, 4, 1), (3, 1, 2)):
        pieces = [Piece(table, [0] * n, n) for table, n in zip(tables, lengths, strict=True)]
        batch = flatten(pieces, "cpu")
        query = torch.randn(1, HEADS, batch.num_tokens, DIM)
        key, value = (torch.randn(1, KV_HEADS, batch.num_tokens, DIM) for _ in range(2))
        output, _ = paged_attention(
            layer, query, key, value, None, paged_step=PagedStep(batch, kv_cache), sliding_window=window
        )
        assert output.shape == (1, batch.num_tokens, HEADS, DIM)
        for i, piece in enumerate(pieces):
            part = slice(batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1])
            seen[i][0].append(key[0, :, part])
            seen[i][1].append(value[0, :, part])
            keys, values = (torch.cat(parts, dim=1) for parts in seen[i])
            expected = dense(query[0, :, part], keys, values, piece.start, window)
            torch.testing.assert_close(output[0, part].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)
            tables[i].num_tokens = piece.stop


def test_what_was_rejected_is_written_over_and_never_seen() -> None:
    torch.manual_seed(0)
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]

    def run(rejected: float) -> Tensor:
        table = PageTable([0, 1], 4)
        kv_cache = PagedKVCache([LayerShape(KV_HEADS, DIM, DIM)], num_slots=8, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(1)
        for n, kept in ((3, 1), (2, 2)):
            batch = flatten([Piece(table, [0] * n, n)], "cpu")
            q, k, v = (torch.randn(1, h, n, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
            k[:, :, kept:] *= rejected
            output, _ = paged_attention(layer, q, k, v, None, paged_step=PagedStep(batch, kv_cache))
            table.num_tokens += n
            table.truncate(table.num_tokens - n + kept)
        return output

    assert torch.equal(run(1.0), run(-7.0))


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(HEADS, 3, DIM), torch.randn(KV_HEADS, 5, DIM), torch.randn(KV_HEADS, 5, DIM)
    mask = causal_mask(2, 5, 0, sliding_window=None, dtype=torch.float32, device=torch.device("cpu"))
    sinks = torch.randn(HEADS)
    found = attend(queries, keys, values, mask, scaling=0.3, sinks=sinks)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        weights = (queries[head] @ keys[shared].T * 0.3 + mask).exp()
        expected = weights @ values[shared] / (weights.sum(1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(found[head], expected, atol=1e-6, rtol=1e-5)


def test_a_layer_that_is_not_handed_the_step_is_refused_by_name() -> None:
    q, k = torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, KV_HEADS, 1, DIM)
    with pytest.raises(ValueError, match="Module is not handed the keyword arguments"):
        paged_attention(nn.Module(), q, k, k, None)


def test_what_layers_are_called_with_is_noted_and_who_shares_keys_with_whom() -> None:
    calls, keys = AttentionCalls(), torch.zeros(2, 1, KV_HEADS, 3, DIM)
    query, values = torch.zeros(1, HEADS, 3, DIM), torch.zeros(1, KV_HEADS, 3, 5)
    for number, (key, window) in {0: (keys[0], 4), 1: (keys[1], None), 3: (keys[0], 4)}.items():
        layer = nn.Module()
        layer.layer_idx = number  # type: ignore[assignment]
        output, _ = paged_attention(layer, query, key, values, None, paged_step=calls, sliding_window=window)
        assert output.shape == (1, 3, HEADS, 5)
    own = LayerShape(KV_HEADS, DIM, 5, torch.device("cpu"))
    assert calls.shapes() == [own, own, LayerShape(0, 0, 0), replace(own, shared_with=0)]
    assert calls.windows == {0: 4, 1: None, 3: 4}


def test_a_mask_shows_the_past_and_no_more_than_the_window() -> None:
    mask = causal_mask(3, 5, 1, sliding_window=3, dtype=torch.float32, device=torch.device("cpu"))
    hidden = -torch.inf
    assert mask.tolist() == [[0.0, 0.0, 0.0, hidden], [hidden, 0.0, 0.0, 0.0]]
