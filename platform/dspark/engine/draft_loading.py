"""A draft server from a drafter's folder, checked against the target that it drafts for."""

import torch

from dspark.attention.choice import choose_entries
from dspark.drafters.checkpoint import load_drafter
from dspark.engine.draft_server import DraftServer, DraftServerConfig
from dspark.engine.drafter_folder import COST_CURVE, DRAFTER_FILES, check_drafter, draft_identity
from dspark.engine.loading import paged_runner
from dspark.errors import MissingInput
from dspark.speculation.cost_curve import CostCurve, hardware_fingerprint
from dspark.speculation.draft_supply import drafter_of
from dspark.storage import locate
from dspark.targets import TargetConfig, load_target_config
from dspark.transfer import local_folder


def load_draft_server(
    target: TargetConfig, folder: str, *, config: DraftServerConfig, num_threads: int = 1
) -> DraftServer:
    """The drafter computes in the target's type, on the device that the target's config names. What drafting takes is
    known beforehand where the folder has a cost curve of this hardware and so many threads.

    Raises: MissingInput without a drafter; Mismatch if it was trained for another target.
    """
    torch.set_num_threads(num_threads)
    check_drafter(folder, target)
    folder = str(local_folder(folder, (*DRAFTER_FILES, COST_CURVE)))
    drafter = load_drafter(folder, dtype=_dtype(target), device=_device(target))
    runner = paged_runner(drafter, num_pages=config.num_pages, page_size=config.page_size)
    if _device(target).startswith("cuda") and runner.kv_cache.keys:
        runner.use_attention(choose_entries(runner.kv_cache, config.page_size).entries[0].name)
    device = torch.device(_device(target))
    try:
        wanted = hardware_fingerprint(device, _dtype(target), num_threads, target.name)
        curve = CostCurve.load(locate(folder) / COST_CURVE, wanted)
    except MissingInput:
        curve = None  # the target replicas' logs say what is missed
    identity = draft_identity(folder, target)
    return DraftServer(runner, identity=identity, config=config, device=device, prior=drafter_of(curve))


def _dtype(target: TargetConfig) -> torch.dtype:
    if target.dtype != "auto":
        found: torch.dtype = getattr(torch, target.dtype)
        return found
    stored = load_target_config(target).dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _device(target: TargetConfig) -> str:
    if target.device != "auto":
        return target.device
    return "cuda" if torch.cuda.is_available() else "cpu"
