"""The fused head loss is its slow twin under autograd: values and gradients, whatever the chunking."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.target_head import TargetHead
from dspark.training import fused
from dspark.training.fused import HeadTargets, head_loss, slot_terms, target_probabilities
from dspark.training.losses import OUTSIDE, slot_losses

N, P, D, R, V = 11, 8, 6, 3, 17
CE_FACTOR, TV_FACTOR = 0.3, 0.9
HEADS = {
    "plain": None,
    "linear": TargetHead(V, V),
    "scaled": TargetHead(V, V, logit_scale=0.25),
    "soft-capped": TargetHead(V, V, softcap=1.5),
    "all of it": TargetHead(V, V, logit_scale=0.5, softcap=2.0, has_bias=True),
}


def products(rows: Tensor, weight: Tensor, head: TargetHead | None) -> Tensor:
    """The target's logits of some states, the plain way."""
    made = rows @ weight.T + (0.0 if head is None or not head.has_bias else head_bias(weight.dtype))
    return made if head is None else head.logits(made)


def head_bias(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.0, 1.0, V, dtype=dtype)


def inputs(
    *, markov: bool, dtype: torch.dtype = torch.float64, head_form: TargetHead | None = None
) -> tuple[list[Tensor | None], Tensor, HeadTargets]:
    """([h, embedded, bias_weight], head_weight, targets); some labels lie outside."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    h, head = random(N, D), random(V, D)
    embedded, bias = (random(N, R), random(V, R)) if markov else (None, None)
    last_hidden = random(P, D)
    rows = torch.tensor([0, 1, 2, 1, 2, 3, 5, 6, 4, 5, 7])
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[[2, 7]] = OUTSIDE
    weights = random(N).abs()
    log_z = products(last_hidden, head, head_form).logsumexp(-1) + 0.3  # some of the target's mass lies outside V'
    targets = HeadTargets(last_hidden, log_z, rows, labels, CE_FACTOR * weights, TV_FACTOR * weights)
    learned = [None if x is None else x.requires_grad_() for x in (h, embedded, bias)]
    return learned, head, targets


def each_tensor(targets: HeadTargets, change: Callable[[Tensor], Tensor]) -> HeadTargets:
    return replace(targets, **{name: change(v) for name, v in vars(targets).items() if isinstance(v, Tensor)})


def twin(
    learned: list[Tensor | None], head: Tensor, targets: HeadTargets, head_form: TargetHead | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    h, embedded, bias = learned
    assert h is not None
    logits = products(h, head, head_form)
    if embedded is not None and bias is not None:
        logits = logits + embedded @ bias.T
    target_logits = products(targets.last_hidden, head, head_form)[targets.rows]
    log_z, soft_labels = targets.log_z[targets.rows], targets.soft_labels
    losses = slot_losses(logits, target_logits, log_z, targets.labels, None, soft_labels=soft_labels)
    loss = (losses.ce * targets.ce_scale).sum() + (losses.tv * targets.tv_scale).sum()
    return loss, losses.ce, losses.tv


def run(
    function, *, markov: bool, dtype: torch.dtype = torch.float64, head_form: TargetHead | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients of a loss function."""
    learned, head, targets = inputs(markov=markov, dtype=dtype, head_form=head_form)
    values = function(learned, head, targets, head_form)
    (2.0 * values[0]).backward()
    return [value.detach() for value in values], [x.grad for x in learned if x is not None]


