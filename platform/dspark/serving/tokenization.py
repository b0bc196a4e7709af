"""/tokenize and /detokenize in vLLM's form."""

from typing import Any

from pydantic import Field

from dspark.engine.sampling import TokenId
from dspark.serving.chat_messages import MAX_TOOLS, ChatTurn, Tool
from dspark.serving.openai_schema import RequestRefused
from dspark.serving.sampling_fields import RequestBody, Wire


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt as /v1/completions reads it, or messages as /v1/chat/completions does."""

    model: str | None = None
    """May be left out."""
    prompt: str | None = None
    """A text; it or messages, not both."""
    add_special_tokens: bool | None = None
    """As in /v1/completions: true for a prompt; with messages it is the template that adds them."""
    messages: list[ChatTurn] | None = Field(None, min_length=1)
    """A conversation."""
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    """As in /v1/chat/completions."""
    chat_template_kwargs: dict[str, Any] = {}
    """As in /v1/chat/completions."""
    add_generation_prompt: bool = True
    """Of messages: whether the beginning of an answer follows them."""
    return_token_strs: bool = False
    """Tell each token's text in the vocabulary as `token_strs`."""

    def require_consistent(self) -> None:
        """Raises: RequestRefused (400) naming what does not go with the other."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestRefused.of("send either prompt or messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            message = "add_special_tokens is for a prompt; a chat's template adds its own"
            raise RequestRefused.of(message, param="add_special_tokens")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if self.messages is None and name in self.model_fields_set:
                raise RequestRefused.of(f"{name} is for messages", param=name)


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    """May be left out."""
    tokens: list[TokenId]
    """Token ids."""


class TokenizeAnswer(Wire):
    """max_model_len: tokens of prompt and answer together, at most."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Wire):
    """The text, special tokens included."""

    prompt: str
