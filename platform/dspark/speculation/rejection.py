"""Lossless verification of one proposal against the target's distributions.

Legend: l proposed tokens, V target vocabulary. Row k of the target is its distribution after k draft tokens.
Source: DSpark §2.1; ALGORITHMS "lossless verification": accept x with min(1, p_t(x)/p_d(x)), left to right.
"""

import torch
from torch import Tensor

from dspark.speculation.proposal import Proposal, Verdict

MIN_RESIDUAL_MASS = 1e-8


def verify_greedy(target_logits: Tensor, proposal: Proposal) -> Verdict:
    """Accept while the draft equals the target's argmax; then the argmax itself. target_logits: [l+1, V]."""
    choices = target_logits.argmax(dim=-1)
    num_accepted = _leading_true(proposal.token_ids == choices[: proposal.num_tokens])
    return Verdict(num_accepted, int(choices[num_accepted]))


def verify(target_probs: Tensor, proposal: Proposal, generator: torch.Generator | None = None) -> Verdict:
    """Rejection sampling; committed tokens are distributed as the target's own. target_probs: [l+1, V] float32.

    A greedy proposal (`probs` None) is one-hot: accepted with probability p_t(x).
    At the first rejection the token comes from norm(max(0, p_t - p_d)); a residual of at most 1e-8 means the two
    agree, and it comes from p_t. When all are accepted the bonus token comes from row l.
    """
    num_proposed = proposal.num_tokens
    if num_proposed == 0:
        return Verdict(0, _draw(target_probs[0], generator))
    accept = target_probs[:num_proposed].gather(1, proposal.token_ids.unsqueeze(1)).squeeze(1)
    if proposal.probs is not None:
        accept = accept / proposal.drawn_probs()
    uniform = torch.rand(num_proposed, generator=generator, device=target_probs.device)
    num_accepted = _leading_true(uniform < accept)
    row = target_probs[num_accepted]
    if num_accepted < num_proposed:
        row = _residual(row, proposal, num_accepted)
    return Verdict(num_accepted, _draw(row, generator))


def _residual(target_row: Tensor, proposal: Proposal, slot: int) -> Tensor:
    if proposal.probs is None:
        residual = target_row.clone()
        residual[proposal.token_ids[slot]] = 0.0
    else:
        residual = proposal.subtract_from(target_row, slot).clamp_min(0.0)
    return residual if float(residual.sum()) > MIN_RESIDUAL_MASS else target_row


def _draw(weights: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def _leading_true(flags: Tensor) -> int:
    return int(flags.long().cumprod(0).sum())
