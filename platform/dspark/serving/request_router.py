"""Which replica a request goes to: one that has read its beginning lately, unless another token is far dearer there.

Pure: `PromptPrefixes` (what text was read where), `token_cost` and `ranked`. `TargetRouter` is the shell that Ray Serve
calls; it lives in every caller, so what it remembers is that caller's own.
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from dspark.config import build_config
from dspark.serving.config import RoutingConfig
from dspark.serving.open_calls import OpenCalls
from dspark.serving.openai_schema import ChatRequest, CompletionRequest

TURN = "\x1e"  # between the messages of a chat: it stands in no prompt
MOST_PIECES = 64  # of a prompt's beginning; texts that agree so far go to the same place whatever follows

R = TypeVar("R", bound=Hashable)


def prompt_text(request: Any) -> str:
    """What a request's beginning is told by, "" where it cannot be told."""
    if isinstance(request, ChatRequest):
        return TURN.join(f"{turn.role} {turn.content}" for turn in request.messages)
    if isinstance(request, CompletionRequest):
        return request.prompt if isinstance(request.prompt, str) else " ".join(map(str, request.prompt))
    return ""


class PromptPrefixes(Generic[R]):
    """Who read a beginning last. piece_characters: beginnings are compared in steps of so many; most: kept of them."""

    def __init__(self, *, piece_characters: int, most: int) -> None:
        self._piece_characters, self._most = piece_characters, most
        self._readers: OrderedDict[bytes, R] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._readers)

    def find(self, text: str, candidates: Mapping[R, Any]) -> R | None:
        """Of the candidates the one that read the longest beginning of the text."""
        for digest in reversed(self._digests(text)):
            reader = self._readers.get(digest)
            if reader is not None and reader in candidates:
                self._readers.move_to_end(digest)
                return reader
        return None

    def note(self, text: str, reader: R) -> None:
        """The text is read there from now on."""
        for digest in self._digests(text):
            self._readers[digest] = reader
            self._readers.move_to_end(digest)
        while len(self._readers) > self._most:
            self._readers.popitem(last=False)

    def _digests(self, text: str) -> list[bytes]:
        """Of each beginning of whole pieces, the shortest first; each takes in the one before."""
        size, so_far, digests = self._piece_characters, hashlib.blake2b(digest_size=16), []
        for stop in range(size, min(len(text), size * MOST_PIECES) + 1, size):
            so_far.update(text[stop - size : stop].encode("utf-8", "surrogatepass"))
            digests.append(so_far.digest())
        return digests


def token_cost(stats: Mapping[str, Any], num_ongoing: int | None) -> float | None:
    """Seconds that a token of one more request costs at a replica; None where it has not said yet.

    stats: `token_s` as it was with `num_calls` calls open there, see `ReplicaLoad`. num_ongoing: calls there now: the
    cost is taken to grow with them, until the replica says how it does.
    """
    if "token_s" not in stats:
        return None
    num_then = float(stats.get("num_calls", 0))
    num_now = num_then if num_ongoing is None else float(num_ongoing)
    return float(stats["token_s"]) * (1 + num_now) / (1 + num_then)


def ranked(costs: Mapping[R, float | None], affine: R | None, *, most_imbalance: float, draw: random.Random) -> list[R]:
    """Candidates in the order in which to try them.

    The affine one comes first while its cost is at most `most_imbalance` times the lowest; else, or without one, the
    cheaper of two drawn at random, which keeps callers with the same picture from running to the same place. One whose
    cost is unknown counts as the cheapest known: it is new, or everybody is.
    """
    lowest = min((cost for cost in costs.values() if cost is not None), default=1.0)
    known = {candidate: lowest if cost is None else cost for candidate, cost in costs.items()}
    drawn = draw.sample(list(known), len(known))
    order = [*sorted(drawn[:2], key=known.__getitem__), *sorted(drawn[2:], key=known.__getitem__)]
    if affine is not None and known[affine] <= most_imbalance * lowest:
        order.remove(affine)
        order.insert(0, affine)
    return order


class TargetRouter(RequestRouter):
    """Serve's request router for target replicas; its kwargs are a RoutingConfig.

    Without Serve's FIFOMixin, which gives the replica chosen for a request to whoever came first.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._config = build_config(RoutingConfig, kwargs, source="request_router_kwargs")
        self._draw = random.Random()
        self._prefixes: PromptPrefixes[ReplicaID] = PromptPrefixes(
            piece_characters=self._config.piece_characters, most=self._config.most_prefixes
        )
        self._calls: OpenCalls[ReplicaID] = OpenCalls()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each candidate a rank of its own, the best first."""
        text = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # else a full fleet is asked without a pause
            text = _text_of(pending_request)
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        affine = self._prefixes.find(text, candidates) if self._config.prefix_affinity else None
        order = ranked(self._costs(candidates), affine, most_imbalance=self._config.most_imbalance, draw=self._draw)
        if pending_request is not None and order:
            # There is no wait between the look at the costs and this: whoever looks next sees it.
            self._calls.choose(_name_of(pending_request), order[0])
        return [[candidates[replica_id]] for replica_id in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        self._calls.send(_name_of(pending_request), replica_id)
        self._prefixes.note(_text_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._calls.end(internal_request_id)

    def _costs(self, candidates: Mapping[ReplicaID, RunningReplica]) -> dict[ReplicaID, float | None]:
        """Of one more request at each."""
        self._calls.keep(candidates)
        said = {replica_id: replica.routing_stats or {} for replica_id, replica in candidates.items()}
        num_calls = {replica_id: self._calls.num_at(replica_id, stats) for replica_id, stats in said.items()}
        costs = {replica_id: token_cost(stats, num_calls[replica_id]) for replica_id, stats in said.items()}
        if all(cost is None for cost in costs.values()):  # nothing was measured yet: evenly, then
            return {replica_id: 1.0 + number for replica_id, number in num_calls.items()}
        return costs


def _name_of(pending_request: PendingRequest) -> str:
    return pending_request.metadata.internal_request_id


def _text_of(pending_request: PendingRequest) -> str:
    """Of `TargetReplica.generate`'s arguments the request; other methods have none."""
    return next((text for argument in pending_request.args if (text := prompt_text(argument))), "")
