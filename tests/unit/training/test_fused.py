"""The fused head loss is its slow twin under autograd: values and gradients, whatever the chunking."""

import pytest
import torch
from torch import Tensor

from dspark.training import fused
from dspark.training.fused import HeadTargets, head_loss
from dspark.training.losses import OUTSIDE, slot_losses

N, D, R, V = 11, 6, 3, 17
CE_FACTOR, TV_FACTOR = 0.3, 0.9


def inputs(*, markov: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor | None], Tensor, HeadTargets]:
    """([h, embedded, bias_weight], head_weight, targets); some labels lie outside."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    h, head = random(N, D), random(V, D)
    embedded, bias = (random(N, R), random(V, R)) if markov else (None, None)
    last_hidden = random(N, D)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[[2, 7]] = OUTSIDE
    weights = random(N).abs()
    log_z = (last_hidden @ head.T).logsumexp(-1) + 0.3  # some of the target's mass lies outside V'
    targets = HeadTargets(last_hidden, log_z, labels, CE_FACTOR * weights, TV_FACTOR * weights)
    learned = [None if x is None else x.requires_grad_() for x in (h, embedded, bias)]
    return learned, head, targets


def twin(learned: list[Tensor | None], head: Tensor, targets: HeadTargets) -> tuple[Tensor, Tensor, Tensor]:
    h, embedded, bias = learned
    assert h is not None
    logits = h @ head.T
    if embedded is not None and bias is not None:
        logits = logits + embedded @ bias.T
    losses = slot_losses(logits, targets.last_hidden @ head.T, targets.log_z, targets.labels, None)
    loss = (losses.ce * targets.ce_scale).sum() + (losses.tv * targets.tv_scale).sum()
    return loss, losses.ce, losses.tv


def run(function, *, markov: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients of a loss function."""
    learned, head, targets = inputs(markov=markov, dtype=dtype)
    values = function(learned, head, targets)
    (2.0 * values[0]).backward()
    return [value.detach() for value in values], [x.grad for x in learned if x is not None]


def fast(learned: list[Tensor | None], head: Tensor, targets: HeadTargets) -> tuple[Tensor, Tensor, Tensor]:
    h, embedded, bias = learned
    assert h is not None
    return head_loss(h, embedded, head, bias, targets)


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 11, 128])
def test_values_and_gradients_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch, markov: bool, chunk: int):
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    values, gradients = run(fast, markov=markov)
    expected_values, expected_gradients = run(twin, markov=markov)
    for found, expected in zip(values + gradients, expected_values + expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


def test_float32_stays_close_to_float64():
    values, gradients = run(fast, markov=True, dtype=torch.float32)
    expected_values, expected_gradients = run(twin, markov=True)
    for found, expected in zip(values + gradients, expected_values + expected_gradients, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_without_gradients_the_values_are_the_same():
    learned, head, targets = inputs(markov=True)
    with torch.no_grad():
        values = fast(learned, head, targets)
    for found, expected in zip(values, twin(learned, head, targets), strict=True):
        torch.testing.assert_close(found, expected.detach())
        assert not found.requires_grad


def test_no_slot_at_all_is_no_loss():
    learned, head, targets = inputs(markov=True)
    none = [None if x is None else x[:0] if x.shape[0] == N else x for x in learned]
    empty = HeadTargets(
        targets.last_hidden[:0], targets.log_z[:0], targets.labels[:0], targets.ce_scale[:0], targets.tv_scale[:0]
    )
    loss, ce, tv = fast(none, head, empty)
    assert float(loss.detach()) == 0.0
    assert ce.shape == tv.shape == (0,)
