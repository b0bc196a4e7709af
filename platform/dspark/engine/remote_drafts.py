"""The way to a draft replica, for an engine that is about to be made."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from dspark.drafters.checkpoint import from_deepspec
from dspark.engine.config import EngineConfig
from dspark.engine.draft_messages import DraftLink
from dspark.engine.feature_store import FeatureStore
from dspark.engine.remote_draft_runner import RemoteDraftRunner
from dspark.engine.remote_draft_state import RemoteDraftConfig, RemoteDraftStats
from dspark.provenance import read_json


@dataclass(frozen=True)
class RemoteDrafts:
    """name: of whoever makes engines. stats: what becomes of them, read by whoever made this."""

    link: DraftLink
    name: str
    config: RemoteDraftConfig
    stats: RemoteDraftStats = field(default_factory=RemoteDraftStats)
    _numbers: Iterator[int] = field(default_factory=count, repr=False)

    def runner(
        self, folder: str, *, identity: str, engine: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> RemoteDraftRunner:
        """The runner of a drafter whose weights are elsewhere: of its folder only the shape is read here.

        identity: of drafter and target. dtype, device: of the target.
        Raises: ValueError when the features of all tokens in KV memory are too many bytes.
        """
        drafter = from_deepspec(read_json(Path(folder) / "config.json"))
        num_tokens = engine.num_pages * engine.page_size
        needed, most = num_tokens * drafter.feature_size * dtype.itemsize, self.config.max_feature_bytes
        if needed > most:
            raise ValueError(
                f"features of {num_tokens:,} tokens take {needed:,} bytes of host memory, over max_feature_bytes "
                f"({most:,}); raise it or lower kv_tokens"
            )
        store = FeatureStore(
            num_pages=engine.num_pages,
            page_size=engine.page_size,
            feature_size=drafter.feature_size,
            dtype=dtype,
            device=device,
        )
        return RemoteDraftRunner(
            drafter,
            self.link,
            store,
            name=f"{self.name}/{next(self._numbers)}",  # another engine's contexts have the same handles
            identity=identity,
            device=device,
            config=self.config,
            stats=self.stats,
        )
