"""Files staged here and copied there; copies read here, made once and never stale."""

import os
from collections import namedtuple
from pathlib import Path

import pytest

from dspark import transfer
from dspark.errors import Mismatch, MissingInput, OutOfSpace
from dspark.provenance import file_sha256
from dspark.storage import Location, RemotePath, locate
from dspark.transfer import local_file, local_folder, staged
from remote_store import folder_store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def place(tmp_path: Path) -> RemotePath:
    found = locate(folder_store(tmp_path / "store"))
    assert isinstance(found, RemotePath)
    return found


@pytest.mark.parametrize("is_local", [True, False])
def test_a_staged_file_appears_when_its_block_ends_well(place: RemotePath, tmp_path: Path, is_local: bool) -> None:
    path: Location = tmp_path / "file" if is_local else place / "file"
    with staged(path) as temporary:
        temporary.write_bytes(b"content")
        assert not path.is_file()
    assert path.read_bytes() == b"content"
    with pytest.raises(FileNotFoundError), staged(path) as temporary:
        (temporary.write_bytes(b"half"), temporary.with_name("nowhere").read_bytes())
    assert path.read_bytes() == b"content"
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_local_file_is_read_where_it_is(tmp_path: Path) -> None:
    assert local_file(tmp_path / "file") == tmp_path / "file"
    assert local_folder(str(tmp_path), ("a",)) == tmp_path


def test_an_object_is_fetched_once(place: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "a").write_bytes(b"content")
    first = local_file(place / "a")
    assert first.read_bytes() == b"content"
    monkeypatch.setattr(RemotePath, "download", None)
    assert local_file(place / "a") == first


def test_a_changed_object_is_fetched_again(place: RemotePath) -> None:
    (place / "a").write_bytes(b"content")
    first = local_file(place / "a")
    (place / "a").write_bytes(b"other!!")
    assert local_file(place / "a").read_bytes() == b"other!!"
    assert first.read_bytes() == b"content"  # whoever reads it goes on


def test_a_store_that_tells_no_times_is_never_taken_for_unchanged(tmp_path: Path) -> None:
    place = locate(f"memory://{tmp_path.name}")
    (place / "a").write_bytes(b"content")
    assert local_file(place / "a").read_bytes() == b"content"
    (place / "a").write_bytes(b"other!!")
    assert local_file(place / "a").read_bytes() == b"other!!"


def test_a_copy_is_checked_against_its_checksum(place: RemotePath, home: Path) -> None:
    (place / "a").write_bytes(b"content")
    local = local_file(place / "a")
    assert local_file(place / "a", sha256=file_sha256(local)).read_bytes() == b"content"
    with pytest.raises(Mismatch, match="a is corrupt or changed"):
        local_file(place / "a", sha256="0" * 64)
    assert len([path for path in home.rglob("a") if path.is_file()]) == 2


def test_a_missing_object_is_missing_input(place: RemotePath) -> None:
    with pytest.raises(MissingInput, match="no such object: local://"):
        local_file(place / "a")


def test_a_folder_of_copies_holds_what_is_there(place: RemotePath) -> None:
    (place / "a").write_bytes(b"1")
    (place / "b").write_bytes(b"2")
    folder = local_folder(place, ("a", "b", "c"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"1", "b": b"2"}
    assert local_folder(str(place), ("a", "b", "c")) == folder
    (place / "c").write_bytes(b"3")
    assert sorted(path.name for path in local_folder(place, ("a", "b", "c")).iterdir()) == ["a", "b", "c"]


def test_old_copies_make_room_for_new_ones(place: RemotePath, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    disk = 1_000 + transfer.SPARE_BYTES

    def of_disk(_path: Path) -> usage:
        used = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        return usage(disk, used, disk - used)

    monkeypatch.setattr(transfer.shutil, "disk_usage", of_disk)
    for name in "abc":
        (place / name).write_bytes(b"x" * 400)
    first, second = local_file(place / "a"), local_file(place / "b")
    os.utime(second, (0, 0))
    local_file(place / "a")
    local_file(place / "c")
    assert (first.is_file(), second.is_file()) == (True, False)
    (place / "big").write_bytes(b"x" * 1_001)
    with pytest.raises(OutOfSpace, match=r"needs 1,001 bytes .*set DSPARK_HOME"):
        local_file(place / "big")
