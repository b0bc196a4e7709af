"""A small tokenizer of the sentencepiece kind: words begin with ▁, and what it does not know becomes byte pieces."""

import tokenizers
import transformers

SPECIALS = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2


def byte_fallback_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Knows lower-case letters, their pairs with ▁ and a little punctuation; decoding drops the first space."""
    letters = [chr(ord("a") + i) for i in range(26)]
    merges = [("▁", letter) for letter in letters]
    tokens = [
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        *".,!?",
        *(left + right for left, right in merges),
    ]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
