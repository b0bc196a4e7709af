"""The table of every request field in docs/api.md, made of the classes that read requests."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dspark.serving.openai_schema import ChatRequest, CompletionRequest
from dspark.serving.request_fields import UNSUPPORTED, WITHOUT_EFFECT

Treatment = Literal["honoured", "refused", "ignored"]


@dataclass(frozen=True)
class FieldRow:
    """endpoints: of "chat" and "text". text: what it does, or why it does nothing."""

    name: str
    endpoints: tuple[str, ...]
    treatment: Treatment
    text: str


def field_rows() -> list[FieldRow]:
    """One per field of /v1/chat/completions and /v1/completions, by treatment and name."""
    return [*sorted(_honoured(), key=lambda row: row.name), *_refused(), *_ignored()]


def as_markdown() -> str:
    """The rows as a table."""
    lines = ["| field | endpoint | | what it does, or why not |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {', '.join(row.endpoints)} | {row.treatment} | {row.text} |" for row in field_rows()]
    return "\n".join(lines) + "\n"


def _honoured() -> Iterator[FieldRow]:
    chat, text = ChatRequest.model_fields, CompletionRequest.model_fields
    for name in chat | text:
        endpoints = tuple(kind for kind, fields in (("chat", chat), ("text", text)) if name in fields)
        described = (chat if name in chat else text)[name].description
        assert described is not None, f"{name} has no docstring"
        yield FieldRow(name, endpoints, "honoured", " ".join(described.split()))


def _refused() -> Iterator[FieldRow]:
    for name, refused in sorted(UNSUPPORTED.items()):
        if name in ChatRequest.model_fields:
            continue  # of which single values are refused
        values = " or ".join(f"`{json.dumps(value)}`" for value in refused.neutral)
        accepted = f"; {values} asks for nothing and is accepted" if values else ""
        yield FieldRow(name, ("chat", "text"), "refused", refused.reason + accepted)


def _ignored() -> Iterator[FieldRow]:
    for name, reason in sorted(WITHOUT_EFFECT.items()):
        yield FieldRow(name, ("chat", "text"), "ignored", reason)
