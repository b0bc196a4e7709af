"""DeepSpeed around a drafter: the only module that knows it."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def start_engine(
    drafter: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    zero_stage: int,
    micro_batches: int,
    per_micro_batch: int,
    schedule: Callable[[int], float],
) -> Any:
    """A DeepSpeed engine with AdamW on float32 weights and a per-step LR factor `schedule(step)`.

    Joins the process group that Ray Train has set up. Mixed precision is the objective's own affair (autocast).
    """
    import deepspeed  # heavy, and picks its accelerator when imported

    if not torch.cuda.is_available():
        # Its shared-memory collective is compiled at first use and needs a compiler; gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    trainable = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    engine, _, _, _ = deepspeed.initialize(
        model=drafter,
        optimizer=optimizer,
        model_parameters=trainable,
        lr_scheduler=scheduler,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": per_micro_batch,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": max_grad_norm,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    return engine


def save_engine(engine: Any, folder: str, client_state: dict[str, Any]) -> None:
    """Write weights, optimiser and LR schedule into `folder`; a collective call, every rank makes it."""
    engine.save_checkpoint(folder, tag="state", client_state=client_state, exclude_frozen_parameters=True)


def load_engine(engine: Any, folder: str) -> dict[str, Any]:
    """Restore what `save_engine` wrote; returns its client state. A collective call."""
    path, client_state = engine.load_checkpoint(folder, tag="state", load_module_strict=False)
    if path is None:
        raise RuntimeError(f"checkpoint {folder} holds no engine state")
    return client_state


def warmup_cosine(total_steps: int, warmup_ratio: float) -> Callable[[int], float]:
    """LR factor by step: linear from 1/W to 1 over W = warmup_ratio * total steps, then cosine to 0."""
    warmup = max(1, int(total_steps * warmup_ratio))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.5 * (1.0 + float(torch.cos(torch.tensor(progress * torch.pi, dtype=torch.float64))))

    return factor


def local_device() -> torch.device:
    """The device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
