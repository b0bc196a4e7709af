"""Tests of the batched decoder against its slow twins."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.data.decoding import (
    BatchDecoder,
    Completion,
    Decoder,
    DecodeRequest,
    DecodeRules,
    SequentialDecoder,
    derive_seed,
    make_decoder,
)
from dspark.engine.sampling import SamplingParams

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GREEDY = SamplingParams(temperature=0)


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()


def tiny_qwen() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.3)).eval()


def ragged_requests(count: int, *, max_tokens: int = 24) -> list[DecodeRequest]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [
        DecodeRequest(f"row-{i}", ids, max_tokens - i % 5, derive_seed(0, f"row-{i}", 0))
        for i, ids in enumerate(prompts)
    ]


def rules(
    sampling: SamplingParams = GREEDY, stop_ids: tuple[int, ...] = (2, 17), vocabulary_size: int = VOCABULARY
) -> DecodeRules:
    return DecodeRules(sampling=sampling, stop_ids=stop_ids, vocabulary_size=vocabulary_size)


def run(decoder: Decoder, requests: list[DecodeRequest]) -> dict[str, Completion]:
    for request in requests:
        decoder.submit(request)
    completions: list[Completion] = []
    while not decoder.is_idle:
        completions += decoder.step()
    assert len(completions) == len(requests)
    return {completion.key: completion for completion in completions}


def batch(
    model: PreTrainedModel, decode_rules: DecodeRules, *, num_slots: int = 3, max_kv_tokens: int = 10_000
) -> BatchDecoder:
    return BatchDecoder(model, decode_rules, num_slots=num_slots, max_kv_tokens=max_kv_tokens)


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_qwen])
@pytest.mark.parametrize("num_slots", [1, 3, 20])
def test_greedy_decoding_equals_generate_token_for_token(make_model: Any, num_slots: int) -> None:
    requests = ragged_requests(12)
    expected = {}
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        output = make_model().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=[2, 17],
        )
        expected[request.key] = output[0, prompt.shape[1] :].tolist()
    found = run(batch(make_model(), rules(), num_slots=num_slots), requests)
    assert {key: completion.output_ids for key, completion in found.items()} == expected


def test_some_rows_stop_and_some_reach_the_limit() -> None:
    reasons = {
        completion.finish_reason for completion in run(batch(tiny_llama(), rules()), ragged_requests(12)).values()
    }
    assert reasons == {"stop", "length"}


def test_sampled_answers_do_not_depend_on_the_batch() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    requests = ragged_requests(10)
    one_by_one = run(SequentialDecoder(tiny_llama(), rules(sampling)), requests)
    for num_slots in (2, 10):
        assert run(batch(tiny_llama(), rules(sampling), num_slots=num_slots), requests[::-1]) == one_by_one


def test_two_batches_through_one_decoder_answer_their_own_prompts() -> None:
    requests = ragged_requests(8)
    expected = run(SequentialDecoder(tiny_llama(), rules()), requests)
    decoder = batch(tiny_llama(), rules())
    found = run(decoder, requests[:4]) | run(decoder, requests[4:])
    assert found == expected


def test_memory_stays_within_the_token_budget() -> None:
    decoder = batch(tiny_llama(), rules(), num_slots=12, max_kv_tokens=256)
    for request in ragged_requests(12):
        decoder.submit(request)
    while not decoder.is_idle:
        decoder.step()
        reserved = max((row.reserved_tokens for row in decoder.rows), default=0)
        assert len(decoder.rows) <= 1 or len(decoder.rows) * reserved <= 256


def test_any_declared_stop_token_ends_an_answer() -> None:
    requests = ragged_requests(12)
    free = run(batch(tiny_llama(), rules(stop_ids=())), requests)
    stops = (free["row-0"].output_ids[2], free["row-1"].output_ids[4])
    found = run(batch(tiny_llama(), rules(stop_ids=stops)), requests)
    for key, completion in found.items():
        ends = [i for i, token_id in enumerate(free[key].output_ids) if token_id in stops]
        assert completion.output_ids == free[key].output_ids[: ends[0] + 1 if ends else None]
        assert completion.finish_reason == ("stop" if ends else "length")


def test_padded_vocabulary_rows_are_never_emitted() -> None:
    model = tiny_llama()
    model.lm_head.weight.data[50:] *= 40  # without the cut these rows would win nearly always
    for sampling in (GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        found = run(batch(model, rules(sampling, stop_ids=(), vocabulary_size=50)), ragged_requests(6))
        assert all(token_id < 50 for completion in found.values() for token_id in completion.output_ids)


def test_a_prompt_that_raises_ends_alone() -> None:
    model = tiny_llama()

    def refuse(_: Any, arguments: tuple[torch.Tensor]) -> None:
        if (arguments[0] == 95).any():
            raise RuntimeError("token 95 is cursed")

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    requests = [
        DecodeRequest(r.key, [t for t in r.prompt_ids if t != 95] or [3], 4, r.seed) for r in ragged_requests(6)
    ]
    requests[2] = DecodeRequest("bad", [5, 95, 6], 4, 0)
    found = run(batch(model, rules(vocabulary_size=95), num_slots=6), requests)
    assert found["bad"].error == "RuntimeError: token 95 is cursed"
    assert sum(completion.error is None for completion in found.values()) == 5


def test_sliding_windows_are_decoded_row_by_row() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    assert isinstance(make_decoder(model, rules(), num_slots=4, max_kv_tokens=999), SequentialDecoder)
    assert isinstance(make_decoder(tiny_llama(), rules(), num_slots=4, max_kv_tokens=999), BatchDecoder)


def test_bfloat16_logits_of_both_attentions_agree() -> None:
    model = tiny_llama().bfloat16()
    requests = ragged_requests(6, max_tokens=6)
    fused = run(SequentialDecoder(model, rules(stop_ids=())), requests)
    batched = run(batch(tiny_llama().bfloat16(), rules(stop_ids=()), num_slots=6), requests)
    same = sum(fused[key].output_ids[:1] == batched[key].output_ids[:1] for key in fused)
    assert same == len(fused)
