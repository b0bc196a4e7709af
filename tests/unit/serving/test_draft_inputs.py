"""What reaches a drafter fits it; what does not is refused by name, and costs nobody else anything."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.engine.draft_messages import ContextPart, DraftAsk, DraftMessage, to_array
from dspark.serving.draft_inputs import DraftInputs, is_finite
from dspark.serving.draft_replica import DraftReplica
from tiny_drafter import make_tiny_drafter
from tiny_serving import serve_config

INPUTS = DraftInputs(feature_size=6, vocabulary_size=50, block_size=4)
PART = ContextPart(0, 0, (7, 49, 3), 2)
ASK = DraftAsk(0, 2, 7, 3, 0.8, None, 3, (0.1, 0.0, 0.9), 8)


def message(sent_as: str = "float32", **changes: Any) -> DraftMessage:
    features = to_array(torch.randn(2, 6).to(getattr(torch, sent_as)))
    return replace(DraftMessage("engine", 1, "both", (PART,), (ASK,), (), features, sent_as, 1.0), **changes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_an_engine_sends_fits(dtype: str) -> None:
    assert INPUTS.problem(message(dtype)) is None
    nothing = np.empty((0, 0), np.float32)
    assert INPUTS.problem(message(parts=(), asks=(), features=nothing)) is None
    assert INPUTS.problem(message(asks=(replace(ASK, uniforms=None, top_k=None, temperature=0.0),))) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "int8"}, "type 'int8'"),
        ({"dtype": "bfloat16"}, "came as float32"),
        ({"features": np.zeros((3, 6), np.float32)}, "speak of 2 tokens"),
        ({"features": np.zeros(12, np.float32)}, "shape"),
        ({"features": np.zeros((2, 7), np.float32)}, "7 wide, this drafter's 6"),
        ({"features": np.full((2, 6), np.nan, np.float32)}, "not finite"),
        ({"parts": (replace(PART, token_ids=(7, 50, 3)),)}, "context 0: token ids from 3 to 50 for 50"),
        ({"parts": (replace(PART, token_ids=(7, -1, 3)),)}, "-1"),
        ({"parts": (replace(PART, token_ids=(7,)),)}, "2 features for 1 token ids"),
        ({"parts": (replace(PART, start=-1),)}, "start -1"),
        ({"asks": (replace(ASK, anchor_id=50),)}, "request for context 0: token ids"),
        ({"asks": (replace(ASK, max_tokens=5),)}, "max_tokens 5; a block has 4"),
        ({"asks": (replace(ASK, temperature=float("inf")),)}, "temperature inf"),
        ({"asks": (replace(ASK, top_k=0),)}, "top_k 0"),
        ({"asks": (replace(ASK, uniforms=(0.5,)),)}, "uniforms"),
        ({"asks": (replace(ASK, uniforms=(0.5, 1.0, 0.2)),)}, "uniforms"),
        ({"asks": (replace(ASK, position=-1),)}, "position -1"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], named: str) -> None:
    problem = INPUTS.problem(message(**changes))
    assert problem is not None
    assert named in problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_that_are_none_are_found_in_every_type(dtype: torch.dtype) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        features = torch.randn(5, 7).to(dtype)
        assert is_finite(to_array(features))
        features[3, 2] = value
        assert not is_finite(to_array(features))
    largest = torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(to_array(-largest))


def test_a_replica_refuses_by_name_and_goes_on(tiny_target: Path, tmp_path: Path) -> None:
    folder = make_tiny_drafter(tmp_path / "drafter", tiny_target)
    replica = DraftReplica(serve_config(tiny_target, drafter=str(folder), draft_replicas={}))
    loop: Any = replica._loop
    inputs = DraftInputs.of(folder)
    good = DraftMessage(
        "engine",
        1,
        loop.server._identity,
        (ContextPart(0, 0, (7,) * 4, 3),),
        (DraftAsk(0, 3, 7, 2, 0.0, None, 4, None, None),),
        (),
        to_array(torch.randn(3, inputs.feature_size)),
        "float32",
        60.0,
    )

    async def run() -> None:
        wide = replace(good, features=to_array(torch.randn(3, 5)))
        answer = await replica.draft(wide)
        assert answer.refusal is not None
        assert "5 wide" in answer.refusal
        other = await replica.draft(replace(wide, identity="another"))
        assert other.refusal is not None
        assert "another" in other.refusal  # that is said first
        assert (await replica.draft(good)).replies[0].proposal is not None
        assert (await replica.figures())["invalid"] == 2
        await replica.check_health()

    asyncio.run(run())
    replica.close()
