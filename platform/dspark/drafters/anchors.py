"""Where blocks start in training, and what each of their slots is taught.

Legend: L tokens, A anchors, G block size, p anchor position, j slot (predicts the token at p + j + 1).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockTargets:
    """labels: [..., A, G] int64 target ids; supervised: [..., A, G] bool; positions: [..., A, G], of p + j.

    The target's distribution for slot j is the one it had at position p + j. Where `supervised` is false the
    other two are clamped and mean nothing.
    """

    labels: Tensor
    supervised: Tensor
    positions: Tensor


def sample_anchors(loss_mask: Tensor, num_anchors: int, *, seed: int, epoch: int, sample_id: str) -> Tensor:
    """Ascending positions p, at most num_anchors, without replacement: [n] int64. loss_mask: [L].

    A candidate carries loss itself and so does the token after it. The draw depends on (seed, epoch, sample id)
    only, so batch grouping, ranks and resuming cannot change it.
    """
    mask = loss_mask.bool()
    candidates = torch.nonzero(mask[:-1] & mask[1:]).squeeze(1)
    if candidates.numel() <= num_anchors:
        return candidates
    digest = hashlib.sha256(sample_id.encode()).digest()
    generator = np.random.default_rng([seed, epoch, int.from_bytes(digest[:8], "little")])
    chosen = generator.choice(candidates.numel(), size=num_anchors, replace=False, shuffle=False)
    return candidates[torch.from_numpy(np.sort(chosen))]


def block_targets(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, anchor_mask: Tensor, block_size: int
) -> BlockTargets:
    """What each slot is taught. input_ids, loss_mask: [B, L]; anchors, anchor_mask: [B, A].

    Supervision is a prefix: the first label outside the loss span ends the block.

        slot j       0      1      2    …
        sees as x    p      p+1    p+2       (teacher forced)
        predicts     p+1    p+2    p+3
    """
    length = input_ids.shape[1]
    offsets = torch.arange(block_size, device=anchors.device)
    positions = anchors.unsqueeze(-1) + offsets
    label_positions = positions + 1
    inside = (label_positions < length) & anchor_mask.unsqueeze(-1)
    clamped = label_positions.clamp_max(length - 1).flatten(1)
    labels = input_ids.gather(1, clamped).view_as(positions)
    carries_loss = loss_mask.bool().gather(1, clamped).view_as(positions)
    supervised = (inside & carries_loss).long().cumprod(dim=-1).bool()
    return BlockTargets(labels, supervised, positions.clamp_max(length - 1))


def slot_weights(supervised: Tensor, position_decay: float) -> Tensor:
    """w_j = exp(-j / position_decay) where supervised, else 0: [..., G] float32. Source: DSpark eq. 10."""
    slots = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised.float() * torch.exp(-slots / position_decay)
