"""Whether a target's head is what its description says: compared on a short text before anything is captured."""

from typing import Any

import torch
import torch.nn.functional as F

from dspark.engine.hidden_states import decoder_of
from dspark.target_head import TargetHead
from dspark.targets import input_device

HEAD_PROBE_TOKENS = 16
HEAD_TOLERANCE = {torch.float32: 1e-3}  # share of the largest logit; elsewhere that of 16-bit products
HEAD_TOLERANCE_16_BIT = 3e-2


@torch.no_grad()
def describe_head(model: Any, valid_vocab_size: int) -> TargetHead:
    """The target's head as drafters reproduce it, compared with the target's own logits on a short text.

    Raises: ValueError when the two differ: then the architecture does something that the description does not hold.
    """
    head = TargetHead.of(model.config.get_text_config(decoder=True), valid_vocab_size=valid_vocab_size)
    output = model.get_output_embeddings()
    input_ids = (
        torch.arange(HEAD_PROBE_TOKENS, device=input_device(model)).remainder(head.valid_vocab_size).unsqueeze(0)
    )
    last_hidden = decoder_of(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    own = model(input_ids=input_ids, use_cache=False).logits.float()
    products = F.linear(last_hidden.to(output.weight.device), output.weight, output.bias if head.has_bias else None)
    described = head.logits(products.float())
    difference = float((own.to(described.device) - described).abs().max() / own.abs().max().clamp_min(1e-12))
    # Not a number where the weights are broken: samples are counted as such then, not the head refused.
    if difference > HEAD_TOLERANCE.get(model.dtype, HEAD_TOLERANCE_16_BIT):
        raise ValueError(
            f"target {type(model).__name__}: its logits are not those of {head} on its last hidden state (off by "
            f"{difference:.1%} of the largest); drafters for it are not supported"
        )
    return head
