"""Features that wait keep their order, and no other request's memory."""

import torch

from dspark.engine.pending_features import MOST_VIEWS, PendingFeatures


def test_rows_keep_their_order_and_the_oldest_can_be_dropped() -> None:
    rows = torch.arange(200.0).reshape(50, 4)
    for dropped in (0, 3, 29, 50):
        pending = PendingFeatures()
        for start, stop in ((0, 20), (20, 21), *((k, k + 1) for k in range(21, 50))):
            pending.append(rows[start:stop])
        assert pending.num_rows == 50
        pending.drop_oldest(dropped)
        assert pending.num_rows == 50 - dropped
        assert torch.equal(torch.cat([torch.empty(0, 4), *pending.parts]), rows[dropped:])


def test_few_steps_are_held_for_other_requests_rows() -> None:
    """Each step's features come as a view of the whole step's."""
    pending, num_steps = PendingFeatures(), 10 * MOST_VIEWS + 3
    for _ in range(num_steps):
        pending.append(torch.randn(50, 4)[7:8])
    row_bytes, step_bytes = 4 * 4, 50 * 4 * 4
    held = sum(part.untyped_storage().nbytes() for part in pending.parts)
    assert held == 10 * MOST_VIEWS * row_bytes + 3 * step_bytes
    pending.drop_oldest(num_steps - 1)
    assert sum(part.untyped_storage().nbytes() for part in pending.parts) == row_bytes
