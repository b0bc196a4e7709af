"""A ring holds the newest positions, whatever lengths they are written in."""

import torch

from dspark.attention.kv_cache import LayerShape
from dspark.attention.window_ring import WindowRing

SHAPE = LayerShape(2, 3, 5)


def written(pieces: list[int], *, num_slots: int = 6) -> tuple[WindowRing, torch.Tensor, torch.Tensor]:
    """A ring of two layers after these writes to the second one, and all keys and values ever written."""
    ring = WindowRing([SHAPE, SHAPE], num_slots=num_slots, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, sum(pieces), width, generator=generator) for width in (3, 5))
    start = 0
    for piece in pieces:
        ring.write(1, start, keys[:, start : start + piece], values[:, start : start + piece])
        start += piece
    return ring, keys, values


def test_the_newest_positions_are_read_back_where_positions_says():
    for pieces in ([4], [6], [1] * 7, [3, 5, 2, 6], [6, 6, 1]):
        ring, keys, values = written(pieces)
        stop = sum(pieces)
        positions = ring.positions(stop)
        assert sorted(positions.tolist()) == list(range(max(0, stop - 6), stop))
        found = ring.read(1, stop)
        assert torch.equal(found[0], keys[:, positions])
        assert torch.equal(found[1], values[:, positions])


def test_what_is_written_again_stands():
    ring, keys, _ = written([6, 4])
    changed = torch.ones(2, 3, 3)
    ring.write(1, 8, changed, torch.ones(2, 3, 5))  # a rejected block's positions, and one more
    positions = ring.positions(11)
    assert torch.equal(ring.read(1, 11)[0][:, positions >= 8], changed)
    assert torch.equal(ring.read(1, 11)[0][:, positions < 8], keys[:, positions[positions < 8]])


def test_reading_copies_nothing():
    ring, _, _ = written([5, 4])
    assert ring.read(1, 9)[0].data_ptr() == ring.keys[1].data_ptr()