def fast(
    learned: list[Tensor | None], head: Tensor, targets: HeadTargets, head_form: TargetHead | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    h, embedded, bias = learned
    assert h is not None
    added = head_bias(head.dtype) if head_form is not None and head_form.has_bias else None
    return head_loss(h, embedded, head, bias, targets, head=head_form, head_bias=added)


@pytest.mark.parametrize("head_form", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 11, 128])
@pytest.mark.parametrize("tile", [1, 3])
def test_values_and_gradients_are_those_of_the_twin(
    monkeypatch: pytest.MonkeyPatch, markov: bool, chunk: int, tile: int, head_form: TargetHead | None
):
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(fused, "TILE_BYTES", tile * V * 8)
    values, gradients = run(fast, markov=markov, head_form=head_form)
    expected_values, expected_gradients = run(twin, markov=markov, head_form=head_form)
    for found, expected in zip(values + gradients, expected_values + expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("tile", [1, 3])
def test_soft_labels_too(monkeypatch: pytest.MonkeyPatch, chunk: int, tile: int):
    monkeypatch.setattr(fused, "CHUNK_ROWS", chunk)
    monkeypatch.setattr(fused, "TILE_BYTES", tile * V * 8)
    values, gradients = run(lambda *given: fast(*given[:2], replace(given[2], soft_labels=True)), markov=True)
    expected_values, expected_gradients = run(
        lambda *given: twin(*given[:2], replace(given[2], soft_labels=True)), markov=True
    )
    for found, expected in zip(values + gradients, expected_values + expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    assert not torch.allclose(values[1], run(fast, markov=True)[0][1])


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
    empty = each_tensor(targets, lambda tensor: tensor[:0])
    loss, ce, tv = fast(none, head, empty)
    assert float(loss.detach()) == 0.0
    assert ce.shape == tv.shape == (0,)


def near_target(
    num_slots: int, vocabulary: int, d: int, head_form: TargetHead | None = None
) -> tuple[Tensor, Tensor, HeadTargets]:
    """(h, head, targets): bf16 states and head rows of a drafter that is close to its target."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(d, generator=generator)  # real heads have a common part, which must cancel in the gradient
    head = (0.3 * (common + torch.randn(vocabulary, d, generator=generator))).bfloat16()
    last_hidden = torch.randn(num_slots, d, generator=generator).bfloat16()
    h = (last_hidden.float() + 0.02 * torch.randn(num_slots, d, generator=generator)).bfloat16()
    log_z = products(last_hidden.double(), head.double(), head_form).logsumexp(-1).float()
    labels = torch.randint(0, vocabulary, (num_slots,), generator=generator)
    ce_scale, tv_scale = torch.full((num_slots,), 0.1), torch.full((num_slots,), 0.9)
    return h, head, HeadTargets(last_hidden, log_z, torch.arange(num_slots), labels, ce_scale, tv_scale)


@pytest.mark.parametrize("head_form", [None, TargetHead(32_768, 32_768, softcap=30.0)], ids=["plain", "soft-capped"])
@pytest.mark.parametrize("ce_factor", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_near_the_target_are_within_1_percent_of_float64(
    dtype: torch.dtype, ce_factor: float, head_form: TargetHead | None
):
    h, head, targets = near_target(24, 32_768, 64, head_form)
    targets = replace(targets, ce_scale=torch.full((24,), ce_factor))
    states = h.clone().to(dtype).requires_grad_()
    loss, _, tv = head_loss(states, None, head.float(), None, targets, head=head_form)
    loss.backward()
    assert float(1.0 - 0.5 * tv.mean()) == pytest.approx(0.98, abs=0.01)  # the overlap of p and q
    exact = h.double().requires_grad_()
    wide = each_tensor(targets, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    twin([exact, None, None], head.double(), wide, head_form)[0].backward()
    assert states.grad is not None
    assert exact.grad is not None
    assert states.grad.dtype == dtype
    errors = (states.grad.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert float(errors.max()) < 0.01, errors


def peak_bytes(function: Callable[[], object]) -> int:
    """The most memory that is held at once while the function runs, beyond what was held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=start_of)
    return max(accumulate(event.nbytes() for event in events))


def start_of(event: Any) -> int:
    return event.start_ns()


def test_the_peak_of_extra_memory_is_an_eighth_of_the_twins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "CHUNK_ROWS", 16)
    h, head, targets = near_target(16 * 14, 4096, 16)  # 3,584 positions are 14 chunks of 256
    wide = head.float()
    in_float32 = replace(targets, last_hidden=targets.last_hidden.float())
    eager = peak_bytes(lambda: twin([h.float().requires_grad_(), None, None], wide, in_float32)[0].backward())
    chunked = peak_bytes(lambda: head_loss(h.requires_grad_(), None, wide, None, targets)[0].backward())
    assert eager > 5 * h.shape[0] * 4096 * 4  # the measure sees what the twin holds
    assert chunked <= eager / 8


@pytest.mark.parametrize("soft_labels", [False, True])
def test_a_chunk_is_one_graph_for_the_compiler(soft_labels: bool):
    h, head, targets = near_target(12, 50, 8)
    rest = (targets.rows, targets.labels, targets.ce_scale, targets.tv_scale)

    def terms(compiled: Callable[..., Any]) -> tuple[Tensor, ...]:
        logits, target = h.float() @ head.float().T, targets.last_hidden.float() @ head.float().T
        outside_mass = compiled(target_probabilities)(target, targets.log_z)
        losses = compiled(slot_terms)(logits, target, outside_mass, *rest, soft_labels=soft_labels)
        return (logits, target, outside_mass, *losses)

    graphs = terms(lambda function: torch.compile(function, fullgraph=True, backend="aot_eager"))
    for found, expected in zip(graphs, terms(lambda function: function), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("soft_labels", [False, True])
def test_a_gpu_gives_the_values_and_gradients_of_the_cpu(dtype: torch.dtype, soft_labels: bool):
    results = []
    for device in ("cpu", "cuda"):
        h, head, targets = near_target(300, 4096, 64)
        states = h.to(device, dtype).requires_grad_()
        on_device = each_tensor(replace(targets, soft_labels=soft_labels), lambda tensor: tensor.to(device))  # noqa: B023
        values = head_loss(states, None, head.float().to(device), None, on_device)
        values[0].backward()
        assert states.grad is not None
        results.append([value.detach().cpu() for value in values] + [states.grad.float().cpu()])
    for on_gpu, on_cpu in zip(*reversed(results), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=2e-3, rtol=1e-2)
