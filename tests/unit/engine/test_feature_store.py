"""Features come back as they were kept, wherever their pages lie."""

import torch

from dspark.attention.page_pool import PageTable
from dspark.engine.feature_store import FeatureStore


def test_a_contexts_features_are_read_from_its_own_pages_and_from_shared_ones():
    store = FeatureStore(num_pages=8, page_size=4, feature_size=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    first, second = PageTable([5, 1, 2], 4), PageTable([5, 7, 6], 4)
    features = torch.randn(12, 3).bfloat16()
    store.write(first, 0, features[:7])
    store.write(first, 7, features[7:])
    store.write(second, 4, -features[4:])
    assert torch.equal(store.read(first, 0, 12), features)
    assert torch.equal(store.read(first, 3, 9), features[3:9])
    assert torch.equal(store.read(second, 0, 12), torch.cat([features[:4], -features[4:]]))
    assert store.read(first, 4, 4).shape == (0, 3)
    assert store.num_bytes == 8 * 4 * 3 * 2


def test_what_was_read_does_not_change_when_the_page_does():
    store = FeatureStore(num_pages=2, page_size=4, feature_size=1, dtype=torch.float32, device=torch.device("cpu"))
    table = PageTable([0, 1], 4)
    store.write(table, 0, torch.ones(4, 1))
    read = store.read(table, 0, 4)
    store.write(table, 0, torch.zeros(4, 1))
    assert torch.equal(read, torch.ones(4, 1))
