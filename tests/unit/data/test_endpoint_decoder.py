"""Answers from servers as rows: exact ids, cuts told, every prompt accounted for, resumed by prompt id."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from dspark.chat import ChatConfig
from dspark.config import build_config
from dspark.data.answers import AnswerStore, GenerateConfig
from dspark.data.backend import BackendConfig
from dspark.data.decoding import Completion, DecodeRequest, DecodeRules
from dspark.data.endpoint_decoder import AnswerReader, EndpointDecoder
from dspark.data.endpoint_pool import RequestRejected
from dspark.data.prompts import Prompt
from dspark.data.regeneration import Answerer, decode_rules
from dspark.engine.sampling import SamplingParams
from dspark.errors import DsparkError
from dspark.targets import load_tokenizer
from scripted_server import MODEL, STOP_ID, ScriptedServer, output_of

RULES = DecodeRules(sampling=SamplingParams(temperature=0.0), stop_ids=(2, 0), vocabulary_size=320)
REQUEST = DecodeRequest("p", [5, 6, 7], max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(build_config(GenerateConfig, content(tiny_target, "unused")).target)


def content(target: Path, output: Any, *urls: str, **backend: Any) -> dict[str, Any]:
    return {
        "prompts": [{"path": "unused.jsonl"}],
        "target": {"name": str(target), "dtype": "float32"},
        "output": str(output),
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 20},
        "rows_per_part": 4,
        "backend": {"kind": "openai", "base_urls": urls, "model": MODEL, "backoff_s": 0.01} | backend if urls else {},
    }


def prompts(count: int, *, turns: int = 1) -> list[Prompt]:
    said = [[{"role": "user", "content": f"question {n} {t}"} for t in range(turns)] for n in range(count)]
    return [Prompt(f"p{n}", "math", "train", messages) for n, messages in enumerate(said)]


def answer(config: GenerateConfig, wanted: list[Prompt], *, stop_after_parts: int | None = None) -> dict[str, Any]:
    """Rows by id of all parts in the folder, as a run leaves them that may end early."""
    tokenizer = load_tokenizer(config.target)
    store = AnswerStore(config.output)
    run = store.begin({})
    done = store.done_ids()
    rules = decode_rules(config, SamplingParams(temperature=0.7, top_p=0.9, top_k=5), tokenizer)
    with EndpointDecoder(config.backend, rules, tokenizer, config.chat) as decoder:
        answerer = Answerer(config, decoder, tokenizer, run, max_open=2 * decoder.capacity)
        parts = answerer.answer([prompt for prompt in wanted if prompt.id not in done])
        for number, _ in enumerate(parts, start=1):
            if number == stop_after_parts:
                parts.close()
                break
    rows = rows_of(store)
    assert max(Counter(row["id"] for row in rows).values()) == 1
    return {row["id"]: row for row in rows}


def rows_of(store: AnswerStore) -> list[dict[str, Any]]:
    from dspark.data.answer_parts import read_rows

    return list(read_rows(store.parts))


def test_rows_hold_the_ids_the_target_saw_and_wrote(tiny_target: Path, tmp_path: Path) -> None:
    with ScriptedServer() as one, ScriptedServer() as two:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path, one.url, two.url, concurrency=2))
        rows = answer(config, prompts(30, turns=2))
        sent = {tuple(body["prompt"]): body for server in (one, two) for body in server.bodies}
        assert min(len(one.bodies), len(two.bodies)) > 10
    assert rows.keys() == {f"p{n}" for n in range(30)}
    reasons: Counter[str] = Counter()
    for row in rows.values():
        assert (row["status"], len(row["turns"])) == ("ok", 2)
        for turn in row["turns"]:
            ids, reason = output_of(turn["prompt_ids"], 20)
            assert (turn["output_ids"], turn["finish_reason"]) == (ids, reason)
            assert tuple(turn["prompt_ids"]) in sent
            reasons[reason] += 1
    assert len(sent) == 60
    assert reasons["stop"] == 60


def test_requests_carry_the_configs_sampling_and_each_rows_seed(tiny_target: Path, tmp_path: Path) -> None:
    with ScriptedServer() as server:
        answer(build_config(GenerateConfig, content(tiny_target, tmp_path, server.url)), prompts(4))
        bodies = server.bodies
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 20}
    assert all(sampling.items() <= body.items() for body in bodies)
    assert all(body["return_token_ids"] and body["model"] == MODEL for body in bodies)
    assert len({body["seed"] for body in bodies}) == 4
    with ScriptedServer() as server:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path / "b", server.url, send_seed=False))
        answer(config, prompts(1))
        assert "seed" not in server.bodies[0]


def test_cut_answers_are_marked_and_get_no_stop_token(tiny_target: Path, tmp_path: Path) -> None:
    plain = content(tiny_target, tmp_path)
    with ScriptedServer() as server:
        plain = content(tiny_target, tmp_path, server.url) | {"sampling": {"max_new_tokens": 5}}
        rows = answer(build_config(GenerateConfig, plain), prompts(12))
    turns = [turn for row in rows.values() for turn in row["turns"]]
    cut = [turn for turn in turns if turn["finish_reason"] == "length"]
    assert 0 < len(cut) < 12
    assert all(len(turn["output_ids"]) == 5 and STOP_ID not in turn["output_ids"] for turn in cut)


def test_a_run_that_was_stopped_goes_on_and_asks_for_what_is_missing_only(tiny_target: Path, tmp_path: Path) -> None:
    with ScriptedServer() as server:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path, server.url, concurrency=2))
        before = answer(config, prompts(20), stop_after_parts=2)
        assert len(before) == 8
        server.bodies.clear()
        changed = build_config(GenerateConfig, content(tiny_target, tmp_path, server.url, concurrency=7))
        after = answer(changed, prompts(20))
        assert len(server.bodies) == 12
    assert len(after) == 20
    assert before.items() <= after.items()


def test_one_prompt_that_cannot_be_answered_is_a_row_with_its_reason(tiny_target: Path, tmp_path: Path) -> None:
    faults: list[Any] = [(500, {})] * 3
    with ScriptedServer(faults) as server:
        config = build_config(
            GenerateConfig, content(tiny_target, tmp_path, server.url, concurrency=1, max_retries=1, max_failures=2)
        )
        with pytest.raises(DsparkError, match="every endpoint fails"):
            answer(config, prompts(3))
    with ScriptedServer([0.0, (400, {})]) as server:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path / "b", server.url, concurrency=1))
        rows = answer(config, prompts(3))
    assert Counter(row["status"] for row in rows.values()) == {"ok": 2, "error": 1}
    (error,) = [row["error"] for row in rows.values() if row["error"]]
    assert error.startswith("endpoint: refused with status 400")


def test_settings_that_fit_no_request_stop_the_run(tiny_target: Path, tmp_path: Path) -> None:
    with ScriptedServer([(400, {})] * 999) as server:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path, server.url, concurrency=2))
        with pytest.raises(DsparkError, match=r"none of the first \d+ requests was answered well: endpoint: refused"):
            answer(config, prompts(50))
        assert len(server.bodies) < 20


def test_a_server_without_token_ids_is_refused_with_the_remedy(tiny_target: Path, tmp_path: Path) -> None:
    def without_ids(_body: dict[str, Any], answer: dict[str, Any]) -> None:
        del answer["choices"][0]["token_ids"]

    with ScriptedServer(change=without_ids) as server:
        config = build_config(GenerateConfig, content(tiny_target, tmp_path, server.url))
        with pytest.raises(DsparkError, match=r"return no token ids .*backend\.retokenize=true"):
            answer(config, prompts(3))


def test_messages_go_to_servers_that_render_them(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer_of = load_tokenizer(build_config(GenerateConfig, content(tiny_target, "o")).target)
    chat = ChatConfig(system_prompt="be brief", template_options={"flag": True})

    def with_prompt_ids(body: dict[str, Any], answer: dict[str, Any]) -> None:
        encoded = tokenizer_of.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        answer["prompt_token_ids"] = list(encoded["input_ids"])

    with ScriptedServer(change=with_prompt_ids) as server:
        plain = content(tiny_target, tmp_path, server.url, api="chat") | {"chat": chat.model_dump()}
        rows = answer(build_config(GenerateConfig, plain), prompts(2))
        assert server.bodies[0]["messages"][0] == {"role": "system", "content": "be brief"}
        assert server.bodies[0]["chat_template_kwargs"] == {"flag": True}
    assert {row["status"] for row in rows.values()} == {"ok"}


def reader(tokenizer: PreTrainedTokenizerBase, **backend: Any) -> AnswerReader:
    config = build_config(BackendConfig, {"kind": "openai", "base_urls": ["http://a/v1"], "model": "m"} | backend)
    return AnswerReader(RULES, tokenizer, config)


def choice(ids: list[int] | None, reason: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"finish_reason": reason, "token_ids": ids, "text": ""} | fields]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (choice([9, 8, 2]), ([9, 8, 2], "stop")),
        (choice([9, 8, 0]), ([9, 8, 0], "stop")),  # any of the declared stop tokens
        (choice([9, 8], stop_reason=0), ([9, 8, 0], "stop")),
        (choice([9, 8], matched_stop=2), ([9, 8, 2], "stop")),
        (choice([9, 0, 8, 2]), ([9, 0], "stop")),  # the server does not know of the first one
        (choice([1, 2, 3, 4, 5, 6][:1] * 6, "length"), ([1] * 6, "length")),
        (choice([9] * 9, "length"), ([9] * 6, "length")),
        (choice([9, 8], "length"), ([9, 8], "length")),  # a limit of the server's own
        (choice([9, 2], prompt_token_ids=[5, 6, 7]), ([9, 2], "stop")),
    ],
)
def test_ids_are_cut_as_everywhere(
    tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any], expected: tuple[list[int], Any]
) -> None:
    assert reader(tokenizer).read(REQUEST, answer) == Completion("p", *expected)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (choice([9, 8], "content_filter"), "finish_reason 'content_filter'"),
        ({"choices": []}, "finish_reason None"),
        (choice([9, 8]), "something else than a stop token"),
        (choice([9, 320, 2]), "outside of the target's vocabulary"),
        (choice([9, -1, 2]), "outside of the target's vocabulary"),
        (choice([9, 2], prompt_token_ids=[1, 5, 6, 7]), "saw another prompt"),
    ],
)
def test_what_is_in_doubt_is_rejected_by_reason(
    tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRejected, match=reason):
        reader(tokenizer).read(REQUEST, answer)


Text = Callable[[], dict[str, Any]]


def text_answer(text: str, reason: str = "stop", tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3} | ({} if tokens is None else {"completion_tokens": tokens})
    return {"choices": [{"finish_reason": reason, "text": text} | fields], "usage": usage}


def test_text_is_tokenised_where_the_config_allows_it(tokenizer: PreTrainedTokenizerBase) -> None:
    request = DecodeRequest("p", [5, 6, 7], max_tokens=60, seed=1)
    ids = tokenizer("hello question", add_special_tokens=False)["input_ids"]
    allowed = reader(tokenizer, retokenize=True)
    for tokens in (None, len(ids), len(ids) + 1):
        found = allowed.read(request, text_answer("hello question", tokens=tokens))
        assert found == Completion("p", [*ids, tokenizer.eos_token_id], "stop")
    assert allowed.read(request, text_answer("hello question", stop_reason=0)).output_ids == [*ids, 0]
    assert allowed.read(request, text_answer("hello question", "length")) == Completion("p", ids, "length")
    assert allowed.read(request, choice([9, 2])).output_ids == [9, 2]  # ids win where they are there
    message = {"choices": [{"finish_reason": "length", "message": {"content": "hello"}}], "usage": {"prompt_tokens": 3}}
    assert reader(tokenizer, retokenize=True, api="chat").read(request, message).finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (text_answer("half a char \ufffd"), "half a character"),
        (text_answer("hello question", tokens=40), "another number of tokens"),
        (text_answer("hello question", "length", tokens=6), "another number of tokens"),
        (text_answer("it says <|im_end|> here"), "spells a stop token"),
    ],
)
def test_text_whose_ids_are_in_doubt_is_rejected_by_reason(
    tokenizer: PreTrainedTokenizerBase, answer: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRejected, match=reason):
        reader(tokenizer, retokenize=True).read(REQUEST, answer)


def test_text_that_does_not_come_back_is_rejected(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(build_config(GenerateConfig, content(tiny_target, "o")).target)
    from tokenizers.normalizers import Lowercase

    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(RequestRejected, match="gives another text"):
        reader(tokenizer, retokenize=True).read(REQUEST, text_answer("Hello"))


def test_a_chats_prompt_is_checked_by_its_length_where_there_are_no_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = text_answer("hello", "length") | {"usage": {"prompt_tokens": 4}}
    with pytest.raises(RequestRejected, match="prompt's length"):
        reader(tokenizer, retokenize=True, api="chat").read(REQUEST, answer)
    with pytest.raises(DsparkError, match="return no token ids"):
        reader(tokenizer, api="chat").read(REQUEST, choice([9, 2]))


@pytest.mark.parametrize("name", ["batch_size", "num_workers", "max_kv_tokens", "threads_per_worker"])
def test_what_has_no_effect_with_endpoints_is_refused(tiny_target: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no effect with backend.kind openai"):
        build_config(GenerateConfig, content(tiny_target, "o", "http://a/v1") | {name: 7})
