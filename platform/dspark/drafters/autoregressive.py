"""Drafters that read the target's states and tokens, then go on from their own states: what EAGLE-3 and MTP share.

Legend: B sequences, L tokens, A anchors per sequence, G block size, d hidden size, m captured target layers,
H query heads, K key/value heads, D head width, T rows of a pass, V' draft vocabulary.

    row i            a state of position i with a token behind it; gives draft token 1 from the token at i + 1
    anchor at p      the target's states reach position p - 1, so drafting starts from row p - 1
    chain            (one module)  step s is a row of its own behind the context: position p - 1 + s, the drafter's
                     own state of the step before, draft token s; it sees the context's rows and its chain
    modules          (one per step) step s passes over the rows of the context again, with tokens s positions
                     further on and the states of the module before; it sees the rows of its own module

Source: EAGLE-3 (training-time test); DeepSeek-V3 §2.2, eq. 21-25.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dspark.drafters.base import BlockBatch, BlockOutput, PackedBatch, SlotRows
from dspark.drafters.drafting import check_length, draw, on_target_ids
from dspark.speculation.proposal import Proposal
from dspark.target_head import TargetHead

# Queries [B, H, T, D], keys and values [B, K, T, D] of a pass, the factor of the scores -> mixed values [B, T, H, D].
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class AutoregressiveShape(Protocol):
    """What is asked of the config of a drafter of this kind."""

    @property
    def architecture(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def target_layer_ids(self) -> tuple[int, ...]: ...
    @property
    def num_modules(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int | None: ...
    @property
    def widest_window(self) -> None: ...


class AutoregressiveBackbone(Protocol):
    """The network of a drafter of this kind, one row in, one state out."""

    d2t: Tensor
    lm_head: nn.Linear
    target_head: TargetHead

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a row stores per module: key/value heads, width of a key, width of a value."""
        ...

    def head_weight(self) -> Tensor:
        """[V', d]: rows of the frozen head that can be proposed."""
        ...

    def head_bias(self) -> None:
        """Heads that add one are refused."""
        ...

    def context_states(self, target_hidden: Tensor) -> Tensor:
        """What a row holds of the target: [..., d]. target_hidden: [..., m*d]."""
        ...

    def advance(self, module: int, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States after a module: [B, T, d]. token_ids, positions: [B, T]; states: [B, T, d]."""
        ...

    def head_inputs(self, states: Tensor) -> Tensor:
        """What the head is given: [..., d]."""
        ...

    def base_logits(self, h: Tensor) -> Tensor:
        """[..., V'] float32. h: [..., d], as `head_inputs` gives it."""
        ...


def head_logits(lm_head: nn.Linear, h: Tensor, draft_vocab_size: int) -> Tensor:
    """[..., V'] float32: the head's rows that can be proposed. h: [..., d]."""
    rows = h.reshape(-1, h.shape[-1])
    return lm_head(rows)[:, :draft_vocab_size].float().view(*h.shape[:-1], draft_vocab_size)


class UnrollAttention:
    """Attention of an unroll: rows of the context are causal, a chain sees the context up to its row and itself."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._context: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []

    def over_context(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """All rows at once, T = L; padding is behind every sequence, so no row of it is seen."""
        self._context = (keys, values)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return mixed.transpose(1, 2)

    def over_chain(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """One more row of every anchor's chain, T = A; scores over context and chain are worked out apart."""
        assert self._context is not None, "a chain starts behind a context"
        self._chain.append((keys, values))
        context_keys, context_values = self._context
        length = context_keys.shape[2]
        grouped = queries.unflatten(1, (keys.shape[1], -1))  # [B, K, H/K, A, D]
        on_context = torch.einsum("bkhad,bkld->bkhal", grouped, context_keys)
        hidden = torch.arange(length, device=queries.device) > self._rows.unsqueeze(-1)  # [B, A, L]
        on_context = on_context.float().masked_fill(hidden[:, None, None], float("-inf"))
        on_chain = [torch.einsum("bkhad,bkad->bkha", grouped, own).float().unsqueeze(-1) for own, _ in self._chain]
        weights = torch.softmax(torch.cat([on_context, *on_chain], dim=-1) * scaling, dim=-1).to(values.dtype)
        mixed = torch.einsum("bkhal,bkld->bkhad", weights[..., :length], context_values)
        for step, (_, own) in enumerate(self._chain):
            mixed = mixed + weights[..., length + step, None] * own.unsqueeze(2)
        return mixed.flatten(1, 2).transpose(1, 2)


class Unroll:
    """Steps of drafting from chosen rows, over contexts that are held whole; training and the slow twin of serving.

    context: [B, L, d], from `context_states`; rows: [B, A], the row of every anchor, p - 1.
    """

    def __init__(self, backbone: AutoregressiveBackbone, context: Tensor, rows: Tensor, *, num_modules: int) -> None:
        self._backbone, self._rows, self._num_modules = backbone, rows, num_modules
        self._states = context
        self._positions = torch.arange(context.shape[1], device=context.device).expand(context.shape[:2])
        self._attention = UnrollAttention(rows)
        self._num_steps = 0

    def step(self, token_ids: Tensor) -> Tensor:
        """What the head is given for the next draft token of every anchor: [B, A, d].

        token_ids: [B, L]; in step s that of row i is the token at i + 1 + s. A chain reads those of its rows only.
        """
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if step and self._num_modules == 1:
            positions = self._rows + step
            own_ids = token_ids.gather(1, self._rows)
            self._states = self._backbone.advance(0, own_ids, self._states, positions, self._attention.over_chain)
            return self._backbone.head_inputs(self._states)
        states = self._backbone.advance(step, token_ids, self._states, self._positions, self._attention.over_context)
        chosen = states.gather(1, self._rows.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        self._states = chosen if self._num_modules == 1 else states
        return self._backbone.head_inputs(chosen)


def ids_ahead(input_ids: Tensor, num_ahead: int) -> Tensor:
    """The token `num_ahead` positions further on, 0 past the end: [B, L]. input_ids: [B, L]."""
    return F.pad(input_ids[:, num_ahead:], (0, min(num_ahead, input_ids.shape[1])))


def unpacked(batch: PackedBatch) -> BlockBatch:
    """The blocks of a batch that was packed without a sliding window, as padded rows.

    Every row of a context is a row of its own here, so packing densely would gain no more than the padding.
    """
    starts, num_blocks = batch.context_starts.unique_consecutive(return_counts=True)
    num_rows = starts.diff(append=starts.new_tensor([batch.context_ids.numel()])).tolist()
    anchors = batch.anchors.split(num_blocks.tolist())
    told = batch.previous_ids[num_blocks.cumsum(0) - 1]  # of each sequence's last block: what comes behind its context
    contexts = batch.context_ids.split(num_rows)
    tokens = [torch.cat([ids[: int(a[-1])], own]) for ids, a, own in zip(contexts, anchors, told, strict=True)]
    input_ids = pad_sequence(tokens, batch_first=True)
    hidden = pad_sequence(list(batch.target_hidden.split(num_rows)), batch_first=True)
    places = torch.arange(int(num_blocks.max()), device=num_blocks.device)
    return BlockBatch(
        input_ids=input_ids,
        target_hidden=F.pad(hidden, (0, 0, 0, input_ids.shape[1] - hidden.shape[1])),
        anchors=pad_sequence(list(anchors), batch_first=True),
        anchor_mask=places < num_blocks.unsqueeze(1),
    )


@dataclass
class AutoregressiveState:
    """One request: its committed ids, the anchor included, and what is held of the target, [n, d] each."""

    token_ids: list[int] = field(default_factory=list)
    context: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(part.shape[0] for part in self.context)


class AutoregressiveDrafter(nn.Module):
    """An EAGLE-3 or MTP drafter, answering to `drafters.base.Drafter`; has neither Markov nor confidence head.

    Drafting here starts from the whole context each time: slow and obvious. The engine keeps it in paged memory.
    """

    backbone: AutoregressiveBackbone

    def __init__(self, config: AutoregressiveShape, backbone: AutoregressiveBackbone) -> None:
        super().__init__()
        self.config = config
        self.block_size = config.block_size
        self.target_layer_ids = config.target_layer_ids
        self.backbone = backbone

    def forward(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> BlockOutput:
        """Logits of the chosen slots, each told the true tokens before it and going on from its own states."""
        return BlockOutput(self.backbone.base_logits(self.slot_rows(batch, slots).h), None)

    def slot_rows(self, batch: BlockBatch | PackedBatch, slots: Tensor) -> SlotRows:
        """What the head is given for the chosen slots."""
        h = self.block_states(batch)[slots]
        return SlotRows(h.to(self.backbone.lm_head.weight.dtype), None, None)

    def bias_weight(self) -> None:
        """No Markov head."""
        return

    def block_states(self, batch: BlockBatch | PackedBatch) -> Tensor:
        """What the head is given for all slots: [B, A, G, d], or [A, G, d] of a packed batch.

        Slot j of the anchor at p is step j from row p - 1. An anchor at position 0 has nothing before it; its slots
        mean nothing.
        """
        if isinstance(batch, PackedBatch):
            rows = unpacked(batch)
            return self.block_states(rows)[rows.anchor_mask]
        context = self.backbone.context_states(batch.target_hidden)
        unroll = self._unroll(context, (batch.anchors - 1).clamp_min(0))
        steps = [unroll.step(ids_ahead(batch.input_ids, 1 + step)) for step in range(self.block_size)]
        return torch.stack(steps, dim=2)

    def new_state(self) -> AutoregressiveState:
        """Empty memory for one request."""
        return AutoregressiveState()

    def extend_ids(self, state: AutoregressiveState, ids: Sequence[int]) -> None:
        """Append committed tokens, the anchor included."""
        state.token_ids += ids

    def extend_context(self, state: AutoregressiveState, target_hidden: Tensor) -> None:
        """Append target features of the next committed positions. target_hidden: [n, m*d]."""
        if target_hidden.shape[0]:
            state.context.append(self.backbone.context_states(target_hidden))

    @torch.no_grad()
    def propose(
        self,
        state: AutoregressiveState,
        anchor_id: int,
        *,
        max_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draft after the anchor at position `state.num_tokens`; see `Drafter.propose`."""
        check_length(max_tokens, self.block_size)
        num_tokens = state.num_tokens
        assert num_tokens, "a request's context must hold a token before it is drafted for"
        assert state.token_ids[num_tokens:] == [anchor_id], "the anchor is the last of the ids the drafter was told"
        context = torch.cat(state.context).unsqueeze(0)
        unroll = self._unroll(context, torch.tensor([[num_tokens - 1]], device=context.device))
        ids, draft_ids, probs = list(state.token_ids), [], []
        for step in range(max_tokens):
            ahead = torch.tensor([ids[1 + step : 1 + step + num_tokens]], device=context.device)
            logits = self.backbone.base_logits(unroll.step(ahead))[0, 0]
            draft_id, distribution = draw(logits, temperature, generator)
            if distribution is not None:
                probs.append(distribution)
            draft_ids.append(draft_id)
            ids.append(int(self.backbone.d2t[draft_id]))
        return Proposal(
            token_ids=torch.tensor(ids[num_tokens + 1 :], dtype=torch.long, device=context.device),
            probs=on_target_ids(probs, self.backbone.d2t, self.config.vocab_size) if probs else None,
            confidence_logits=None,
        )

    def _unroll(self, context: Tensor, rows: Tensor) -> Unroll:
        return Unroll(self.backbone, context, rows, num_modules=self.config.num_modules)
