"""What is said of every request field: honoured, refused by name, or ignored because it changes no answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """A field that would change the answer in a way this server does not. neutral: values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether the value asks for nothing; 0 is not false here, since `logprobs: 0` does ask for something."""
        return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in self.neutral)


CONSTRAINED = "output is not constrained to a grammar"

# Fields of OpenAI's and vLLM's requests. What the endpoints do read is declared with them.
UNSUPPORTED: Mapping[str, Unsupported] = {
    "audio": Unsupported("answers are text"),
    "bad_words": Unsupported("only single tokens are banned: banned_token_ids", ([],)),
    "best_of": Unsupported("every answer that is made is returned: n", (1,)),
    "cache_salt": Unsupported("the prefix cache is not divided by salts; engine.prefix_cache turns it off"),
    "chat_template": Unsupported("prompts are made with the target's own template"),
    "continue_final_message": Unsupported("an answer begins with a message of its own", (False,)),
    "documents": Unsupported("put them into a message", ([],)),
    "echo": Unsupported("the prompt is not repeated, nor its tokens' probabilities told", (False,)),
    "function_call": Unsupported("use tool_choice", ("none",)),
    "functions": Unsupported("use tools", ([],)),
    "guided_choice": Unsupported(CONSTRAINED),
    "guided_grammar": Unsupported(CONSTRAINED),
    "guided_json": Unsupported(CONSTRAINED),
    "guided_regex": Unsupported(CONSTRAINED),
    "include_stop_str_in_output": Unsupported("the text ends before a stop string", (False,)),
    "length_penalty": Unsupported("there is no beam search", (1.0,)),
    "logits_processors": Unsupported("no code of a client is run", ([],)),
    "mm_processor_kwargs": Unsupported("prompts are text", ({},)),
    "modalities": Unsupported("answers are text", (["text"],)),
    "moderation": Unsupported("nothing is moderated"),
    "prediction": Unsupported("what repeats the prompt is drafted from it without being told"),
    "prompt_logprobs": Unsupported("probabilities are told of the answer's tokens: logprobs"),
    "reasoning_effort": Unsupported("where the template knows it, send it in chat_template_kwargs"),
    "request_id": Unsupported("send it as the header X-Request-Id"),
    "response_format": Unsupported(CONSTRAINED, ({"type": "text"},)),
    "return_tokens_as_token_ids": Unsupported("return_token_ids tells ids beside the text", (False,)),
    "skip_special_tokens": Unsupported("special tokens have no text", (True,)),
    "spaces_between_special_tokens": Unsupported("special tokens have no text", (True, False)),
    "structured_outputs": Unsupported(CONSTRAINED),
    "suffix": Unsupported("nothing is inserted into a text", ("",)),
    "thinking_token_budget": Unsupported("thinking is not told apart from the rest of an answer"),
    "tool_choice": Unsupported(f"{CONSTRAINED}, so no call can be forced", ("none", "auto")),
    "truncate_prompt_tokens": Unsupported("a prompt is read whole, or refused as too long"),
    "use_beam_search": Unsupported("there is no beam search", (False,)),
    "verbosity": Unsupported("where the template knows it, send it in chat_template_kwargs"),
    "web_search_options": Unsupported("nothing is searched for"),
}

# Say who asks or how it is billed and stored, never what is answered.
WITHOUT_EFFECT: Mapping[str, str] = {
    "metadata": "nothing is stored that it could describe",
    "prompt_cache_key": "text that was read is found by its content alone",
    "prompt_cache_options": "how long text stays findable is the server's",
    "prompt_cache_retention": "how long text stays findable is the server's",
    "safety_identifier": "users are not told apart",
    "user": "users are not told apart",
}
