"""Two changes of form that leave what a drafter proposes as it is, for engines that know fewer forms.

Legend: V target vocabulary, V' draft vocabulary, r Markov rank, d hidden.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dspark.drafters.stored import HEAD, StoredDrafter
from dspark.errors import DsparkError

W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"
RANK_MULTIPLE = 8  # what matrix products on a GPU like
FORBIDDEN = -10_000.0  # added to a logit: its probability underflows to 0 in float32 at any temperature below 90


class CannotExport(DsparkError):
    """A layout has no place for something of this drafter: what, its value, what to do instead."""


class FrozenTarget(Protocol):
    """What an export needs to know of the target. name: what an engine is told to load."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes in its `config.json`."""
        ...

    def head(self) -> Tensor:
        """Rows of its LM head: [V, d]."""
        ...


def with_zero_markov_head(stored: StoredDrafter) -> StoredDrafter:
    """The same drafter with a Markov head whose bias is 0 for every token."""
    rows = len(stored.tensors[HEAD])
    zeros = torch.zeros(1, dtype=stored.tensors[HEAD].dtype)
    head = {
        W1: zeros.expand(stored.content["vocab_size"], RANK_MULTIPLE),
        W2: zeros.expand(rows, RANK_MULTIPLE),
    }
    changes = {"markov_rank": RANK_MULTIPLE, "markov_head_type": "vanilla", "confidence_head_with_markov": False}
    return StoredDrafter(stored.content | changes, stored.tensors | head)


def with_full_vocabulary(stored: StoredDrafter, target: FrozenTarget, *, engine: str) -> StoredDrafter:
    """The same drafter with head rows for all V tokens, those outside V' never drafted.

    One more rank does it: W_1 has a 1 there for every token, W_2 a 0 for each of V' and FORBIDDEN for the others, so
    the bias of a drafted token stays W_2 W_1[x] and that of any other is FORBIDDEN, whatever x.
    Raises: CannotExport for another Markov head than vanilla, or when the head is not the target's.
    """
    content, tensors = stored.content, stored.tensors
    kind = content.get("markov_head_type", "vanilla")
    what = f"{engine} cannot load a drafter with draft_vocab_size = {content['draft_vocab_size']}"
    remedy = "train one with drafter.draft_vocab_size=null"
    if kind != "vanilla":
        raise CannotExport(f"{what}, and a Markov head of type {kind} cannot be widened to all tokens; {remedy}")
    offsets = tensors["d2t"].long()
    draft_to_target = torch.arange(len(offsets)) + offsets
    head = target.head().to(tensors[HEAD].dtype)
    if not torch.equal(head[draft_to_target], tensors[HEAD]):
        raise CannotExport(
            f"{what}, and its head rows are not those of the target {target.name}, which would fill it up; {remedy}"
        )
    vocab_size, rank = tensors[W1].shape
    new_rank = -(-(rank + 1) // RANK_MULTIPLE) * RANK_MULTIPLE
    w1, w2 = tensors[W1].new_zeros(vocab_size, new_rank), tensors[W2].new_zeros(vocab_size, new_rank)
    w1[:, :rank], w1[:, rank] = tensors[W1], 1.0
    w2[:, rank] = FORBIDDEN
    w2[draft_to_target, :rank], w2[draft_to_target, rank] = tensors[W2], 0.0
    changed = {name: value for name, value in tensors.items() if name != "d2t"} | {HEAD: head, W1: w1, W2: w2}
    if content.get("confidence_head_with_markov"):
        weight = tensors[CONFIDENCE]
        changed[CONFIDENCE] = torch.cat([weight, weight.new_zeros(1, new_rank - rank)], dim=1)
    kept = {name: value for name, value in content.items() if name != "draft_vocab_size"}
    return replace(stored, content=kept | {"markov_rank": new_rank}, tensors=changed)
