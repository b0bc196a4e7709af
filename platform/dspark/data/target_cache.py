"""The target cache: hidden states on disk, as safetensors shards with a manifest. The format is private to this file.

A folder holds `request.json` (what was asked for), `shard-00000.safetensors` with a sidecar `shard-00000.json`
(checksum and samples, written after the shard: its commit mark) and, last of all, `manifest.json`. What all of them
take at most is in `cache_budget.py`.

Legend: T tokens of a shard, S supervised tokens of it, m captured layers, d hidden size.
    input_ids [T] int32 · loss_mask [T] uint8 · hidden [T, m*d] bf16
    last_hidden [S, d] bf16 (after the final norm) · log_z [S] float32: only where loss_mask is 1
"""

import errno
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.data.chosen_layers import ChosenLayers
from dspark.data.sample_counts import SampleCounts
from dspark.errors import Mismatch, MissingInput, OutOfSpace
from dspark.provenance import file_sha256, read_json, require_same, write_json
from dspark.storage import Location, RemotePath, locate, sizes_in
from dspark.transfer import local_file, staged

FORMAT = 1
REQUEST, MANIFEST = "request.json", "manifest.json"


@dataclass(frozen=True)
class SampleEntry:
    """One sample's place in its shard: token range [start, stop), supervised range [first, first + num_supervised)."""

    id: str
    split: str
    domain: str
    start: int
    stop: int
    first_supervised: int
    num_supervised: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class CachedSample:
    """input_ids [L] int64, loss_mask [L] uint8, hidden [L, m*d], last_hidden [S, d], log_z [S] float32."""

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden: Tensor
    last_hidden: Tensor
    log_z: Tensor


def bytes_of(num_tokens: int, num_supervised: int, *, hidden_size: int, num_layers: int) -> int:
    """Bytes of payload: 5 + 2 m d per token, 4 + 2 d per supervised token."""
    return num_tokens * (5 + 2 * num_layers * hidden_size) + num_supervised * (4 + 2 * hidden_size)


