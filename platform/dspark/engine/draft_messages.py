"""What an engine and a draft replica say to each other, in the form in which it travels.

Legend: n tokens of all parts of a message, m captured layers, d hidden size, l draft tokens of a proposal.

engine           one message per step: features since the last one, whom to draft for, whom to forget
draft replica    one answer per message: how much of each context it holds now, and the proposals

Whatever is lost, or comes twice or too late, is put right by the next exchange: parts say where they start, answers say
how far a context reaches, and a request for a proposal says of how many tokens.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.errors import DsparkError
from dspark.speculation.proposal import Proposal

MAX_TOKENS_BESIDE = 64  # of a context that a request for a proposal brings along; what is longer goes ahead of it


class DraftUnavailable(DsparkError):
    """No draft replica answered, or none that may; the engine decodes plainly."""


@dataclass(frozen=True)
class ContextPart:
    """Committed tokens of one context. handle: the sender's name for it.

    token_ids: those from position `start` on; the last one, the anchor, may have no features yet. num_features: how
    many of them have; their rows follow one another in the message, part by part.
    """

    handle: int
    start: int
    token_ids: tuple[int, ...]
    num_features: int


@dataclass(frozen=True)
class DraftAsk:
    """A proposal that is wanted, behind exactly `num_context` tokens with features; the rest is `DraftRequest`'s."""

    handle: int
    num_context: int
    anchor_id: int
    max_tokens: int
    temperature: float
    noise_key: int | None
    position: int
    uniforms: tuple[float, ...] | None
    top_k: int | None


@dataclass(frozen=True)
class DraftMessage:
    """sender: an engine's name, one for its whole life; sequence: rises from message to message.

    identity: of drafter and target, the same on both sides or nothing is drafted. features: [n, m*d], bits of `dtype`.
    closed: handles that are not needed any more. timeout_s: after so long nobody waits for the proposals.
    """

    sender: str
    sequence: int
    identity: str
    parts: tuple[ContextPart, ...]
    asks: tuple[DraftAsk, ...]
    closed: tuple[int, ...]
    features: NDArray[np.generic]
    dtype: str
    timeout_s: float


@dataclass(frozen=True)
class SentProposal:
    """A proposal's tensors by name; numpy's arrays are pickled in a fraction of the time."""

    arrays: dict[str, NDArray[np.generic]]

    @classmethod
    def of(cls, proposal: Proposal) -> "SentProposal":
        tensors = {field.name: getattr(proposal, field.name) for field in fields(Proposal)}
        return cls({name: value.cpu().numpy() for name, value in tensors.items() if value is not None})

    def proposal(self, device: torch.device) -> Proposal:
        """The proposal as it was drawn, bit for bit."""
        tensors = {name: torch.tensor(array, device=device) for name, array in self.arrays.items()}
        return Proposal(**{field.name: tensors.get(field.name) for field in fields(Proposal)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class DraftReply:
    """About one context. num_context: tokens whose features are there, 0 of one that is not known (any more).

    is_refused: there is no room for it. proposal: where one was asked for and could be drafted.
    """

    handle: int
    num_context: int
    is_refused: bool = False
    proposal: SentProposal | None = None


@dataclass(frozen=True)
class DraftAnswer:
    """A reply per context that the message names. refusal: why nothing at all is drafted for this sender."""

    replies: tuple[DraftReply, ...]
    refusal: str | None = None


class DraftLink(Protocol):
    """The way to a draft replica."""

    def post(self, message: DraftMessage) -> "Future[DraftAnswer]":
        """Send a message without waiting. The future raises DraftUnavailable where no answer comes in time."""
        ...


def to_array(features: Tensor) -> NDArray[np.generic]:
    """[n, m*d] on the host; bfloat16, which numpy does not know, as int16 of the same bits."""
    host = features.cpu()
    bits = host.view(torch.int16) if host.dtype == torch.bfloat16 else host
    return bits.numpy()


def to_tensor(array: NDArray[np.generic], dtype: str) -> Tensor:
    """The features again, in memory of their own: what arrives may be read-only."""
    tensor = torch.tensor(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def split_features(message: DraftMessage, device: torch.device) -> list[Tensor]:
    """The rows of each part, where the drafter computes."""
    rows = to_tensor(message.features, message.dtype).to(device)
    return list(rows.split([part.num_features for part in message.parts]))


def asked_handles(message: DraftMessage) -> Sequence[int]:
    """Handles that the message is about, each once, in order."""
    return list(dict.fromkeys([part.handle for part in message.parts] + [ask.handle for ask in message.asks]))
