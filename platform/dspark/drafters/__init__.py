"""Draft models: single-device PyTorch code, no Ray, no DeepSpeed, no ranks. Holds the registry."""

from typing import overload

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.eagle3 import Eagle3Config, eagle3_drafter
from dspark.drafters.mtp import MTPConfig, mtp_drafter

TrainedDrafter = DSparkDrafter | DFlashDrafter | AutoregressiveDrafter
AnyDrafterConfig = DrafterConfig | Eagle3Config | MTPConfig

DRAFTERS: dict[str, type[DSparkDrafter] | type[DFlashDrafter]] = {"dspark": DSparkDrafter, "dflash": DFlashDrafter}


@overload
def build_drafter(config: DrafterConfig) -> DSparkDrafter | DFlashDrafter: ...
@overload
def build_drafter(config: Eagle3Config | MTPConfig) -> AutoregressiveDrafter: ...
def build_drafter(config: AnyDrafterConfig) -> TrainedDrafter:
    """An untrained drafter of the config's architecture."""
    if isinstance(config, Eagle3Config):
        return eagle3_drafter(config)
    if isinstance(config, MTPConfig):
        return mtp_drafter(config)
    return DRAFTERS[config.architecture](config)
