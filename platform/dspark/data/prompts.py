"""Prompts from files or hub data sets: every row read is kept, or rejected with a reason."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet
import pydantic
from pydantic import Field

from dspark.config import Config
from dspark.provenance import fingerprint

Split = Literal["train", "heldout"]

MAX_REJECTED_SHARE = 0.5
ROLES = {"user": "user", "human": "user", "system": "system", "assistant": "assistant"} | dict.fromkeys(
    ("gpt", "chatgpt", "bing", "bard", "model"), "assistant"
)


class PromptSource(Config):
    """One place prompts come from: a file, a folder of files, or a hub data set."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file, or a folder, of which every such file is read."""
    hub: str | None = None
    """A data set on the hub, instead of `path`."""
    hub_config: str | None = None
    hub_split: str = "train"
    hub_revision: str | None = None
    split: Split | None = None
    """Which split all rows go to; None decides by a hash of each row's id."""
    domain: str = "default"
    """The domain of rows that name none."""
    domains: tuple[str, ...] | None = None
    """Keep rows of these domains only."""
    limit: int | None = Field(None, ge=1)
    """Keep a sample of this many rows of this source."""
    id_suffix: str = ""
    """Appended to every id: the same place, named again with a suffix, gets its prompts answered once more."""

    @pydantic.model_validator(mode="after")
    def _has_one_place(self) -> "PromptSource":
        if (self.path is None) == (self.hub is None):
            raise ValueError("a prompt source needs either path or hub")
        return self

    @property
    def place(self) -> str:
        return self.path or f"hub:{self.hub}"


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers: system and user turns, in order."""

    id: str
    domain: str
    split: Split
    messages: list[dict[str, str]]

    @property
    def opening(self) -> list[dict[str, str]]:
        """Everything up to the first user turn: what the first answer is given to."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: first + 1]

    @property
    def num_turns(self) -> int:
        """Answers to generate."""
        return sum(message["role"] == "user" for message in self.messages)


@dataclass(frozen=True)
class RejectedRow:
    """A row that is no prompt. place: file and line, or data set and row."""

    place: str
    id: str | None
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """num_read = prompts kept + rows rejected + rows left out by a limit or a choice of domains."""

    prompts: list[Prompt]
    rejected: list[RejectedRow] = field(default_factory=list)
    num_over_limit: int = 0

    @property
    def num_read(self) -> int:
        return len(self.prompts) + len(self.rejected) + self.num_over_limit

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        return dict(Counter(row.reason for row in self.rejected).most_common())

    @property
    def fingerprint(self) -> str:
        content = sorted((prompt.id, prompt.domain, prompt.split, prompt.messages) for prompt in self.prompts)
        return fingerprint(content)


def read_prompts(
    sources: Sequence[PromptSource], *, seed: int, heldout_fraction: float, limit: int | None = None
) -> PromptSet:
    """All prompts of the sources, in their order; `limit` keeps a sample in proportion to the sources.

    Samples are the rows whose hash with `seed` is lowest, so a larger limit adds rows and removes none.
    Raises: ValueError if nothing is kept, or if more than half of the rows are rejected.
    """
    rejected: list[RejectedRow] = []
    kept: list[list[Prompt]] = []
    seen: set[str] = set()
    num_over_limit = 0
    for source in sources:
        prompts = list(_read_source(source, heldout_fraction, seen, rejected))
        chosen = [prompt for prompt in prompts if source.domains is None or prompt.domain in source.domains]
        sampled = _sample(chosen, source.limit, seed)
        num_over_limit += len(prompts) - len(sampled)
        kept.append(sampled)
    if limit is not None:
        shares = _proportional_shares([len(prompts) for prompts in kept], limit)
        sampled_all = [_sample(prompts, share, seed) for prompts, share in zip(kept, shares, strict=True)]
        num_over_limit += sum(map(len, kept)) - sum(map(len, sampled_all))
        kept = sampled_all
    prompt_set = PromptSet([prompt for prompts in kept for prompt in prompts], rejected, num_over_limit)
    _require_usable(prompt_set, [source.place for source in sources])
    return prompt_set


def _require_usable(prompt_set: PromptSet, places: list[str]) -> None:
    where = ", ".join(places)
    reasons = ", ".join(f"{count} x {reason}" for reason, count in prompt_set.rejected_by_reason.items())
    if not prompt_set.prompts:
        found = f"all {prompt_set.num_read} rows rejected ({reasons})" if prompt_set.rejected else "0 rows"
        raise ValueError(f"no prompts in {where}: {found}; give a file with prompt, messages or turns in each row")
    share = len(prompt_set.rejected) / prompt_set.num_read
    if share > MAX_REJECTED_SHARE:
        first = prompt_set.rejected[0]
        raise ValueError(
            f"{len(prompt_set.rejected)} of {prompt_set.num_read} rows rejected in {where}: {reasons}; "
            f"the first is {first.place}"
        )


