"""Answers and target cache in an object store: written, killed in mid-object, resumed, read; as on a disk."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.data.answers import AnswerStore, read_answers
from dspark.data.prompts import Prompt, PromptSet
from dspark.data.target_cache import TargetCache, TargetCacheWriter
from dspark.errors import DsparkError, Mismatch, MissingInput
from dspark.storage import RemotePath, locate, sizes_in
from remote_store import folder_store, killed_in_upload
from tiny_answers import make_tiny_answers
from tiny_cache import make_tiny_cache

REQUEST: dict[str, Any] = {"target": {"name": "t"}, "target_layer_ids": [0, 2]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/place" if request.param == "memory" else folder_store(tmp_path / "place")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> TargetCache:
    """A cache of two shards on disk."""
    return make_tiny_cache(tmp_path_factory.mktemp("made"), tiny_target, train=3, heldout=1)


def samples_of(cache: TargetCache) -> list[list[Any]]:
    """What the writer was given, by shard."""
    samples = iter([(cache.load(index), entry.split, entry.domain) for index, entry in enumerate(cache.entries)])
    return [list(islice(samples, len(shard["samples"]))) for shard in cache.manifest["shards"]]


def write_again(cache: TargetCache, place: str) -> TargetCache:
    """The same cache, written to another place."""
    writer = TargetCacheWriter(place)
    writer.begin(cache.request, fresh=False)
    for number, samples in enumerate(samples_of(cache)):
        writer.write_shard(number, samples)
    extra = {name: cache.manifest[name] for name in ("target_config", "result")}
    writer.finish(cache.request, len(cache.manifest["shards"]), extra)
    return TargetCache(place)


def row(prompt_id: str) -> dict[str, Any]:
    return {
        "id": prompt_id,
        "domain": "math",
        "split": "train",
        "status": "ok",
        "error": None,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
        "turns": [{"prompt_ids": [5, 6], "output_ids": [7, 2], "finish_reason": "stop"}],
    }


def prompts(*names: str) -> PromptSet:
    return PromptSet([Prompt(name, "math", "train", [{"role": "user", "content": "hi"}]) for name in names])


def finish(store: AnswerStore, *names: str) -> None:
    store.finish(REQUEST, prompts(*names), {"target": {"name": "t"}})


def test_answers_read_back_as_on_a_disk(place: str, tmp_path: Path) -> None:
    found = []
    for folder in (place, str(tmp_path / "local")):
        store = AnswerStore(folder)
        store.check_request(REQUEST)
        run = store.begin(REQUEST)
        store.write_part([row("a"), row("b")], run=run)
        store.write_part([row("c")], run=run)
        assert store.done_ids() == {"a", "b", "c"}
        store.check_unchanged(prompts("a", "b").prompts)
        store.write_rejected(prompts("a"))
        with pytest.raises(MissingInput, match="incomplete"):
            read_answers(folder)
        finish(store, "a", "b", "c")
        answers = read_answers(folder)
        found.append((sorted(answers.rows(), key=lambda one: one["id"]), answers.fingerprint, answers.manifest))
    assert found[0] == found[1]


def test_a_part_that_was_half_written_is_made_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnswerStore(place)
    store.write_part([row("a")], run=store.begin(REQUEST))
    run = store.begin(REQUEST)
    path = store.write_part([row("b")], run=run)
    path.unlink()
    with monkeypatch.context() as patch:
        killed_in_upload(patch, at_name=path.name)
        with pytest.raises(KeyboardInterrupt):
            store.write_part([row("b")], run=run)
    assert len(sizes_in(store.parts)) == 2
    again = AnswerStore(place)
    run = again.begin(REQUEST)
    assert again.done_ids() == {"a"}
    again.write_part([row("b")], run=run)
    finish(again, "a", "b")
    assert {one["id"] for one in read_answers(place).rows()} == {"a", "b"}


def test_a_run_that_was_overtaken_writes_no_object(place: str) -> None:
    store = AnswerStore(place)
    old = store.begin(REQUEST)
    store.begin(REQUEST)
    with pytest.raises(DsparkError, match="another run has taken over"):
        store.write_part([row("a")], run=old)
    assert sizes_in(store.parts) == {}


def test_clearing_removes_own_objects_only(place: str) -> None:
    store = AnswerStore(place)
    store.write_part([row("a")], run=store.begin(REQUEST))
    finish(store, "a")
    (store.folder / "notes.txt").write_bytes(b"mine")
    store.clear()
    assert sizes_in(store.folder) == {"notes.txt": 4}
    assert sizes_in(store.parts) == {}


def test_a_cache_is_the_same_bytes_as_on_a_disk(place: str, made: TargetCache) -> None:
    remote = write_again(made, place)
    remote.verify()
    assert remote.manifest == made.manifest
    assert remote.indices("heldout") == made.indices("heldout")
    for index in range(len(made)):
        ours, theirs = remote.load(index), made.load(index)
        assert ours.id == theirs.id
        for name in ("input_ids", "loss_mask", "hidden", "last_hidden", "log_z"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_cache_that_was_killed_in_mid_shard_goes_on(
    place: str, made: TargetCache, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    first, second = samples_of(made)
    writer = TargetCacheWriter(place)
    writer.begin(REQUEST, fresh=False)
    writer.write_shard(0, first)
    with monkeypatch.context() as patch:
        killed_in_upload(patch, at_name="shard-00001.safetensors", share=share)
        with pytest.raises(KeyboardInterrupt):
            writer.write_shard(1, second)
    with pytest.raises(MissingInput, match="no complete target cache"):
        TargetCache(place)

    again = TargetCacheWriter(place)
    again.begin(REQUEST, fresh=False)
    again.check_space(10**18)  # a store has no end that could be asked for
    assert [again.is_complete(shard) for shard in (0, 1)] == [True, False]
    with pytest.raises(Mismatch, match="shard 1 of 2 is missing"):
        again.finish(REQUEST, 2, {})
    again.write_shard(1, second)
    again.finish(REQUEST, 2, {})
    assert again.is_finished()
    cache = TargetCache(place)
    cache.verify()
    assert [cache.load(index).id for index in range(len(cache))] == [sample.id for sample, _, _ in first + second]


def test_shards_that_are_cut_or_changed_are_noticed(place: str, made: TargetCache) -> None:
    write_again(made, place)
    folder = locate(place)
    path = folder / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Mismatch, match=r"shard-00001\.safetensors is corrupt"):
        TargetCache(place).verify()
    cache = TargetCache(place)
    with pytest.raises(Mismatch, match=r"shard-00001\.safetensors is corrupt"):
        [cache.load(index) for index in range(len(cache))]
    path.write_bytes(whole[:-1])
    with pytest.raises(Mismatch, match="missing or cut short"):
        TargetCache(place)
    assert not TargetCacheWriter(place).is_complete(1)


def test_fresh_starts_over_in_a_store(place: str, made: TargetCache) -> None:
    request = write_again(made, place).request
    folder = locate(place)
    (folder / "notes.txt").write_bytes(b"mine")
    with pytest.raises(Mismatch, match=r"dtype is .* is asked for"):
        TargetCacheWriter(place).begin(request | {"dtype": "float32"}, fresh=False)
    TargetCacheWriter(place).begin(REQUEST, fresh=True)
    assert sorted(sizes_in(folder)) == ["notes.txt", "request.json"]


def test_a_shard_is_fetched_once_however_many_samples_are_read(
    place: str, made: TargetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_again(made, place)
    fetched: list[str] = []
    download = RemotePath.download

    def counting(self: RemotePath, destination: Path) -> None:
        fetched.append(self.name)
        download(self, destination)

    monkeypatch.setattr(RemotePath, "download", counting)
    for reader in (cache, TargetCache(place)):
        for index in range(len(reader)):
            reader.load(index)
    assert sorted(fetched) == ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_the_cache_stage_reads_answers_from_a_store(place: str, tiny_target: Path, tmp_path: Path) -> None:
    make_tiny_answers(place, tiny_target, ok=3)
    make_tiny_answers(tmp_path / "local", tiny_target, ok=3)
    remote, local = read_answers(place), read_answers(tmp_path / "local")
    assert list(remote.rows()) == list(local.rows())
    assert remote.fingerprint == local.fingerprint
