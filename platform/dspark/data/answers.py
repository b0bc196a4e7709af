"""The answers on disk: Parquet parts that appear whole or not at all, and a manifest written last.

Folder: request.json (what was asked, written first), parts/part-<hash of ids>.parquet, rejected.jsonl,
selection.json (ids that belong to the set), manifest.json (the set is complete).
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic import Field

from dspark.chat import ChatConfig
from dspark.config import Config
from dspark.data.answer_parts import STATUSES, read_rows, readable_ids, summarise, write_part
from dspark.data.backend import BackendConfig
from dspark.data.prompts import Prompt, PromptSet, PromptSource
from dspark.engine.sampling import SamplingParams
from dspark.errors import DsparkError, Mismatch, MissingInput
from dspark.provenance import read_json, require_same, write_bytes, write_json
from dspark.storage import Location, locate
from dspark.targets import TargetConfig, default_sampling
from dspark.tracking import TrackingConfig

FORMAT = 1
REMEDY = "use the settings it was made with, another output, or --fresh"


class AnswerSampling(Config):
    """How answers are drawn; what is None is the target's own recommendation."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    """0 keeps all tokens, whatever the target recommends."""
    max_new_tokens: int = Field(512, ge=1)
    """Answers are cut here; such a row is counted, and nothing is added to it."""


class GenerateConfig(Config):
    """The stage that regenerates the target's answers."""

    prompts: tuple[PromptSource, ...] = Field(min_length=1)
    target: TargetConfig
    backend: BackendConfig = BackendConfig()
    """Who answers; the target itself on this cluster, or servers that hold it."""
    output: str
    """Folder of the answers, a path or a URI; a later run with the same settings resumes there."""
    limit: int | None = Field(None, ge=1)
    """Answer a sample of this many prompts, in proportion to the sources."""
    chat: ChatConfig = ChatConfig()
    sampling: AnswerSampling = AnswerSampling()
    seed: int = 0
    """Decides the sample and, with a row's id, its random numbers."""
    heldout_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the rows of sources without a split of their own that is never trained on."""
    batch_size: int = Field(48, ge=1)
    """Conversations a worker answers at once."""
    max_kv_tokens: int = Field(65_536, ge=1)
    """Tokens a worker holds attention memory for; lower it if memory runs out."""
    num_workers: int = Field(2, ge=1)
    threads_per_worker: int = Field(1, ge=1)
    gpus_per_worker: float | None = Field(None, ge=0)
    """None gives each worker one GPU where the cluster has any."""
    rows_per_part: int = Field(32, ge=1)
    """Rows a worker writes at once: a killed run loses at most this many finished ones per worker."""
    tracking: TrackingConfig = TrackingConfig()

    @pydantic.model_validator(mode="after")
    def _require_effect(self) -> "GenerateConfig":
        if self.backend.kind == "openai":
            for name in ("batch_size", "max_kv_tokens", "num_workers", "threads_per_worker", "gpus_per_worker"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect with backend.kind openai; set backend.concurrency instead")
        return self


def resolve_sampling(config: GenerateConfig) -> SamplingParams:
    """The sampling in force: the config's, where it says something, over the target's."""
    asked = {
        key: value for key in ("temperature", "top_p", "top_k") if (value := getattr(config.sampling, key)) is not None
    }
    params = default_sampling(config.target) | asked
    return SamplingParams(
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=int(params.get("top_k", 0)) or None,
    )


class AnswerStore:
    """Writes a set of answers. Of two runs on one folder, the later one goes on and the earlier one fails."""

    def __init__(self, folder: str | Location) -> None:
        self.folder = locate(folder)
        self.parts = self.folder / "parts"

    @property
    def manifest(self) -> dict[str, Any] | None:
        path = self.folder / "manifest.json"
        return read_json(path) if path.is_file() else None

    def check_request(self, request: dict[str, Any]) -> None:
        """Raises: Mismatch by field name if the folder holds answers to another request."""
        path = self.folder / "request.json"
        if path.is_file():
            require_same(f"answers in {self.folder}", request, read_json(path), remedy=REMEDY)

    def begin(self, request: dict[str, Any]) -> str:
        """Take the folder for a new run and forget that it was complete. Returns the run's token."""
        self.parts.mkdir(parents=True, exist_ok=True)
        run = os.urandom(8).hex()
        write_json(self.folder / "run.json", {"run": run})
        (self.folder / "manifest.json").unlink(missing_ok=True)
        for leftover in self.parts.glob(".tmp-*"):
            leftover.unlink(missing_ok=True)
        write_json(self.folder / "request.json", request)
        return run

    def clear(self) -> None:
        """Remove what this class wrote, and nothing else."""
        for name in ("manifest.json", "selection.json", "rejected.jsonl", "request.json", "run.json"):
            (self.folder / name).unlink(missing_ok=True)
        for pattern in ("part-*.parquet", ".tmp-*"):
            for path in self.parts.glob(pattern):
                path.unlink(missing_ok=True)

    def write_part(self, rows: Sequence[Mapping[str, Any]], *, run: str) -> Location:
        """Write rows as one part. Raises: DsparkError if another run has taken the folder."""

        def require_own() -> None:
            if read_json(self.folder / "run.json")["run"] != run:
                raise DsparkError(f"another run has taken over {self.folder}; wait for it or use another output")

        return write_part(self.parts, rows, before_commit=require_own)

    def done_ids(self) -> set[str]:
        """Ids that have a row. A part that cannot be read is removed, so that its rows are made again."""
        return readable_ids(self.parts)

    def check_unchanged(self, prompts: Sequence[Prompt]) -> None:
        """Raises: Mismatch naming the first prompt whose stored row answers something else under the same id."""
        wanted = {prompt.id: prompt for prompt in prompts}
        for row in read_rows(self.parts, columns=["id", "domain", "split", "messages"]):
            prompt = wanted.get(row["id"])
            if prompt is None:
                continue
            asked = [message for message in row["messages"] if message["role"] != "assistant"]
            stored = {"domain": row["domain"], "split": row["split"], "messages": asked}
            now = {"domain": prompt.domain, "split": prompt.split, "messages": prompt.messages}
            require_same(f"answer to prompt {prompt.id!r} in {self.folder}", now, stored, remedy=REMEDY)

    def write_rejected(self, prompt_set: PromptSet) -> None:
        """The rows that are no prompts, one JSON object a line."""
        lines = [json.dumps({"place": r.place, "id": r.id, "reason": r.reason}) + "\n" for r in prompt_set.rejected]
        write_bytes(self.folder / "rejected.jsonl", "".join(lines).encode())

    def finish(self, request: dict[str, Any], prompt_set: PromptSet, extra: dict[str, Any]) -> dict[str, Any]:
        """Check that each prompt has exactly one row and write the manifest. Returns it.

        Raises: DsparkError if a row is missing or double, or if more than half of the rows are errors.
        """
        ids = [prompt.id for prompt in prompt_set.prompts]
        content = summarise(self.parts, set(ids))
        counts = content.counts | {
            "rejected": len(prompt_set.rejected),
            "over_limit": prompt_set.num_over_limit,
            "read": prompt_set.num_read,
        }
        if counts["error"] * 2 > len(ids):
            reason = next(iter(content.errors))
            raise DsparkError(f"{counts['error']} of {len(ids)} prompts ended with an error, mostly: {reason}")
        write_json(self.folder / "selection.json", {"ids": ids})
        manifest = {
            "format": FORMAT,
            "complete": True,
            "fingerprint": content.fingerprint,
            "request": request,
            "prompts": prompt_set.fingerprint,
            "counts": counts,
            "errors": content.errors,
        } | extra
        write_json(self.folder / "manifest.json", manifest)
        return manifest


