"""What the drafter of one pass keeps of a request. Legend: d hidden size, m captured layers."""

from dataclasses import dataclass, field

from torch import Tensor

from dspark.attention.page_pool import PageTable
from dspark.attention.window_ring import WindowRing
from dspark.engine.pending_features import PendingFeatures


@dataclass
class DraftMemory:
    """A request's context. num_tokens: context tokens stored; pending: features [n, m*d] not stored yet.

    ring: of the layers with a window; None without such layers. newest_feature: [d], of the last token stored; None
    before any is, and where the context came with pages that another request has stored.
    """

    table: PageTable
    ring: WindowRing | None = None
    num_tokens: int = 0
    pending: PendingFeatures = field(default_factory=PendingFeatures)
    newest_feature: Tensor | None = None

    def note_stored(self, num_tokens: int, newest_feature: Tensor) -> None:
        """What was pending lies in pages and rings now, num_tokens in all. newest_feature: [d]."""
        self.num_tokens, self.pending, self.newest_feature = num_tokens, PendingFeatures(), newest_feature
