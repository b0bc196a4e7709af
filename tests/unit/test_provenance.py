"""Fingerprints identify content; files are written whole or not at all."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark import provenance
from dspark.errors import Mismatch

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_fingerprint_ignores_the_order_of_keys(content: dict[str, object]) -> None:
    assert provenance.fingerprint(content) == provenance.fingerprint(dict(reversed(content.items())))


def test_fingerprint_tells_different_values_apart() -> None:
    values = [{}, [], None, 0, "0", {"a": 1}, {"a": "1"}, {"a": [1]}, [1, 2], [2, 1]]
    prints = [provenance.fingerprint(value) for value in values]
    assert len(set(prints)) == len(values)
    assert all(len(text) == provenance.FINGERPRINT_LENGTH for text in prints)


def test_file_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert provenance.file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_write_json_gives_back_what_was_written_and_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    provenance.write_json(path, {"b": [1, "ß"], "a": None})
    assert provenance.read_json(path) == {"b": [1, "ß"], "a": None}


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    provenance.write_json(path, {"old": 1})

    def disk_full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(provenance.os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space"):
        provenance.write_json(path, {"new": 2})
    assert provenance.read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_require_same_passes_what_is_equal() -> None:
    same = {"a": 1, "b": [2]}
    assert provenance.require_same("target", same, dict(same), remedy="run jobs/generate.py") is None


@pytest.mark.parametrize("found", [{"a": 1, "b": 3}, {"a": 1}], ids=["other", "absent"])
def test_require_same_names_field_and_both_values(found: dict[str, int]) -> None:
    with pytest.raises(Mismatch, match=r"target: b is (3|None) but 2 is asked for; run jobs/generate\.py"):
        provenance.require_same("target", {"a": 1, "b": 2}, found, remedy="run jobs/generate.py")


def test_git_revision_is_none_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.git_revision() is None


def test_folder_lock_makes_a_second_process_wait_until_the_first_is_done_or_dead(tmp_path: Path) -> None:
    script = (
        "import sys, time; from dspark.provenance import folder_lock\n"
        "with folder_lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waiting = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        time.sleep(0.5)
        assert waiting.poll() is None
        holder.kill()
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"held\n"
        waiting.kill()
        waiting.communicate()
