"""Models, version, tokens of a text and back: over HTTP against a tiny engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.serving.target_replica import TargetReplica
from tiny_serving import CHAT, MODEL, TEXT, ask, chat, completion, error_of, post, serve_config
from tool_calling_target import ASKED, TOOLS

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


@pytest.fixture(scope="module")
def replica(tool_calling_target: Path) -> Iterator[TargetReplica]:
    replica = TargetReplica(serve_config(tool_calling_target))
    yield replica
    replica.close()


def tokens_of(replica: TargetReplica, **fields: Any) -> list[int]:
    response = post(replica, TOKENIZE, fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.keys() == {"count", "max_model_len", "tokens", "token_strs"}  # vLLM's
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    return list(answer["tokens"])


def test_a_text_becomes_the_ids_that_are_served(replica: TargetReplica) -> None:
    served = post(replica, TEXT, completion("the question", return_token_ids=True)).json()
    assert tokens_of(replica, model=MODEL, prompt="the question") == served["choices"][0]["prompt_token_ids"]
    assert tokens_of(replica, prompt="") == []


def test_a_conversation_becomes_the_ids_that_are_served(replica: TargetReplica) -> None:
    body = chat("hello", tools=TOOLS, chat_template_kwargs={"shout": True}, return_token_ids=True)
    served = post(replica, CHAT, body).json()["prompt_token_ids"]
    fields = {name: body[name] for name in ("messages", "tools", "chat_template_kwargs")}
    assert tokens_of(replica, **fields) == served
    without = tokens_of(replica, **fields, add_generation_prompt=False)
    assert len(without) < len(served)


def test_ids_become_the_text_again(replica: TargetReplica) -> None:
    for text in ("the question", "", "é ✓ 한국어 \n"):
        tokens = tokens_of(replica, prompt=text)
        assert post(replica, DETOKENIZE, {"tokens": tokens}).json() == {"prompt": text}
    told = post(replica, DETOKENIZE, {"tokens": tokens_of(replica, messages=ASKED)}).json()["prompt"]
    assert told.startswith("<|im_start|>user\nhello<|im_end|>")


def test_the_tokens_own_texts_are_told_when_asked_for(replica: TargetReplica) -> None:
    answer = post(replica, TOKENIZE, {"prompt": "hello the", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["hello", "Ġt", "he"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": ASKED}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": ASKED, "add_special_tokens": True}, "add_special_tokens"),
        (TOKENIZE, {"prompt": "a", "tools": TOOLS}, "tools"),
        (TOKENIZE, {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        (TOKENIZE, {"messages": ASKED, "continue_final_message": True}, "continue_final_message"),
        (TOKENIZE, {"messages": ASKED, "chat_template": "{{ 1 }}"}, "chat_template"),
        (TOKENIZE, {"promt": "a"}, "promt"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": [320]}, "tokens"),
        (DETOKENIZE, {"tokens": [2**70]}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens.0"),
        (DETOKENIZE, {"tokens": "a"}, "tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(replica: TargetReplica, path: str, body: Any, param: str) -> None:
    response = post(replica, path, body)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_another_model_is_not_found(replica: TargetReplica) -> None:
    assert post(replica, TOKENIZE, {"model": "other", "prompt": "a"}).status_code == 404
    assert post(replica, DETOKENIZE, {"model": "other", "tokens": []}).status_code == 404


def test_they_ask_for_the_key_as_well(replica: TargetReplica, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n")

    async def talk(client: httpx.AsyncClient) -> list[int]:
        asked = [await client.post(path, json={}) for path in (TOKENIZE, DETOKENIZE)]
        asked += [await client.get(path) for path in (f"/v1/models/{MODEL}", "/version", "/openapi.json")]
        assert [one.headers.get("www-authenticate") for one in asked] == ["Bearer"] * 3 + [None] * 2
        return [one.status_code for one in asked]

    config = serve_config("unused", api_keys_file=str(tmp_path / "keys"))
    assert ask(replica, config, talk) == [401, 401, 401, 200, 200]
