"""Measured seconds of a step by the tokens in its batch, and of drafting by the requests that are drafted.

Legend: B tokens in the batch of one target step, anchors included.
"""

import contextlib
import math
import os
import platform
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.errors import MissingInput
from dspark.provenance import folder_lock, read_json, write_json
from dspark.speculation.measured_table import check_sizes, check_table, interpolated, medians
from dspark.storage import Location, locate

SMALLEST_LOOKUP = 256
LARGEST_LOOKED_UP = 1023  # tokens: of a long prompt the table would take longer than it saves
DRAFT_SHARE = 0.25  # of a target's step, where nothing is known of the drafter's
PROFILE_REMEDY = "run jobs/profile_engine.py on this machine"


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a target step and of drafting, non-decreasing in what they are given.

    batch_tokens: ascending B that were measured; verify_s: seconds of a target step at each.
    draft_requests, draft_s: the same for drafting a block for so many requests; empty without a neural drafter.
    buckets: ascending sizes that batches are padded to; empty when shapes are not padded.
    fingerprint: the hardware and model it holds for, see `hardware_fingerprint`.
    request_s: seconds that each request of a step costs beside the first, whatever its tokens: its own attention.
    context_s: seconds that 1,000 tokens more cost, which a request has in KV memory and attends to; context_tokens:
    how many each request had when the rest was measured.
    """

    batch_tokens: tuple[int, ...]
    verify_s: tuple[float, ...]
    draft_requests: tuple[int, ...] = ()
    draft_s: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()
    fingerprint: dict[str, Any] = field(default_factory=dict, hash=False)
    request_s: float = 0.0
    context_s: float = 0.0
    context_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.batch_tokens:
            raise ValueError(f"a cost curve needs at least one measured batch size; {PROFILE_REMEDY}")
        check_table("batch_tokens", self.batch_tokens, "verify_s", self.verify_s)
        check_table("draft_requests", self.draft_requests, "draft_s", self.draft_s)
        check_sizes("buckets", self.buckets)
        for name in ("request_s", "context_s", "context_tokens"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a number, 0 or more")

    @classmethod
    def measured(
        cls,
        verify: Mapping[int, Sequence[float]],
        draft: Mapping[int, Sequence[float]],
        *,
        buckets: Sequence[int] = (),
        fingerprint: Mapping[str, Any],
        request_s: float = 0.0,
        context_s: float = 0.0,
        context_tokens: int = 0,
    ) -> "CostCurve":
        """The curve of timed samples: the median at each size, then made non-decreasing.

        verify: B -> seconds of target steps; draft: requests -> seconds of drafting for them.
        Raises: ValueError for a size without samples or with a time that is not positive.
        """
        batch_tokens, verify_s = medians("verify", verify)
        draft_requests, draft_s = medians("draft", draft)
        return cls(
            batch_tokens=batch_tokens,
            verify_s=isotonic(verify_s),
            draft_requests=draft_requests,
            draft_s=isotonic(draft_s),
            buckets=tuple(buckets),
            fingerprint=dict(fingerprint),
            request_s=request_s,
            context_s=context_s,
            context_tokens=context_tokens,
        )

    def step_seconds(self, num_tokens: float, *, num_requests: int, context_tokens: int | None = None) -> float:
        """Seconds of a target step over so many tokens of so many requests. context_tokens: see `context_seconds`."""
        others_s = max(0, num_requests - 1) * self.request_s
        return self.verify_seconds(num_tokens) + others_s + self.context_seconds(num_requests, context_tokens)

    def context_seconds(self, num_requests: int, context_tokens: int | None) -> float:
        """Seconds that a step's contexts add. context_tokens: of all its requests together; None: as was measured.

        Where they are shorter in the mean than measured at, they take nothing away.
        """
        if context_tokens is None:
            return 0.0
        return self.context_s * max(0, context_tokens - num_requests * self.context_tokens) / 1000.0

    def verify_seconds(self, tokens: float) -> float:
        """Seconds of a target step over `tokens`, paid as the bucket that holds them where there are buckets."""
        return self.smooth_verify_seconds(self.padded_tokens(tokens))

    def smooth_verify_seconds(self, tokens: float) -> float:
        """The same without buckets: interpolated, the first value below the table, the last slope beyond it."""
        if isinstance(tokens, int) and 0 <= tokens <= LARGEST_LOOKED_UP:
            return self.lookup.verifying(tokens)[0][tokens]
        return float(self.smooth_verify_array(np.float64(tokens)))

    def smooth_verify_array(self, tokens: NDArray[Any] | np.float64) -> NDArray[np.float64]:
        """`smooth_verify_seconds` of many batch sizes at once."""
        return interpolated(tokens, self.batch_tokens, self.verify_s)

    def draft_seconds(self, requests: int) -> float:
        """Seconds to draft a block for so many requests; 0 for none, or where drafting costs no measured time."""
        return self.lookup.drafting(requests)[requests]

    def with_guessed_drafting(self, others: Sequence["CostCurve"]) -> "CostCurve":
        """This curve, with drafting as dear beside a step of few tokens as in the most similar of other curves.

        For a drafter that runs where this cannot be measured. Without another curve drafting takes DRAFT_SHARE of a
        step over as many tokens as there are requests. What it does take, `CurveCorrection` learns.
        """
        known = [curve for curve in others if curve.draft_requests]
        if not known:
            draft_s = tuple(DRAFT_SHARE * seconds for seconds in self.verify_s)
            return replace(self, draft_requests=self.batch_tokens, draft_s=draft_s)
        nearest = min(known, key=lambda curve: len(_differences(curve.fingerprint, self.fingerprint)))
        few = nearest.batch_tokens[0]
        scale = self.smooth_verify_seconds(few) / nearest.smooth_verify_seconds(few)
        draft_s = tuple(scale * seconds for seconds in nearest.draft_s)
        return replace(self, draft_requests=nearest.draft_requests, draft_s=draft_s)

    def padded_tokens(self, tokens: float) -> float:
        """Tokens that are computed for a batch of `tokens`: its bucket, or itself beyond the last one."""
        bucket = bisect_left(self.buckets, tokens)
        return self.buckets[bucket] if bucket < len(self.buckets) else tokens

    @cached_property
    def lookup(self) -> "CurveLookup":
        """The same for whole numbers, tabulated."""
        return CurveLookup(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "CostCurve":
        """Raises: ValueError for a field that is missing or does not fit."""
        try:
            return cls(
                tuple(content["batch_tokens"]),
                tuple(content["verify_s"]),
                tuple(content["draft_requests"]),
                tuple(content["draft_s"]),
                tuple(content["buckets"]),
                dict(content["fingerprint"]),
                float(content.get("request_s", 0.0)),
                float(content.get("context_s", 0.0)),
                int(content.get("context_tokens", 0)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost curve: {type(error).__name__} {error}; {PROFILE_REMEDY}") from None

    def save(self, path: str | Location) -> None:
        """Put this curve into the file, in place of the one with the same fingerprint if it has one.

        An object store has no lock: of two machines that save there at the same moment one may lose its curve.
        """
        path = locate(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = folder_lock(path.parent) if isinstance(path, Path) else contextlib.nullcontext()
        with lock:  # read, change, write: two machines may share the file
            kept = [curve for curve in read_curves(path) if curve.fingerprint != self.fingerprint]
            write_json(path, [curve.to_dict() for curve in [*kept, self]])

    @classmethod
    def load(cls, path: str | Location, fingerprint: Mapping[str, Any] | None = None) -> "CostCurve":
        """The file's curve for this hardware; without a fingerprint the only one it holds.

        Raises: MissingInput when there is none; ValueError for a broken file, or for several and no fingerprint.
        """
        curves = read_curves(locate(path))
        if not curves:
            raise MissingInput(f"no cost curve at {path}; {PROFILE_REMEDY}")
        if fingerprint is None:
            if len(curves) > 1:
                raise ValueError(f"{path} holds {len(curves)} cost curves; name the fingerprint of the one to load")
            return curves[0]
        for curve in curves:
            if curve.fingerprint == fingerprint:
                return curve
        nearest = min((_differences(curve.fingerprint, fingerprint) for curve in curves), key=len)
        raise MissingInput(f"no cost curve at {path} for this setting: {'; '.join(nearest)}; {PROFILE_REMEDY}")


class CurveLookup:
    """A curve by numbers of tokens and of requests, for who asks many times a step. Its tables grow with the asking."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._seconds, self._padded, self._draft_s = array("d"), array("i"), array("d")

    def verifying(self, num_tokens: int) -> "tuple[array[float], array[int]]":
        """Of 0 … num_tokens and more: seconds of a step as if there were no buckets, and tokens that are computed.

        Seconds are there for all that are computed.
        """
        if num_tokens >= len(self._padded):
            curve, tokens = self._curve, np.arange(max(SMALLEST_LOOKUP, 1 << num_tokens.bit_length()))
            padded = np.array([curve.padded_tokens(n) for n in tokens.tolist()]) if curve.buckets else tokens
            self._padded = array("i", padded.astype(np.intc).tobytes())
            self._seconds = array("d", curve.smooth_verify_array(np.arange(padded[-1] + 1)).tobytes())
        return self._seconds, self._padded

    def drafting(self, num_requests: int) -> "array[float]":
        """Seconds of drafting for 0 … num_requests and more."""
        if num_requests >= len(self._draft_s):
            curve, seconds = self._curve, np.zeros(max(SMALLEST_LOOKUP, 1 << num_requests.bit_length()))
            if curve.draft_requests:
                seconds[1:] = interpolated(np.arange(1, len(seconds)), curve.draft_requests, curve.draft_s)
            self._draft_s = array("d", seconds.tobytes())
        return self._draft_s


