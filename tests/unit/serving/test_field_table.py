"""The table of fields that people read is the one that the code makes."""

from pathlib import Path

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as text_params

from dspark.serving.field_table import as_markdown, field_rows
from dspark.serving.openai_schema import ChatRequest, CompletionRequest

DOCS = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_documented_table_is_the_codes() -> None:
    assert as_markdown() in DOCS.read_text(encoding="utf-8"), "write field_table.as_markdown() into docs/api.md"


def test_every_field_has_one_row() -> None:
    names = [row.name for row in field_rows()]
    assert len(names) == len(set(names))
    assert set(names) >= ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()


def test_no_field_of_openais_own_client_is_left_unsaid() -> None:
    known = {
        *chat_params.CompletionCreateParamsBase.__annotations__,
        *text_params.CompletionCreateParamsBase.__annotations__,
    }
    assert known <= {row.name for row in field_rows()}