@dataclass(frozen=True)
class AnswerSet:
    """A complete set of answers."""

    folder: Location
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of ids and tokens: two sets that differ in one token differ here."""
        return str(self.manifest["fingerprint"])

    @property
    def target(self) -> dict[str, Any]:
        """The TargetConfig that answered, as plain values."""
        return dict(self.manifest["target"])

    @property
    def target_identity(self) -> dict[str, Any]:
        return dict(self.manifest["request"]["target"])

    @property
    def chat(self) -> dict[str, Any]:
        """The ChatConfig in force, as plain values."""
        return dict(self.manifest["request"]["chat"])

    def rows(self, *, statuses: Collection[str] = STATUSES) -> Iterator[dict[str, Any]]:
        """Rows as plain dictionaries, each id once; `statuses` picks by outcome (train on "ok" alone)."""
        selected = set(read_json(self.folder / "selection.json")["ids"])
        for row in read_rows(self.folder / "parts"):
            if row["id"] in selected and row["status"] in statuses:
                yield row


def read_answers(folder: str | Location) -> AnswerSet:
    """The answers in a folder. Raises: MissingInput if there are none or the set is not complete."""
    folder = locate(folder)
    manifest = AnswerStore(folder).manifest
    if manifest is None:
        state = "incomplete" if (folder / "request.json").is_file() else "not found"
        raise MissingInput(f"answers {state}: {folder}; run python jobs/generate.py with output={folder} first")
    if manifest.get("format") != FORMAT:
        raise Mismatch(
            f"answers {folder} have format {manifest.get('format')!r}, not {FORMAT}; make them again with --fresh"
        )
    return AnswerSet(folder, manifest)
