"""The cache on disk: what is written is what is read; what is missing, cut short or foreign is refused."""

import errno
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from dspark.data import target_cache
from dspark.data.target_cache import CachedSample, TargetCache, TargetCacheWriter, bytes_of
from dspark.errors import Mismatch, MissingInput, OutOfSpace

REQUEST = {"target": {"name": "t"}, "target_layer_ids": [0, 2], "dtype": "bfloat16"}
WIDTH, HIDDEN = 6, 3


def sample(name: str, length: int) -> CachedSample:
    generator = torch.Generator().manual_seed(length)
    mask = torch.zeros(length, dtype=torch.uint8)
    mask[length // 2 :] = 1
    supervised = int(mask.sum())
    return CachedSample(
        id=name,
        input_ids=torch.randint(0, 60000, (length,), generator=generator),
        loss_mask=mask,
        hidden=torch.randn(length, WIDTH, generator=generator).bfloat16(),
        last_hidden=torch.randn(supervised, HIDDEN, generator=generator).bfloat16(),
        log_z=torch.randn(supervised, generator=generator),
    )


SHARDS = [[sample("a", 5), sample("b", 8)], [sample("c", 1), sample("d", 7)]]
SPLITS = {"a": "train", "b": "heldout", "c": "train", "d": "train"}


def write_shard(writer: TargetCacheWriter, shard: int) -> None:
    writer.write_shard(shard, ((one, SPLITS[one.id], "chat") for one in SHARDS[shard]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete cache of two shards."""
    writer = TargetCacheWriter(tmp_path / "cache")
    writer.begin(REQUEST, fresh=False)
    for shard in range(len(SHARDS)):
        write_shard(writer, shard)
    writer.finish(REQUEST, len(SHARDS), {"note": 1})
    return tmp_path / "cache"


def test_samples_come_back_bit_for_bit_and_in_order(folder: Path):
    cache = TargetCache(folder)
    written = [one for shard in SHARDS for one in shard]
    assert len(cache) == len(written)
    for index, one in enumerate(written):
        found = cache.load(index)
        assert found.id == one.id
        for name in ("input_ids", "loss_mask", "hidden", "last_hidden", "log_z"):
            assert torch.equal(getattr(found, name), getattr(one, name)), name


@pytest.mark.parametrize("layer_ids", [(0,), (2,), (2, 0), (0, 2)])
def test_chosen_layers_are_read_in_their_order(folder: Path, layer_ids: tuple[int, ...]):
    found = TargetCache(folder, layer_ids=layer_ids).load(3).hidden
    columns = {0: slice(0, 3), 2: slice(3, 6)}
    assert torch.equal(found, torch.cat([SHARDS[1][1].hidden[:, columns[i]] for i in layer_ids], dim=1))


def test_a_layer_that_was_not_captured_is_refused(folder: Path):
    with pytest.raises(Mismatch, match=r"no states of layer 1, only of \[0, 2\]; capture them with jobs/cache\.py"):
        TargetCache(folder, layer_ids=(0, 1))


def test_a_split_is_its_own_samples(folder: Path):
    cache = TargetCache(folder)
    assert cache.indices("train") == [0, 2, 3]
    assert cache.indices("heldout") == [1]
    assert cache.indices("other") == []


def test_the_manifest_keeps_request_and_extras(folder: Path):
    cache = TargetCache(folder)
    assert cache.request == REQUEST
    assert cache.manifest["note"] == 1


def test_the_payload_has_the_announced_size(folder: Path):
    tokens = sum(one.input_ids.numel() for shard in SHARDS for one in shard)
    supervised = sum(one.log_z.numel() for shard in SHARDS for one in shard)
    announced = bytes_of(tokens, supervised, hidden_size=HIDDEN, num_layers=WIDTH // HIDDEN)
    on_disk = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    assert 0 <= on_disk - announced < 1000 * len(SHARDS)  # safetensors' own headers


def test_a_cache_without_manifest_names_the_job_that_makes_it(folder: Path):
    (folder / "manifest.json").unlink()
    with pytest.raises(MissingInput, match=r"no complete target cache .*jobs/cache\.py"):
        TargetCache(folder)


def test_another_format_is_refused(folder: Path):
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Mismatch, match="format is 0, this version reads 1"):
        TargetCache(folder)


@pytest.mark.parametrize("field", ["target_layer_ids", "dtype", "target"])
def test_another_request_is_refused_by_field_name(folder: Path, field: str):
    with pytest.raises(Mismatch, match=f"{field} is .* is asked for; use --fresh or another output"):
        TargetCacheWriter(folder).begin(REQUEST | {field: ["other"]}, fresh=False)


def test_fresh_starts_over_and_leaves_foreign_files_alone(folder: Path):
    (folder / "notes.txt").write_text("mine")
    TargetCacheWriter(folder).begin(REQUEST | {"dtype": "float32"}, fresh=True)
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "request.json"]


def test_a_shard_that_was_cut_short_is_noticed_when_the_cache_is_opened(folder: Path):
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Mismatch, match=r"shard-00001\.safetensors is missing or cut short"):
        TargetCache(folder)
    path.unlink()
    with pytest.raises(Mismatch, match="missing or cut short"):
        TargetCache(folder)


def test_a_flipped_bit_is_noticed_by_verify_and_written_again_on_resume(folder: Path):
    path = folder / "shard-00000.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(Mismatch, match=r"shard-00000\.safetensors is corrupt"):
        TargetCache(folder).verify()
    writer = TargetCacheWriter(folder)
    writer.begin(REQUEST, fresh=False)
    assert [writer.is_complete(shard) for shard in (0, 1)] == [False, True]
    write_shard(writer, 0)
    assert writer.is_complete(0)
    assert path.read_bytes() == before
    TargetCache(folder).verify()


def test_a_cache_is_finished_when_it_has_a_manifest_and_all_its_shards_are_whole(folder: Path):
    writer = TargetCacheWriter(folder)
    assert writer.is_finished()
    assert writer.num_samples(2) == 4
    path = folder / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not writer.is_finished()
    path.write_bytes(whole)
    (folder / "manifest.json").unlink()
    assert not writer.is_finished()


def test_a_kill_between_shard_and_sidecar_leaves_the_shard_to_be_written_again(folder: Path):
    (folder / "shard-00001.json").unlink()
    writer = TargetCacheWriter(folder)
    assert not writer.is_complete(1)
    with pytest.raises(Mismatch, match=r"shard 1 of 2 is missing; run jobs/cache\.py again"):
        writer.finish(REQUEST, 2, {})
    write_shard(writer, 1)
    assert writer.is_complete(1)


def test_leftovers_of_a_kill_are_removed_on_resume(folder: Path):
    (folder / ".tmp-1-abc-shard-00003.safetensors").write_bytes(b"half")
    TargetCacheWriter(folder).begin(REQUEST, fresh=False)
    assert not list(folder.glob(".tmp-*"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError('Io(Os { code: 28, kind: StorageFull, message: "No space left on device" })'),
    ],
    ids=["os", "safetensors"],
)
def test_a_full_disk_leaves_no_shard_and_no_manifest_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    writer = TargetCacheWriter(tmp_path)
    writer.begin(REQUEST, fresh=False)
    write_shard(writer, 0)

    def full(_tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(target_cache, "save_file", full)
        with pytest.raises(OutOfSpace, match=r"disk full while writing .*shard-00001.*then run the same command again"):
            write_shard(writer, 1)
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.glob(".tmp-*"))
    again = TargetCacheWriter(tmp_path)
    again.begin(REQUEST, fresh=False)
    assert [again.is_complete(shard) for shard in (0, 1)] == [True, False]
    write_shard(again, 1)
    again.finish(REQUEST, 2, {})
    assert len(TargetCache(tmp_path)) == 4


def test_an_error_that_is_no_full_disk_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(_tensors: Any, _path: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(target_cache, "save_file", broken)
    with pytest.raises(OSError, match="Input/output error"):
        write_shard(TargetCacheWriter(tmp_path), 0)


def test_too_little_free_space_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(target_cache.shutil, "disk_usage", lambda _: usage(10_000, 9_000, 1_000))
    writer = TargetCacheWriter(tmp_path / "cache")
    writer.check_space(1_000)
    with pytest.raises(OutOfSpace, match=r"needs 1,001 bytes but .* has 1,000 free; lower max_cache_bytes"):
        writer.check_space(1_001)


def test_a_shard_of_no_samples_can_be_written_and_read_over(tmp_path: Path):
    writer = TargetCacheWriter(tmp_path)
    writer.begin(REQUEST, fresh=False)
    writer.write_shard(0, ())
    write_shard(writer, 1)
    writer.finish(REQUEST, 2, {})
    cache = TargetCache(tmp_path)
    assert [cache.load(index).id for index in range(len(cache))] == ["c", "d"]