def _read_source(
    source: PromptSource, heldout_fraction: float, seen: set[str], rejected: list[RejectedRow]
) -> Iterator[Prompt]:
    for place, row in _rows(source):
        row_id = str(row["id"]) if isinstance(row, dict) and row.get("id") is not None else None
        try:
            messages = _user_side(_messages(row))
            own_id = row_id or fingerprint(messages)
            row_id = own_id + source.id_suffix
            _require_unicode(row_id)
            if row_id in seen:
                raise ValueError("duplicate id")
        except ValueError as error:
            rejected.append(RejectedRow(place, row_id, str(error)))
            continue
        seen.add(row_id)
        split = source.split or split_of(own_id, heldout_fraction)
        yield Prompt(row_id, str(row.get("domain") or source.domain), split, messages)


def split_of(row_id: str, heldout_fraction: float) -> Split:
    """The split of an id: one comparison decides, so that the two are disjoint and leave nothing out."""
    return "heldout" if _hash(row_id) < int(heldout_fraction * 2**64) else "train"


def _rows(source: PromptSource) -> Iterator[tuple[str, Any]]:
    """Rows with the place of each. A row that is no JSON comes as the ValueError it raised."""
    if source.hub is not None:
        yield from _hub_rows(source)
        return
    for path in _files(Path(str(source.path)).expanduser()):
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not files:
            raise ValueError(f"prompt folder holds no .jsonl or .parquet file: {path}")
        return files
    if not path.is_file():
        raise ValueError(f"prompt file not found: {path}; set prompts[].path to a .jsonl or .parquet file or a folder")
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"prompt file is neither .jsonl nor .parquet: {path}")
    return [path]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError:  # bad JSON or bad UTF-8
                yield f"{path}:{number}", None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield f"{path}:row {number}", row
            number += 1


def _hub_rows(source: PromptSource) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset  # heavy, and not needed for files

    rows = load_dataset(source.hub, source.hub_config, split=source.hub_split, revision=source.hub_revision)
    for number, row in enumerate(rows):
        yield f"{source.place}:row {number}", row


def _messages(row: Any) -> list[dict[str, str]]:
    """Messages in one form from the forms in use. Raises: ValueError with the reason, equal for equal faults."""
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if row.get("messages") or row.get("conversations"):
        return [_message(message) for message in row.get("messages") or row["conversations"]]
    prompt = row.get("prompt")
    turns = prompt if isinstance(prompt, list) else [prompt] if prompt is not None else row.get("turns")
    if not turns:
        raise ValueError("no messages, prompt or turns")
    return [_message(turn if isinstance(turn, dict) else {"role": "user", "content": turn}) for turn in turns]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError("message is not an object")
    role = message.get("role") or message.get("from")
    content = message["content"] if "content" in message else message.get("value")
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r}")
    if not isinstance(content, str):
        raise ValueError("content is not text")
    if not content.isascii():
        _require_unicode(content)
    return {"role": ROLES[role], "content": content}


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which no file or tokenizer takes
        raise ValueError("text is not valid Unicode") from None


def _user_side(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """System and user turns; the answers in between are regenerated, so those of the row are not needed."""
    spoken = [message for message in messages if message["role"] != "system"]
    if spoken and spoken[0]["role"] == "assistant":
        raise ValueError("begins with an assistant turn")
    kept = [message for message in messages if message["role"] != "assistant"]
    if not kept or kept[-1]["role"] != "user":
        raise ValueError("no user turn to answer")
    if any(not message["content"].strip() for message in kept if message["role"] == "user"):
        raise ValueError("empty user turn")
    return kept


def _sample(prompts: list[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts in their order, always the same for a seed."""
    if limit is None or len(prompts) <= limit:
        return prompts
    chosen = {prompt.id for prompt in sorted(prompts, key=lambda prompt: _hash(f"{seed}\0{prompt.id}"))[:limit]}
    return [prompt for prompt in prompts if prompt.id in chosen]


def _proportional_shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` split in proportion to the sizes; what rounding leaves goes to the largest remainders."""
    available = sum(sizes)
    if available <= total:
        return list(sizes)
    shares = [size * total // available for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-(sizes[i] * total % available), i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
