"""Which entry computes the attention of a step: the fastest one that serves this memory."""

from dataclasses import dataclass

from dspark.attention import cpu, flash, flex
from dspark.attention.entry import AttentionEntry, CapturableEntry, Planner, StepPlan
from dspark.attention.flat_batch import FlatBatch
from dspark.attention.kv_cache import PagedKVCache
from dspark.attention.paged import plan_of

NAMES = ("cpu", "flash", "flex", "torch")


class CpuEntry:
    """Our kernel."""

    name = "cpu"

    def plan(self, batch: FlatBatch) -> StepPlan:
        return plan_of(batch)


class TorchEntry:
    """The reference."""

    name = "torch"

    def plan(self, batch: FlatBatch) -> None:
        return None


@dataclass(frozen=True)
class Choice:
    """entries: that serve, the fastest first; left_out: why others do not, by name."""

    entries: list[AttentionEntry]
    left_out: dict[str, str]


def choose_entries(kv_cache: PagedKVCache, page_size: int) -> Choice:
    """Entries for this memory on its device; the last one serves everywhere."""
    if kv_cache.keys[0].device.type != "cuda":
        return Choice([CpuEntry(), TorchEntry()] if cpu.is_served(kv_cache) else [TorchEntry()], {})
    reasons = {"flash": flash.unserved(kv_cache, page_size), "flex": flex.unserved(kv_cache, page_size)}
    entries: list[AttentionEntry] = []
    attention = flash.installed()
    if reasons["flash"] is None and attention is not None:
        entries.append(flash.FlashEntry(kv_cache, page_size, attention))
    if reasons["flex"] is None:
        entries.append(flex.FlexEntry(kv_cache, page_size))
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return Choice([*entries, TorchEntry()], left_out)


def named_entry(name: str, kv_cache: PagedKVCache, page_size: int) -> AttentionEntry:
    """Raises: ValueError when there is no such entry, or it does not serve this memory."""
    if name not in NAMES:
        raise ValueError(f"attention {name!r} is not known; use one of {', '.join(NAMES)}")
    if name == "torch":
        return TorchEntry()
    if name == "flex":
        reason = flex.unserved(kv_cache, page_size)
        if reason is None:
            return flex.FlexEntry(kv_cache, page_size)
    elif name == "flash":
        reason, attention = flash.unserved(kv_cache, page_size), flash.installed()
        if reason is None and attention is not None:
            return flash.FlashEntry(kv_cache, page_size, attention)
    else:
        reason = None if cpu.is_served(kv_cache) else "it is not built, or does not take this memory"
        if reason is None:
            return CpuEntry()
    raise ValueError(f"attention {name!r} does not serve here: {reason}")


def cuda_planner(name: str, kv_cache: PagedKVCache, page_size: int) -> Planner | None:
    """Plans of the entry that the target was found to run on, for a drafter's memory; None where there are none."""
    if name == "flex" and flex.unserved(kv_cache, page_size) is None:
        return flex.FlexEntry(kv_cache, page_size).plan_of
    attention = flash.installed()
    if name == "flash" and attention is not None and flash.unserved(kv_cache, page_size) is None:
        return flash.FlashEntry(kv_cache, page_size, attention).plan_of
    return None


def as_capturable(entry: AttentionEntry) -> CapturableEntry | None:
    """The entry, where its work can be captured in a graph."""
    return entry if isinstance(entry, flash.FlashEntry | flex.FlexEntry) else None