class TargetCacheWriter:
    """Writes shards into a folder; safe to repeat, safe to kill."""

    def __init__(self, folder: str | Location) -> None:
        self.folder = locate(folder)

    def begin(self, request: dict[str, Any], *, fresh: bool) -> None:
        """Start or resume. Raises: Mismatch by field name when the folder holds a cache for another request."""
        if fresh:
            self._remove()
        existing = self.folder / REQUEST
        if existing.is_file():
            require_same(
                f"target cache {self.folder}", request, read_json(existing), remedy="use --fresh or another output"
            )
        else:
            write_json(existing, request)
        for leftover in self.folder.glob(".tmp-*"):
            leftover.unlink(missing_ok=True)

    def is_complete(self, shard: int) -> bool:
        """Whether the shard is there whole: its sidecar exists and the checksum fits.

        In an object store the size has to do, which tells a whole object: its bytes are checked where they are used.
        """
        path, sidecar = self._shard(shard), self._sidecar(shard)
        if not (path.is_file() and sidecar.is_file()):
            return False
        if isinstance(path, RemotePath):
            return bool(path.info().size == read_json(sidecar)["bytes"])
        return file_sha256(path) == read_json(sidecar)["sha256"]

    def write_shard(self, shard: int, samples: Iterable[tuple[CachedSample, str, str]]) -> dict[str, Any]:
        """Write samples (with split and domain) as one shard; returns its sidecar.

        Raises: OutOfSpace when the disk is full; the shard is then absent and can be written again.
        """
        entries, columns = _concatenate(samples)
        path = self._shard(shard)
        # What a worker that died left of this shard goes first, so that the folder never holds it twice.
        leftovers = self.folder.glob(f".tmp-*-{path.name}")
        for leftover in (path, self._sidecar(shard), *leftovers):
            leftover.unlink(missing_ok=True)
        try:
            with staged(path) as temporary:
                save_file(columns, str(temporary))
                temporary.chmod(0o644)
                sha256, num_bytes = file_sha256(temporary), temporary.stat().st_size
            sidecar = {
                "file": path.name,
                "sha256": sha256,
                "bytes": num_bytes,
                "samples": [asdict(entry) for entry in entries],
            }
            write_json(self._sidecar(shard), sidecar)
        except Exception as error:
            if not _is_disk_full(error):
                raise
            raise OutOfSpace(
                f"disk full while writing {path}; free space or lower max_cache_bytes, then run the same command again"
            ) from error
        return sidecar

    def finish(self, request: dict[str, Any], num_shards: int, extra: dict[str, Any]) -> dict[str, Any]:
        """Write the manifest, the mark of a complete cache. Raises: Mismatch if a shard is not there."""
        shards = []
        for shard in range(num_shards):
            if not self._sidecar(shard).is_file():
                raise Mismatch(
                    f"target cache {self.folder}: shard {shard} of {num_shards} is missing; run jobs/cache.py again"
                )
            shards.append(read_json(self._sidecar(shard)))
        manifest = {"format": FORMAT, "request": request, "shards": shards} | extra
        (self.folder / MANIFEST).unlink(missing_ok=True)  # the old one and the new one together may exceed the budget
        write_json(self.folder / MANIFEST, manifest)
        return manifest

    def num_samples(self, num_shards: int) -> int:
        """Samples in the first `num_shards` shards, all of which are there."""
        return sum(len(read_json(self._sidecar(shard))["samples"]) for shard in range(num_shards))

    def is_finished(self) -> bool:
        """Whether there is a manifest and every shard in it is whole; reads all bytes."""
        path = self.folder / MANIFEST
        return path.is_file() and all(self.is_complete(shard) for shard in range(len(read_json(path)["shards"])))

    def check_space(self, projected_bytes: int) -> None:
        """Raises: OutOfSpace when the disk has less room than the shards still to be written; a store always has."""
        if isinstance(self.folder, RemotePath):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if projected_bytes > free:
            raise OutOfSpace(
                f"target cache needs {projected_bytes:,} bytes but {self.folder} has {free:,} free; "
                "lower max_cache_bytes, capture fewer layers or use another output"
            )

    def _remove(self) -> None:
        for pattern in ("shard-*.safetensors", "shard-*.json", REQUEST, MANIFEST, ".tmp-*"):
            for path in self.folder.glob(pattern):
                path.unlink()

    def _shard(self, shard: int) -> Location:
        return self.folder / f"shard-{shard:05d}.safetensors"

    def _sidecar(self, shard: int) -> Location:
        return self.folder / f"shard-{shard:05d}.json"


