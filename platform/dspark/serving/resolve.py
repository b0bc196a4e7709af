"""From a request of the API to one of the engine, with what only the target knows: template, vocabulary, context."""

import copy

from dspark.chat import ChatConfig
from dspark.engine.loading import LoadedEngine
from dspark.engine.request import GenerationRequest
from dspark.engine.sampling import sampling_problem
from dspark.serving.chat_prompts import ChatPrompts
from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import ChatRequest, CompletionRequest, GenerateRequest, RequestRefused
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from dspark.serving.tool_calls import CLOSE

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it

TOO_LONG = "context_length_exceeded"


class RequestResolver:
    """Makes engine requests; what cannot be one is refused with the parameter's name."""

    def __init__(self, loaded: LoadedEngine, chat: ChatConfig, limits: LimitsConfig) -> None:
        # Its own: a fast tokenizer that encodes here while the engine's thread decodes fails as "already borrowed".
        self.tokenizer = copy.deepcopy(loaded.tokenizer)
        self._chat = ChatPrompts(self.tokenizer, chat)
        self._limits = limits
        self._stop_ids = loaded.stop_ids
        self._block_size = loaded.engine.block_size
        self._context = loaded.engine.max_request_tokens
        self._vocabulary_size = loaded.target.vocabulary_size

    def resolve(self, request_id: str, request: GenerateRequest) -> GenerationRequest:
        """Raises: RequestRefused (400)."""
        if request.verify_length is not None and request.verify_length > self._block_size:
            message = f"verify_length {request.verify_length} is over the drafter's block of {self._block_size}"
            raise RequestRefused.of(message, param="verify_length")
        prompt_ids = self._prompt_ids(request)
        for token_id in request.stop_token_ids:
            self._require_known("stop_token_ids", token_id)
        stop_ids = (frozenset() if request.ignore_eos else self._stop_ids) | {*request.stop_token_ids}
        sampling, max_tokens = request.sampling, self._max_tokens(request, len(prompt_ids))
        problem = sampling_problem(
            sampling, stop_ids=stop_ids, max_tokens=max_tokens, vocabulary_size=self._vocabulary_size
        )
        if problem is not None:
            raise RequestRefused.of(problem[1], param=problem[0])
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            stop_strings=self._stop_strings(request),
            seed=request.seed,
            verify_length=request.verify_length if request.speculation else 0,
            priority=request.priority,
            continues_prompt=isinstance(request, CompletionRequest),
        )

    def _stop_strings(self, request: GenerateRequest) -> tuple[str, ...]:
        """With what ends a call, where only one may be made: the reader of calls needs no closing mark at the end."""
        has_one_call = isinstance(request, ChatRequest) and request.callable_tools and not request.parallel_tool_calls
        return (*request.stop, CLOSE) if has_one_call else tuple(request.stop)

    def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer:
        """Raises: RequestRefused (400)."""
        if request.messages is None:
            adds_specials = request.add_special_tokens is not False
            token_ids = self._encode(request.prompt or "", add_special_tokens=adds_specials)
        else:
            begins_answer = request.add_generation_prompt
            token_ids = self._chat.prompt_ids(
                request.messages, request.tools, request.chat_template_kwargs, begins_answer=begins_answer
            )
        strings = [str(token) for token in self.tokenizer.convert_ids_to_tokens(token_ids)]
        return TokenizeAnswer(
            count=len(token_ids),
            max_model_len=self._context,
            tokens=token_ids,
            token_strs=strings if request.return_token_strs else None,
        )

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer:
        """Raises: RequestRefused (400)."""
        for token_id in request.tokens:
            self._require_known("tokens", token_id)
        return DetokenizeAnswer(prompt=str(self.tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False)))

    def _prompt_ids(self, request: GenerateRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            return self._chat.prompt_ids(request.messages, request.callable_tools, request.chat_template_kwargs)
        assert isinstance(request, CompletionRequest)
        if isinstance(request.prompt, str):
            return self._encode(request.prompt, add_special_tokens=request.add_special_tokens)
        for token_id in request.prompt:
            self._require_known("prompt", token_id)
        return request.prompt

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _require_known(self, param: str, token_id: int) -> None:
        """Raises: RequestRefused for an id that the target does not have."""
        if not 0 <= token_id < self._vocabulary_size:
            message = f"token id {token_id} is outside of the vocabulary of {self._vocabulary_size}"
            raise RequestRefused.of(message, param=param)

    def _max_tokens(self, request: GenerateRequest, num_prompt: int) -> int:
        """Tokens the answer may have. Raises: RequestRefused when prompt or answer are over a limit."""
        most, wanted = self._limits.max_output_tokens, request.token_limit
        room = self._room(request, num_prompt)
        if wanted is None:
            default = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else most
            return min(default, most, room)
        name = request.token_limit_name
        if wanted > most:
            raise RequestRefused.of(f"{name} is {wanted}; this server allows {most}", param=name)
        if wanted > room:
            message = f"prompt ({num_prompt} tokens) and {name} ({wanted}) are over the context of {self._context}"
            raise RequestRefused.of(message, param=name, code=TOO_LONG)
        return wanted

    def _room(self, request: GenerateRequest, num_prompt: int) -> int:
        """Tokens that fit behind the prompt. Raises: RequestRefused when the prompt is too long."""
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        most = self._limits.max_prompt_tokens
        if most is not None and num_prompt > most:
            message = f"the prompt has {num_prompt} tokens; this server allows {most}"
            raise RequestRefused.of(message, param=param, code=TOO_LONG)
        room = self._context - num_prompt
        if room < 1:
            message = f"the prompt has {num_prompt} tokens and leaves no room in the context of {self._context}"
            raise RequestRefused.of(message, param=param, code=TOO_LONG)
        return room
