"""The target's hidden states, captured the same way for the cache, for evaluation and for serving.

Legend: B sequences, T tokens, d hidden size, m captured layers, N layers of the target.

    id          -1                    0 … N-2            N                      N+1
    state       what the first        what a decoder     what the final norm    what it gives, which the
                layer is given        layer gives        is given               head reads
"""

from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

EMBEDDINGS = -1
WRAPPED = ("language_model", "decoder")  # where a decoder may lie in the library's base model
LAYERS = ("layers", "h", "blocks")  # what decoder layers and the norm behind them are called
NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "layer_norm", "embedding_norm")


def check_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Raises: ValueError unless ids ascend strictly within -1 (embeddings) … N - 2, or are N or N + 1.

    The last layer is refused: libraries disagree on whether its state is taken before or after the final norm. The
    two states there have ids of their own.
    """
    ids = list(layer_ids)
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"target_layer_ids must be strictly increasing and not empty, got {ids}")
    wrong = [i for i in ids if i >= num_target_layers - 1 and i not in (num_target_layers, num_target_layers + 1)]
    if wrong:
        raise ValueError(
            f"target_layer_ids {ids}: layer {wrong[0]} is not below the last layer of a target with "
            f"{num_target_layers} layers; use ids up to {num_target_layers - 2}"
        )
    if ids[0] < EMBEDDINGS:
        raise ValueError(f"target_layer_ids {ids}: ids start at {EMBEDDINGS}, which means the embeddings")


class HiddenStateCapture:
    """Collects states of every forward pass inside a `with` block.

    layer_ids: as in the table above. After a forward, `hidden()` is [B, T, m*d] in that order.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        decoder = decoder_of(model)
        layers, norm = _part(decoder, LAYERS), _part(decoder, NORM)
        num_layers = len(layers)
        check_layer_ids(layer_ids, num_layers)
        self.layer_ids = tuple(layer_ids)
        others = {EMBEDDINGS: layers[0], num_layers: norm, num_layers + 1: norm}
        self._modules = [others[i] if i in others else layers[i] for i in self.layer_ids]
        self._is_input = [i in (EMBEDDINGS, num_layers) for i in self.layer_ids]
        self._device = decoder.get_input_embeddings().weight.device
        self._states: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> "HiddenStateCapture":
        self._hooks = [
            module.register_forward_hook(self._keep(position, is_input=is_input), with_kwargs=True)
            for position, (module, is_input) in enumerate(zip(self._modules, self._is_input, strict=True))
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._states = {}

    def hidden(self) -> Tensor:
        """States of the latest forward pass: [B, T, m*d], layers concatenated in the order of layer_ids.

        On the embedding's device, wherever the layers lie: that is where inputs go and drafters are.
        """
        assert len(self._states) == len(self._modules), "no forward pass inside the capture yet"
        states = [self._states[i].to(self._device) for i in range(len(self._modules))]
        return torch.cat(states, dim=-1)

    def _keep(self, position: int, *, is_input: bool) -> Any:
        def hook(_module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
            taken = (inputs or named["hidden_states"]) if is_input else output
            self._states[position] = taken[0] if isinstance(taken, tuple) else taken

        return hook


def decoder_of(model: nn.Module) -> Any:
    """The module of a HF causal LM that holds its layers and final norm.

    Raises: ValueError naming the class when it has none under a name that is known.
    """
    decoder: Any = getattr(model, "model", getattr(model, "base_model", model))
    for name in WRAPPED:
        decoder = getattr(decoder, name, decoder)
    if _part(decoder, LAYERS) is None or _part(decoder, NORM) is None:
        raise ValueError(
            f"target class {type(model).__name__} has no {'/'.join(LAYERS)} with a {'/'.join(NORM)} behind them; "
            "its states cannot be captured: use it without a trained drafter"
        )
    return decoder


def _part(decoder: Any, names: Sequence[str]) -> Any:
    return next((part for name in names if (part := getattr(decoder, name, None)) is not None), None)
