"""Draft models: single-device PyTorch code, no Ray, no DeepSpeed, no ranks. Holds the registry."""

from dspark.drafters.config import DrafterConfig
from dspark.drafters.dflash import DFlashDrafter
from dspark.drafters.dspark import DSparkDrafter

DRAFTERS: dict[str, type[DSparkDrafter] | type[DFlashDrafter]] = {"dspark": DSparkDrafter, "dflash": DFlashDrafter}


def build_drafter(config: DrafterConfig) -> DSparkDrafter | DFlashDrafter:
    """An untrained drafter of the config's architecture."""
    return DRAFTERS[config.architecture](config)