class TargetCache:
    """A complete cache, opened for reading: the offline SampleSource. Samples are numbered in manifest order.

    layer_ids: the captured layers to read, in this order; None reads all.
    """

    steps_ahead = 0

    def __init__(self, folder: str | Location, *, layer_ids: Sequence[int] | None = None) -> None:
        self.folder = locate(folder)
        if not (self.folder / MANIFEST).is_file():
            raise MissingInput(f"no complete target cache at {self.folder} ({MANIFEST}); make it with jobs/cache.py")
        self.manifest = read_json(self.folder / MANIFEST)
        if self.manifest["format"] != FORMAT:
            raise Mismatch(
                f"target cache {self.folder}: format is {self.manifest['format']}, this version reads {FORMAT}; "
                "make it again with jobs/cache.py --fresh"
            )
        self.request: dict[str, Any] = self.manifest["request"]
        self._layers = ChosenLayers(layer_ids, self.request.get("target_layer_ids"), source=self.description)
        self.entries: list[SampleEntry] = []
        self._files: list[tuple[Location, str]] = []
        sizes = sizes_in(self.folder)
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            if sizes.get(shard["file"]) != shard["bytes"]:
                raise Mismatch(f"target cache shard {path} is missing or cut short; run jobs/cache.py again")
            for sample in shard["samples"]:
                self.entries.append(SampleEntry(**sample))
                self._files.append((path, shard["sha256"]))
        self._open = lru_cache(maxsize=16)(_open_shard)
        self._counts = SampleCounts()

    @property
    def description(self) -> str:
        return f"target cache {self.folder}"

    @property
    def target_config(self) -> dict[str, Any]:
        """The TargetConfig that was captured, as plain values."""
        return dict(self.manifest["target_config"])

    @property
    def origin(self) -> dict[str, Any]:
        """Which of the answers came into the cache, as far as the job that made it says."""
        result = self.manifest.get("result", {})
        return {name: result[name] for name in ("answers", "answers_kept", "rejected") if name in result}

    def __len__(self) -> int:
        return len(self.entries)

    def indices(self, split: str) -> list[int]:
        """Numbers of the samples of a split."""
        return [index for index, entry in enumerate(self.entries) if entry.split == split]

    def expect(self, groups: Iterable[Sequence[int]]) -> None:
        """Nothing to prepare: the states lie on disk."""

    def take_counts(self) -> SampleCounts:
        """What was loaded since the last call."""
        counts, self._counts = self._counts, SampleCounts()
        return counts

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids [L] int64 and loss_mask [L] uint8 of a sample, without its states."""
        entry, shard = self.entries[index], self._open(*self._files[index])
        tokens = slice(entry.start, entry.stop)
        return shard.get_slice("input_ids")[tokens].long(), shard.get_slice("loss_mask")[tokens]

    def load(self, index: int) -> CachedSample:
        """Read one sample from disk."""
        started = time.monotonic()
        entry = self.entries[index]
        shard = self._open(*self._files[index])
        supervised = slice(entry.first_supervised, entry.first_supervised + entry.num_supervised)
        input_ids, loss_mask = self.tokens(index)
        sample = CachedSample(
            id=entry.id,
            input_ids=input_ids,
            loss_mask=loss_mask,
            hidden=self._layers.read(shard.get_slice("hidden"), slice(entry.start, entry.stop)),
            last_hidden=shard.get_slice("last_hidden")[supervised],
            log_z=shard.get_slice("log_z")[supervised],
        )
        self._counts.samples += 1
        self._counts.wait_s += time.monotonic() - started
        return sample

    def verify(self) -> None:
        """Raises: Mismatch naming the first shard whose bytes are not those that were written."""
        for shard in self.manifest["shards"]:
            if file_sha256(self.folder / shard["file"]) != shard["sha256"]:
                raise Mismatch(f"target cache shard {self.folder / shard['file']} is corrupt; run jobs/cache.py again")


def _open_shard(path: Location, sha256: str) -> Any:
    return safe_open(str(local_file(path, sha256=sha256)), framework="pt")


def _concatenate(samples: Iterable[tuple[CachedSample, str, str]]) -> tuple[list[SampleEntry], dict[str, Tensor]]:
    entries: list[SampleEntry] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in ("input_ids", "loss_mask", "hidden", "last_hidden", "log_z")}
    start = supervised = 0
    for sample, split, domain in samples:
        stop = start + sample.input_ids.numel()
        entries.append(SampleEntry(sample.id, split, domain, start, stop, supervised, sample.log_z.numel()))
        start, supervised = stop, supervised + sample.log_z.numel()
        parts["input_ids"].append(sample.input_ids.to(torch.int32))
        parts["loss_mask"].append(sample.loss_mask.to(torch.uint8))
        parts["hidden"].append(sample.hidden.to(torch.bfloat16))
        parts["last_hidden"].append(sample.last_hidden.to(torch.bfloat16))
        parts["log_z"].append(sample.log_z.to(torch.float32))
    # A shard may hold nothing: all its samples may have been left out as not finite.
    return entries, {name: torch.cat(v).contiguous() if v else torch.zeros(0) for name, v in parts.items()}


def _is_disk_full(error: Exception) -> bool:
    """Whether an error of the OS, or of the safetensors writer around it, means that no space is left."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or "os error 28" in str(error)
