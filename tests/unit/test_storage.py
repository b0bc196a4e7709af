"""Paths of this machine and objects of a store behind one interface."""

from pathlib import Path

import pytest

from dspark.provenance import file_sha256, read_json, write_json
from dspark.storage import RemotePath, absolute, is_remote, locate, remove_tree, sizes_in
from remote_store import folder_store


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RemotePath:
    """An empty folder in a store."""
    uri = f"memory://{tmp_path.name}/place" if request.param == "memory" else folder_store(tmp_path / "place")
    found = locate(uri)
    assert isinstance(found, RemotePath)
    return found


def test_what_is_no_uri_is_a_path(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path
    assert locate(tmp_path) is tmp_path
    assert locate(f"file://{tmp_path}") == tmp_path
    assert not is_remote(tmp_path)
    assert absolute("some/where") == str(Path.cwd() / "some/where")
    assert absolute("s3://bucket/some") == "s3://bucket/some"


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("gs://bucket/a/", "bucket/a"),
        ("s3://bucket/a?endpoint_override=127.0.0.1:9&scheme=http", "bucket/a"),
        ("memory://bucket/a", "bucket/a"),
    ],
)
def test_a_child_of_a_uri_opens_again_as_itself(uri: str, key: str) -> None:
    found = locate(uri)
    assert isinstance(found, RemotePath)
    assert (found.key, str(found)) == (key, uri.rstrip("/"))
    child = found / "b" / "c.json"
    assert (child.key, child.name, str(child.parent)) == (f"{key}/b/c.json", "c.json", str(found / "b"))
    again = locate(str(child))
    assert again == child
    assert isinstance(again, RemotePath)
    assert again.key == child.key


@pytest.mark.parametrize("uri", ["nothing://a/b", "nothing://a?b=c"])
def test_a_uri_that_nothing_opens_is_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(ValueError, match=r"cannot open 'nothing://a.*use a path, s3://, gs://"):
        locate(uri)


def test_objects_are_written_whole_and_listed(place: RemotePath) -> None:
    write_json(place / "b.json", {"x": 1})
    (place / "a.bin").write_bytes(b"0123")
    (place / "deep" / "c.bin").write_bytes(b"01")
    assert read_json(str(place / "b.json")) == {"x": 1}
    assert (place / "a.bin").read_bytes() == b"0123"
    assert sizes_in(place)["a.bin"] == 4
    assert sorted(sizes_in(place)) == ["a.bin", "b.json"]
    assert [path.name for path in place.glob("*.bin")] == ["a.bin"]
    assert sizes_in(place / "nowhere") == {}


def test_an_object_takes_the_place_of_the_one_before(place: RemotePath, tmp_path: Path) -> None:
    (place / "a").write_bytes(b"longer than the next")
    (tmp_path / "source").write_bytes(b"short")
    (place / "a").upload(tmp_path / "source")
    assert (place / "a").read_bytes() == b"short"
    (place / "a").download(tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"short"
    assert file_sha256(place / "a") == file_sha256(tmp_path / "source")


def test_what_is_removed_is_gone(place: RemotePath) -> None:
    for name in ("a", "b"):
        (place / name).write_bytes(b"x")
    (place / "a").unlink()
    (place / "a").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (place / "a").unlink()
    assert not (place / "a").is_file()
    remove_tree(place)
    remove_tree(place)
    assert sizes_in(place) == {}


def test_an_upload_that_fails_leaves_no_object(place: RemotePath, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        (place / "a").upload(tmp_path / "nothing here")
    assert not (place / "a").is_file()
