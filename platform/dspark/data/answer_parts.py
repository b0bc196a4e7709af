"""Parts of a set of answers: Parquet files of rows, each there whole or not at all, on a disk or in an object store."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.errors import DsparkError, one_line
from dspark.provenance import fingerprint
from dspark.storage import Location
from dspark.transfer import staged

STATUSES = ("ok", "empty", "error")
MAX_REASONS = 20

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TURN = pa.struct(
    [("prompt_ids", pa.list_(pa.int32())), ("output_ids", pa.list_(pa.int32())), ("finish_reason", pa.string())]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("turns", pa.list_(TURN)),
    ]
)

log = logging.getLogger("dspark.generate")


@dataclass(frozen=True)
class Content:
    """What the wanted rows of a set come to. errors: rows by reason, the most frequent ones."""

    counts: dict[str, int]
    fingerprint: str
    errors: dict[str, int]


def write_part(parts: Location, rows: Sequence[Mapping[str, Any]], *, before_commit: Callable[[], None]) -> Location:
    """Write rows as one part, named for their ids. before_commit: called last; what it raises leaves no part."""
    path = parts / f"part-{fingerprint(sorted(row['id'] for row in rows))}.parquet"
    with staged(path) as temporary:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), temporary, compression="zstd")
        before_commit()
    return path


def read_rows(parts: Location, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of every part, in the order of the parts' names."""
    for path in part_paths(parts):
        yield from _read_table(path, columns).to_pylist()


def readable_ids(parts: Location) -> set[str]:
    """Ids that have a row. A part that cannot be read is removed, so that its rows are made again."""
    ids: set[str] = set()
    for path in part_paths(parts):
        try:
            ids.update(_read_table(path, ["id"])["id"].to_pylist())
        except (pa.ArrowException, OSError) as error:
            log.warning("removed unreadable part %s: %s", path.name, one_line(error))
            path.unlink(missing_ok=True)
    return ids


def part_paths(parts: Location) -> list[Location]:
    return sorted(parts.glob("part-*.parquet"))


def summarise(parts: Location, wanted: set[str]) -> Content:
    """Counts over the wanted rows, and their content. Raises: DsparkError for a missing or double row."""
    found: dict[str, str] = {}
    errors: Counter[str] = Counter()
    counts = Counter(dict.fromkeys((*STATUSES, "tokens", "finish_length", "surplus"), 0))
    for row in read_rows(parts):
        if row["id"] not in wanted:
            counts["surplus"] += 1
            continue
        if row["id"] in found:
            raise DsparkError(f"two answers to prompt {row['id']!r} in {parts}; remove one of its parts and run again")
        found[row["id"]] = fingerprint([row["status"], row["turns"]])
        counts[row["status"]] += 1
        counts["tokens"] += sum(len(turn["output_ids"]) for turn in row["turns"])
        counts["finish_length"] += any(turn["finish_reason"] == "length" for turn in row["turns"])
        if row["error"]:
            errors[row["error"]] += 1
    missing = wanted - found.keys()
    if missing:
        raise DsparkError(
            f"{len(missing)} prompts have no answer in {parts}, such as {min(missing)!r}; run the job again"
        )
    return Content(dict(counts), fingerprint(sorted(found.items())), dict(errors.most_common(MAX_REASONS)))


def _read_table(path: Location, columns: list[str] | None) -> pa.Table:
    # A part is small: from an object store it comes in one request, whatever the columns.
    source = path if isinstance(path, Path) else pa.BufferReader(path.read_bytes())
    return pq.read_table(source, columns=columns, partitioning=None)
