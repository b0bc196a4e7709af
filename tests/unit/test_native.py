"""The CPU kernels are built once, by one process, and their absence costs speed only."""

import logging
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from dspark import kernel_build, native

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo test 1.0; exit; }
echo run >> "$(dirname "$0")/runs"
sleep 0.2
while [ $# -gt 1 ]; do shift; done
echo library > "$1"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down each of its runs."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_processes_that_build_at_once_compile_once(compiler: Path, tmp_path: Path) -> None:
    built: list[Path] = []
    folder = tmp_path / "kernels"
    threads = [threading.Thread(target=lambda: built.append(kernel_build.built(folder))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(built)) == 1
    assert built[0].read_text() == "library\n"
    assert (tmp_path / "runs").read_text() == "run\n"
    assert [path.name for path in built[0].parent.iterdir()] == [built[0].name]  # nothing unfinished stays


def test_another_compiler_builds_anew(compiler: Path, tmp_path: Path) -> None:
    first = kernel_build.built(tmp_path / "kernels")
    compiler.write_text(COMPILER.replace("1.0", "2.0"))
    assert kernel_build.built(tmp_path / "kernels") != first


@pytest.mark.parametrize("compiler_name", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_log_says_what_is_lost(compiler_name, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CXX", compiler_name)
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    assert native.kernels.__wrapped__() is None
    (record,) = caplog.records
    assert "cannot be built" in record.getMessage()
    assert "install g++" in record.getMessage()


def test_of_what_the_compiler_wrote_the_log_shows_the_error(tmp_path, monkeypatch, caplog) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nprintf 'in file a.h\\na.h:3: error: no such type\\n   ^~~~\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(kernel_build, "_fingerprint", lambda compiler: "any")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    assert native.kernels.__wrapped__() is None
    assert "(a.h:3: error: no such type)" in caplog.text


@pytest.mark.skipif(
    shutil.which("g++") is None or os.environ.get(native.SWITCH) == "0", reason="there is no compiler, or they are off"
)
def test_they_are_built_where_there_is_a_compiler() -> None:
    """Without them every test of theirs would be skipped, and no other fail."""
    assert native.kernels() is not None


def test_a_switch_turns_them_off(monkeypatch, caplog) -> None:
    monkeypatch.setenv("DSPARK_NATIVE", "0")
    with caplog.at_level(logging.INFO, "dspark.native"):
        assert native.kernels.__wrapped__() is None
    assert "are off" in caplog.text


@pytest.mark.skipif(native.kernels() is None, reason="the CPU kernels cannot be built here")
def test_the_kernels_bring_no_second_openmp() -> None:
    torch.ones(2) + 1
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)", maps))) == 1