def hardware_fingerprint(
    device: torch.device | str, dtype: torch.dtype | str, num_threads: int, target: str
) -> dict[str, Any]:
    """What a step's duration depends on beside its batch. num_threads: of torch; target: the model's name."""
    device = torch.device(device)
    return {
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "num_threads": num_threads,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "dtype": str(dtype).removeprefix("torch."),
        "target": target,
    }


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """The non-decreasing sequence nearest to `values` in squares, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean and size; the means ascend
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            left_mean, left_size = pools.pop()
            mean = (left_mean * left_size + mean * size) / (left_size + size)
            size += left_size
        pools.append((mean, size))
    return tuple(mean for mean, size in pools for _ in range(size))


def read_curves(path: Location) -> list[CostCurve]:
    """All curves of a file, of whatever hardware; [] without one. Raises: ValueError for a broken file."""
    if not path.is_file():
        return []
    try:
        content = read_json(path)
        if not isinstance(content, list):
            raise ValueError(f"not a list of cost curves but a {type(content).__name__}; {PROFILE_REMEDY}")
        return [CostCurve.from_dict(entry) for entry in content]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    names = [name for name in sorted(found.keys() | asked.keys()) if found.get(name) != asked.get(name)]
    return [f"{name} is {found.get(name)!r} there and {asked.get(name)!r} here" for name in names]


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # elsewhere, and on Arm, the standard library has to know
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
