"""From messages to the ids a target sees, and from what it saw and said to supervised sequences."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from dspark.config import Config
from dspark.errors import one_line

PREFLIGHT_ROWS = 16

Message = Mapping[str, Any]
# What a template may raise on what it is given, beside the errors of its own language.
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TemplateError, TypeError, ValueError)


class ChatConfig(Config):
    """How messages become a prompt; the same in every stage, recorded beside what was made with it."""

    system_prompt: str | None = None
    """Put before conversations that bring no system turn of their own; None leaves it to the template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the chat template, such as `enable_thinking: false`."""


@dataclass(frozen=True)
class TokenSequence:
    """Token ids with a mask that is 1 on those the target itself wrote."""

    input_ids: list[int]
    loss_mask: list[int]

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat: ChatConfig,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_options: Mapping[str, Any] | None = None,
    begins_answer: bool = True,
) -> list[int]:
    """Ids of a conversation up to where the next answer begins.

    A system turn of the conversation's own wins over `chat.system_prompt`, and `template_options` over those of `chat`.
    tools: functions an answer may call, in OpenAI's form. begins_answer: whether what begins one follows the messages.
    Raises: ValueError with the template's reason if it refuses the conversation, or if there is no template.
    """
    conversation = with_system_prompt(messages, chat)
    if tokenizer.chat_template is None:
        raise ValueError(f"target {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned target")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation,
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=begins_answer,
            tokenize=True,
            return_dict=True,
            **(chat.template_options | dict(template_options or {})),
        )
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"chat template refuses the conversation: {one_line(error)}") from error
    return list(encoded["input_ids"])


def with_system_prompt(messages: Sequence[Message], chat: ChatConfig) -> list[dict[str, Any]]:
    """The conversation as a template gets it: `chat.system_prompt` first, unless it has a system turn of its own."""
    conversation = [dict(message) for message in messages]
    has_system = any(message["role"] == "system" for message in conversation)
    if chat.system_prompt is not None and not has_system:
        conversation.insert(0, {"role": "system", "content": chat.system_prompt})
    return conversation


def training_sequences(turns: Iterable[Mapping[str, Any]]) -> list[TokenSequence]:
    """Supervised sequences of one conversation, the mask 1 exactly on `output_ids`.

    turns: as stored with the answer, `prompt_ids` the target saw and `output_ids` it gave, a stop token included.

    A turn whose prompt begins with everything so far extends the sequence. Otherwise a new one begins with it: the
    template may have rewritten the history, or an answer that was cut tokenises differently as text. No text is ever
    tokenised again to find the mask, so an answer's thinking part is supervised where the target wrote it, and what
    the template makes of it later is prompt.
    """
    sequences: list[TokenSequence] = []
    for turn in turns:
        prompt_ids, output_ids = list(turn["prompt_ids"]), list(turn["output_ids"])
        so_far = sequences[-1] if sequences else None
        if so_far is not None and prompt_ids[: len(so_far.input_ids)] == so_far.input_ids:
            sequences.pop()
            mask = so_far.loss_mask + [0] * (len(prompt_ids) - len(so_far.input_ids))
        else:
            mask = [0] * len(prompt_ids)
        sequences.append(TokenSequence(prompt_ids + output_ids, mask + [1] * len(output_ids)))
    return sequences


def truncate(sequence: TokenSequence, max_length: int) -> TokenSequence:
    """The first `max_length` tokens with their mask; no end token is added after a cut."""
    return TokenSequence(sequence.input_ids[:max_length], sequence.loss_mask[:max_length])


def require_supervision(sequences: Iterable[TokenSequence], *, target: str) -> None:
    """Check the first sequences before hours are spent on them.

    Raises: ValueError naming the target if none of them has a token to learn from.
    """
    first = list(islice(sequences, PREFLIGHT_ROWS))
    if not any(sequence.num_supervised for sequence in first):
        raise ValueError(
            f"nothing to learn from: the first {len(first)} sequences made with the chat template of {target!r} hold "
            "no token of an answer; check chat.template_options and max_length"
        )


def require_renderable(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Sequence[Message]], chat: ChatConfig
) -> None:
    """Check that the target's template takes at least one of the first conversations.

    Raises: ValueError naming the target, with the template's reason.
    """
    reason = None
    for messages in islice(conversations, PREFLIGHT_ROWS):
        try:
            render_prompt(tokenizer, messages, chat)
            return
        except ValueError as error:
            reason = error
    if reason is not None:
        raise ValueError(f"target {tokenizer.name_or_path!r} takes none of the first prompts: {reason}")
