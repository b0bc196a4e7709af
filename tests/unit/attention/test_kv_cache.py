"""What is written at a slot is read at its position, on neighbouring and on scattered pages alike."""

import pytest
import torch

from dspark.attention.kv_cache import LayerShape, PagedKVCache
from dspark.attention.page_pool import PageTable


@pytest.mark.parametrize("pages", [[1, 2, 3], [4, 0, 2]])
def test_positions_read_what_was_written_for_them(pages: list[int]) -> None:
    shapes = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]
    kv_cache = PagedKVCache(shapes, num_slots=20, dtype=torch.float32, device="cpu")
    table = PageTable(pages, page_size=4)
    for layer, shape in enumerate(shapes):
        keys = torch.randn(shape.num_kv_heads, 10, shape.key_dim)
        values = torch.randn(shape.num_kv_heads, 10, shape.value_dim)
        for start, stop in ((0, 6), (6, 10)):
            slots = torch.tensor(table.slots(start, stop))
            kv_cache.write(layer, slots, keys[:, start:stop], values[:, start:stop])
        for start, stop in ((0, 10), (3, 9), (7, 8)):
            found = kv_cache.read(layer, table, start, stop)
            assert torch.equal(found[0], keys[:, start:stop])
            assert torch.equal(found[1], values[:, start:stop])


def test_neighbouring_pages_are_read_without_a_copy() -> None:
    kv_cache = PagedKVCache([LayerShape(2, 4, 4)], num_slots=32, dtype=torch.bfloat16, device="cpu")
    keys, values = kv_cache.read(0, PageTable([1, 2], page_size=4), 2, 7)
    assert keys.data_ptr() == kv_cache.keys[0][:, 6:].data_ptr()
    assert values.data_ptr() == kv_cache.values[0][:, 6:].data_ptr()
    assert kv_cache.num_bytes == 2 * 2 * 32 * 4 * 2
