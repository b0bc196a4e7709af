"""A random target model, small enough for a test, in the form in which real ones are published."""

from pathlib import Path

import tokenizers
import torch
import transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
WORDS = ("system", "user", "assistant", "hello", "the", " the", "ing", "question", "answer", "number")


def make_tiny_target(
    folder: str | Path,
    *,
    vocab_size: int = 320,
    tied: bool = True,
    padded_rows: int = 0,
    hidden: int = 64,
    layers: int = 4,
    max_length: int = 512,
    eos: int | list[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write a random float32 Llama with a byte-level tokenizer of `vocab_size` tokens into `folder`; returns `folder`.

    The model's embedding has `padded_rows` rows more than the tokenizer has tokens. `eos` goes into the generation
    config; by default both `<|im_end|>` and `<|endoftext|>` end a generation.
    """
    folder = Path(folder)
    tokenizer = tiny_tokenizer(vocab_size=vocab_size, max_length=max_length)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + padded_rows,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,  # wide enough that greedy output is not one token repeated
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1,
        eos_token_id=[2, 0] if eos is None else eos,
        pad_token_id=2,
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
    )
    model.save_pretrained(folder)
    return folder


def tiny_tokenizer(*, vocab_size: int = 320, max_length: int = 512) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens that round-trips any text. `vocab_size` >= 259."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: token_id for token_id, token in enumerate([*SPECIALS, *alphabet])}
    merges: list[tuple[str, str]] = []
    for left, right in _merge_candidates(alphabet):
        if len(vocabulary) == vocab_size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    if len(vocabulary) != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is not reachable; choose between 259 and {len(vocabulary)}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=max_length,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merge_candidates(alphabet: list[str]) -> list[tuple[str, str]]:
    """Merges that build the roles' names and a few words, then every pair of lower-case letters."""
    merges = []
    for word in WORDS:
        word = word.replace(" ", "Ġ")
        merges += [(word[:end], word[end]) for end in range(1, len(word))]
    letters = [token for token in alphabet if token.isascii() and token.islower()]
    return merges + [(left, right) for left in letters for right in letters]


def small_vocabulary_target(vocab_size: int, *, initializer_range: float = 0.6) -> transformers.PreTrainedModel:
    """A random Llama of a few tokens, without a tokenizer: its distributions can be written out."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()
