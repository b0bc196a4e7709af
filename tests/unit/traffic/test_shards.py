"""A bounded folder: never over its bytes, the oldest go first, nothing else is touched, also elsewhere than on disk."""

import os
import random
import time
from pathlib import Path

import pytest

from dspark.storage import locate, sizes_in
from dspark.traffic.shards import ROUNDS, TEXTS, ShardFolder, shard_names


def test_it_never_holds_more_than_its_bytes_and_the_oldest_go_first(tmp_path: Path) -> None:
    draw, folder = random.Random(0), ShardFolder(str(tmp_path / "t"), writer="r/1#2", max_bytes=100_000)
    written = []
    for _ in range(60):
        content = os.urandom(draw.randint(1, 30_000))
        written.append(folder.write(draw.choice([ROUNDS, TEXTS]), content))
        present = sizes_in(tmp_path / "t")
        assert sum(present.values()) == folder.num_bytes <= 100_000
        assert [name for name in written if name in present] == written[-len(present) :]
    assert folder.num_removed == 60 - len(sizes_in(tmp_path / "t"))
    assert oct((tmp_path / "t").stat().st_mode & 0o777) == "0o700"


def test_files_of_one_millisecond_go_in_the_order_in_which_they_were_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dspark.traffic.shards.time.time", lambda: 1_000.0)
    folder = ShardFolder(str(tmp_path), writer="r", max_bytes=250)
    written = [folder.write(kind, bytes(100)) for kind in (TEXTS, ROUNDS, TEXTS, ROUNDS)]
    assert sizes_in(tmp_path).keys() == set(written[2:])


def test_what_never_fits_is_refused_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x" * 500_000)
    (tmp_path / "fine_tune.json").write_text("{}")
    folder = ShardFolder(str(tmp_path), writer="r", max_bytes=1000)
    with pytest.raises(ValueError, match=r"1,001 bytes do not fit into max_bytes \(1,000\)"):
        folder.write(ROUNDS, bytes(1001))
    for _ in range(5):
        folder.write(ROUNDS, bytes(900))
    assert {"notes.txt", "fine_tune.json"} < sizes_in(tmp_path).keys()
    assert len(list(shard_names(tmp_path, ROUNDS))) == 1


def test_two_writers_share_the_folder(tmp_path: Path) -> None:
    one, other = (ShardFolder(str(tmp_path), writer=name, max_bytes=10_000) for name in ("a", "b"))
    for _ in range(10):
        one.write(ROUNDS, bytes(1500))
        other.write(TEXTS, bytes(1500))
    assert sum(sizes_in(tmp_path).values()) <= 10_000
    assert list(shard_names(tmp_path, ROUNDS)) == sorted(shard_names(tmp_path, ROUNDS), reverse=True)


def test_what_a_crash_left_half_written_goes_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".tmp-1-a-x", tmp_path / ".tmp-2-b-y"
    for path in (old, new):
        path.write_text("secret")
    os.utime(old, (time.time() - 7200,) * 2)
    ShardFolder(str(tmp_path), writer="r", max_bytes=1000).write(ROUNDS, b"1")
    assert (old.exists(), new.exists()) == (False, True)


def test_an_object_store_takes_files_and_gives_them_back() -> None:
    uri = f"memory://traffic-{os.urandom(4).hex()}"
    folder = ShardFolder(uri, writer="r", max_bytes=1000)
    names = [folder.write(ROUNDS, bytes([k]) * 400) for k in range(4)]
    assert list(shard_names(locate(uri), ROUNDS)) == names[:1:-1]
    assert (locate(uri) / names[3]).read_bytes() == bytes([3]) * 400
