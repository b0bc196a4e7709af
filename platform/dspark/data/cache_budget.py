"""How many bytes a target cache takes, all its files counted, and which answers fit into a budget.

A cache holds each of its bytes once, also while it is written: temporary files become the real ones, and what a
worker that died left behind is removed before it is written again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.data.target_cache import SampleEntry

SHARD_BYTES = 2048  # a shard's safetensors header, and its name, size and checksum in sidecar and manifest
RESULT_BYTES = 16_384  # the manifest's target config and result


@dataclass(frozen=True)
class AnswerSize:
    """What an answer's samples take together; id decides when its turn comes."""

    id: str
    num_tokens: int
    num_bytes: int


def choose(answers: Sequence[AnswerSize], *, max_bytes: int, shard_tokens: int, seed: int) -> list[int]:
    """Places of the answers that fit, ascending: in the order of a hash of (seed, id), each one that still does.

    max_bytes: for shards and their entries. Which others there are changes no answer's turn.
    """
    chosen: list[int] = []
    tokens = used = 0
    for place in sorted(range(len(answers)), key=lambda place: _turn(seed, answers[place].id)):
        more_tokens, more_bytes = tokens + answers[place].num_tokens, used + answers[place].num_bytes
        if more_bytes + SHARD_BYTES * max_shards(more_tokens, shard_tokens) <= max_bytes:
            tokens, used = more_tokens, more_bytes
            chosen.append(place)
    return sorted(chosen)


def max_shards(num_tokens: int, shard_tokens: int) -> int:
    """At most how many shards the dealing of whole samples makes: two neighbours hold more than `shard_tokens`."""
    return 2 * -(-num_tokens // shard_tokens) - 1 if num_tokens else 0


def entry_bytes(name: str, split: str, domain: str) -> int:
    """At most what a sample's entry takes in the sidecar (indented by 4) and in the manifest (by 8)."""
    widest = 10**10  # offsets inside a shard have fewer digits
    entry = asdict(SampleEntry(name, split, domain, widest, widest, widest, widest))
    text = json.dumps(entry, indent=2, ensure_ascii=False)
    lines = text.count("\n") + 1
    return 2 * len((text + ",\n").encode()) + lines * (4 + 8)


def folder_bytes(request: dict[str, Any]) -> int:
    """At most what the files of a cache take beside its shards and their entries."""
    return RESULT_BYTES + 2 * len(json.dumps(request, indent=8, ensure_ascii=False).encode())


def _turn(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}:{name}".encode()).digest()
