"""From a conversation of the API to the ids of a prompt, by the target's own template; what that ignores is refused."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from dspark.chat import ChatConfig, render_prompt
from dspark.serving.chat_messages import Tool, has_calls, template_messages
from dspark.serving.openai_schema import MAX_SHOWN, RequestRefused
from dspark.serving.tool_calls import OPEN

RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


class ChatPrompts:
    """Prompts of one tokenizer, for the thread that it is used in."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    def prompt_ids(
        self,
        turns: Sequence[Any],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        begins_answer: bool = True,
    ) -> list[int]:
        """Raises: RequestRefused (400) for what the template refuses, and for what it would not tell the target."""
        self._require_told(turns, tools, options)
        try:
            return render_prompt(
                self._tokenizer,
                template_messages(turns),
                self._chat,
                tools=[tool.for_template() for tool in tools],
                template_options=options,
                begins_answer=begins_answer,
            )
        except ValueError as error:
            raise RequestRefused.of(str(error), param="messages") from None

    def _require_told(self, turns: Sequence[Any], tools: Sequence[Tool], options: Mapping[str, Any]) -> None:
        if self._tokenizer.chat_template is None:
            return  # rendering says so
        if tools and not self._knows("tools", is_with_tools=True):
            raise RequestRefused.of("the target's chat template knows no tools; leave them out", param="tools")
        if tools and OPEN in self._tokenizer.all_special_tokens:
            message = f"{OPEN} is a special token of the target, which has no text, so no call could be read"
            raise RequestRefused.of(message, param="tools")
        if has_calls(turns) and not self._knows("tool_calls", is_with_tools=bool(tools)):
            message = "the target's chat template knows no tool_calls; leave those messages out"
            raise RequestRefused.of(message, param="messages")
        for name in options:
            param = f"chat_template_kwargs.{name[:MAX_SHOWN]}"
            if name in RESERVED or not self._knows(name, is_with_tools=bool(tools)):
                raise RequestRefused.of(
                    f"{param} is no option of the target's chat template; leave it out", param=param
                )

    def _knows(self, name: str, *, is_with_tools: bool) -> bool:
        """Whether the template so much as mentions the name."""
        template = self._tokenizer.get_chat_template(tools=[{}] if is_with_tools else None)
        return re.search(rf"\b{re.escape(name)}\b", template) is not None
