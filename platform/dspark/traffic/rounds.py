"""Served rounds in columns, and their Parquet form: raw confidences beside what was accepted, and whose they are.

Legend: N rounds, G slots of a block. A round is judged at slot k when its fate there was decided: up to a stop token
inside of the verified tokens as many as were committed, else all of them.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.speculation.statistics import Round

FORMAT = 1
MODES = ("greedy", "sampled", "seeded")  # ways of decoding, as the engine tells them apart
METADATA = b"dspark"
COLUMNS: dict[str, type[Any]] = {
    "request": np.uint64,
    "mode": np.int8,
    "is_whole": np.bool_,
    "logits": np.float32,
    "num_accepted": np.int64,
    "num_judged": np.int64,
}


@dataclass(frozen=True)
class Origin:
    """Where rounds come from. target: its identity; calibration: fingerprint of the scales in force, None without."""

    drafter_sha256: str
    drafter: str
    target: dict[str, Any]
    block_size: int
    replica: str
    calibration: str | None
    git_revision: str | None


@dataclass(frozen=True)
class RecordedRounds:
    """logits: [N, G] float32 raw confidence logits, NaN where nothing was verified; the rest: [N].

    request: a random number for each answer. mode: places in MODES. is_whole: the whole block was verified because that
    was asked for, not because it was expected to pay. num_unusable: rounds with a logit that is not finite, left out.
    """

    request: NDArray[np.uint64]
    mode: NDArray[np.int8]
    is_whole: NDArray[np.bool_]
    logits: NDArray[np.float32]
    num_accepted: NDArray[np.int64]
    num_judged: NDArray[np.int64]
    num_unusable: int = 0

    def __len__(self) -> int:
        return len(self.request)

    def of_mode(self, mode: str) -> "RecordedRounds":
        """Those of one way of decoding."""
        return self.where(self.mode == MODES.index(mode))

    def where(self, kept: Any) -> "RecordedRounds":
        """Those that are kept: [N] bool."""
        columns: dict[str, Any] = {name: getattr(self, name)[kept] for name in COLUMNS}
        return RecordedRounds(**columns, num_unusable=self.num_unusable)

    @classmethod
    def joined(cls, parts: Sequence["RecordedRounds"], block_size: int) -> "RecordedRounds":
        """All rounds of the parts, in their order."""
        if not parts:
            empty: dict[str, Any] = {name: np.zeros(0, kind) for name, kind in COLUMNS.items()}
            return cls(**empty | {"logits": np.zeros((0, block_size), np.float32)})
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
        return cls(**columns, num_unusable=sum(part.num_unusable for part in parts))


class RoundBuffer:
    """Rounds on their way to a file."""

    def __init__(self) -> None:
        self._request, self._mode, self._is_whole = array("Q"), array("b"), array("b")
        self._logits, self._offsets = array("f"), array("i", [0])
        self._accepted, self._judged = array("h"), array("h")

    def __len__(self) -> int:
        return len(self._request)

    def add(self, request: int, mode: str, rounds: Sequence[Round], *, is_whole: bool) -> None:
        """Take an answer's rounds in; those without confidences say nothing and are passed over."""
        place = MODES.index(mode)
        for done in rounds:
            if done.confidence_logits is None:
                continue
            self._request.append(request)
            self._mode.append(place)
            self._is_whole.append(is_whole)
            self._logits.extend(done.confidence_logits)
            self._offsets.append(len(self._logits))
            self._accepted.append(done.num_accepted)
            self._judged.append(num_judged(done))

    def encode(self, origin: Origin) -> bytes:
        """The file's bytes."""
        import pyarrow as pa  # heavy, and not needed by a server that records nothing
        import pyarrow.parquet as pq

        logits = pa.ListArray.from_arrays(pa.array(np.asarray(self._offsets)), pa.array(np.asarray(self._logits)))
        columns = {
            "request": pa.array(np.asarray(self._request)),
            "mode": pa.array(np.asarray(self._mode)),
            "is_whole": pa.array(np.asarray(self._is_whole, bool)),
            "logits": logits,
            "num_accepted": pa.array(np.asarray(self._accepted)),
            "num_judged": pa.array(np.asarray(self._judged)),
        }
        table = pa.table(columns).replace_schema_metadata({METADATA: json.dumps({"format": FORMAT} | asdict(origin))})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return bytes(sink.getvalue())


def decode(content: bytes) -> tuple[Origin, RecordedRounds]:
    """What a file holds. Raises: ValueError for one that is broken, or not of this form."""
    import pyarrow as pa  # heavy, and not needed to write
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
        found = json.loads((table.schema.metadata or {})[METADATA])
        if found.pop("format") != FORMAT:
            raise ValueError("written by another version")
        origin = Origin(**found)
        small = {name: table[name].to_numpy() for name in ("request", "mode", "is_whole", "num_accepted", "num_judged")}
        rows = table["logits"].combine_chunks()
        lengths = np.diff(rows.offsets.to_numpy())
        values = rows.flatten().to_numpy(zero_copy_only=False)
    except (pa.ArrowException, KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise ValueError(f"not recorded rounds: {type(error).__name__} {error}") from None
    logits = np.full((len(lengths), origin.block_size), np.nan, np.float32)
    accepted, judged = small["num_accepted"].astype(np.int64), small["num_judged"].astype(np.int64)
    slots = np.arange(origin.block_size)
    if (lengths > origin.block_size).any() or (judged > lengths).any() or (accepted > lengths).any():
        raise ValueError(f"rounds of more slots than the block of {origin.block_size} has, or than were verified")
    if min(judged.min(initial=0), accepted.min(initial=0)) < 0 or not np.isin(small["mode"], range(len(MODES))).all():
        raise ValueError("counts below 0, or an unknown way of decoding")
    logits[slots < lengths[:, None]] = values
    is_unusable = ((slots < judged[:, None]) & ~np.isfinite(logits)).any(axis=1)
    rounds = RecordedRounds(
        small["request"], small["mode"], small["is_whole"], logits, accepted, judged, int(is_unusable.sum())
    )
    return origin, rounds.where(~is_unusable)


def num_judged(done: Round) -> int:
    """Slots of a round whose fate was decided: none behind a stop token."""
    is_stopped_inside = done.num_committed <= done.num_accepted
    return done.num_committed if is_stopped_inside else done.num_proposed
