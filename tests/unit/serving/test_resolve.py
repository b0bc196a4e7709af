"""API requests as the engine takes them: the target's own template, stop tokens and context."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from dspark.chat import ChatConfig
from dspark.engine.config import EngineConfig
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, RequestRefused
from dspark.serving.resolve import RequestResolver
from dspark.serving.tokenization import DetokenizeRequest, TokenizeRequest
from dspark.targets import TargetConfig


@pytest.fixture(scope="module")
def loaded(tiny_target: Path) -> LoadedEngine:
    config = EngineConfig(page_size=4, kv_tokens=1024)
    return load_engine(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"), "ngram", config=config)


def resolver(loaded: LoadedEngine, chat: ChatConfig | None = None, **limits: Any) -> RequestResolver:
    return RequestResolver(loaded, chat or ChatConfig(), LimitsConfig(**{"max_output_tokens": 100} | limits))


def chat_request(*contents: str, **fields: Any) -> ChatRequest:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return ChatRequest(model="m", messages=messages, **fields)


def text_request(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, **fields)


def test_a_conversation_is_rendered_by_the_targets_template(loaded: LoadedEngine) -> None:
    request = resolver(loaded).resolve("r", chat_request("hello", "the answer", "question"))
    text = loaded.tokenizer.decode(list(request.prompt_ids))
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe answer<|im_end|>\n"
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_prompt_of_the_training_is_served_too(loaded: LoadedEngine) -> None:
    request = resolver(loaded, ChatConfig(system_prompt="the number")).resolve("r", chat_request("hello"))
    assert loaded.tokenizer.decode(list(request.prompt_ids)).startswith("<|im_start|>system\nthe number<|im_end|>")


def test_a_text_is_tokenised_and_ids_are_taken_as_they_are(loaded: LoadedEngine) -> None:
    text = resolver(loaded).resolve("r", text_request("the question"))
    assert list(text.prompt_ids) == loaded.tokenizer("the question")["input_ids"]
    assert resolver(loaded).resolve("r", text_request([7, 8])).prompt_ids == (7, 8)


def test_what_a_tokenizer_puts_around_a_text_can_be_left_out(loaded: LoadedEngine) -> None:
    own = resolver(loaded)
    own.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    plain = tuple(loaded.tokenizer("hello")["input_ids"])
    assert own.resolve("r", text_request("hello")).prompt_ids == (1, *plain)
    assert own.resolve("r", text_request("hello", add_special_tokens=False)).prompt_ids == plain
    asked = TokenizeRequest(prompt="hello", return_token_strs=True)
    answer = own.tokenize(asked)
    assert (answer.tokens, answer.count) == ([1, *plain], 1 + len(plain))
    assert answer.token_strs == own.tokenizer.convert_ids_to_tokens([1, *plain])
    assert own.tokenize(TokenizeRequest(prompt="hello", add_special_tokens=False)).tokens == list(plain)
    assert own.detokenize(DetokenizeRequest(tokens=[1, *plain])).prompt == "<|im_start|>hello"


def test_every_declared_stop_token_stops_unless_ignored(loaded: LoadedEngine) -> None:
    assert resolver(loaded).resolve("r", text_request("a")).stop_ids == {0, 2}
    assert resolver(loaded).resolve("r", text_request("a", ignore_eos=True)).stop_ids == frozenset()


def test_stop_ids_of_a_request_come_beside_the_targets_own(loaded: LoadedEngine) -> None:
    assert resolver(loaded).resolve("r", text_request("a", stop_token_ids=[7])).stop_ids == {0, 2, 7}
    assert resolver(loaded).resolve("r", text_request("a", stop_token_ids=[7], ignore_eos=True)).stop_ids == {7}


def test_the_rest_is_handed_on(loaded: LoadedEngine) -> None:
    request = resolver(loaded).resolve(
        "r", text_request("a", temperature=0.5, top_k=4, stop=["x"], seed=9, verify_length=2, priority=-1, max_tokens=3)
    )
    assert (request.request_id, request.max_tokens, request.stop_strings) == ("r", 3, ("x",))
    assert (request.seed, request.verify_length, request.sampling.top_k, request.priority) == (9, 2, 4, -1)


def test_limits_by_default(loaded: LoadedEngine) -> None:
    assert resolver(loaded).resolve("r", text_request([5])).max_tokens == 16
    assert resolver(loaded).resolve("r", chat_request("hello")).max_tokens == 100
    assert resolver(loaded).resolve("r", text_request([5] * 505)).max_tokens == 7  # what the context leaves


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (text_request([5] * 512), "prompt"),
        (text_request([5] * 600), "prompt"),
        (text_request([5] * 500, max_tokens=13), "max_tokens"),
        (text_request([5], max_tokens=101), "max_tokens"),
        (text_request([319, 320]), "prompt"),
        (text_request([5] * 31), "prompt"),
        (text_request([5], verify_length=8), "verify_length"),
        (text_request([5], stop_token_ids=[320]), "stop_token_ids"),
        (text_request([5], logit_bias={"320": 1.0}), "logit_bias"),
        (text_request([5], allowed_token_ids=[320]), "allowed_token_ids"),
        (text_request([5], banned_token_ids=[320]), "banned_token_ids"),
        (text_request([5], allowed_token_ids=[3], banned_token_ids=[3]), "banned_token_ids"),
        (text_request([5], min_tokens=4, max_tokens=3), "min_tokens"),
        (text_request([5], min_tokens=1, allowed_token_ids=[0, 2]), "min_tokens"),
        (chat_request("x" * 600), "messages"),
        (chat_request("hello", max_completion_tokens=101), "max_completion_tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(loaded: LoadedEngine, request_: Any, param: str) -> None:
    limits = {"max_prompt_tokens": 30} if request_.model_dump().get("prompt") == [5] * 31 else {}
    with pytest.raises(RequestRefused) as caught:
        resolver(loaded, **limits).resolve("r", request_)
    assert (caught.value.refusal.status, caught.value.refusal.param) == (400, param)


def test_prompt_and_answer_may_fill_the_context(loaded: LoadedEngine) -> None:
    assert resolver(loaded).resolve("r", text_request([5] * 500, max_tokens=12)).max_tokens == 12


def test_an_answer_of_no_given_length_fits_into_the_memory(tiny_target: Path) -> None:
    config = EngineConfig(kv_tokens=64, page_size=16, verify_length=2)
    loaded = load_engine(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"), "ngram", config=config)
    limited = resolver(loaded, max_output_tokens=60)
    asked = limited.resolve("r", CompletionRequest(model="m", prompt=[5] * 50, max_tokens=None))
    loaded.engine.add(asked)
    assert limited.resolve("r", chat_request("hello")).max_tokens < 60
    with pytest.raises(RequestRefused, match="over the context of 57"):
        limited.resolve("r", text_request([5] * 50, max_tokens=8))


def test_the_resolvers_tokenizer_is_its_own(loaded: LoadedEngine) -> None:
    assert resolver(loaded).tokenizer is not loaded.tokenizer
