"""Compiles the CPU kernels of `kernels/`, once per machine, compiler and state of the sources."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from dspark.provenance import folder_lock, temporary_sibling

SOURCES = Path(__file__).parent / "kernels"
FLAGS = (
    "-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


def built(folder: Path) -> Path:
    """The library in `folder`, compiled if no other process has. Raises: OSError, CalledProcessError."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    library = folder / f"kernels-{_fingerprint(compiler)}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(folder):
        if not library.is_file():
            unfinished = temporary_sibling(library)
            command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            unfinished.replace(library)  # whole or not at all: others may load it at any time
    return library


def first_error(text: str) -> str:
    """Of all that a compiler wrote, the line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    return next((line for line in lines if "error" in line), lines[-1])


def _fingerprint(compiler: str) -> str:
    """Of all that decides what is compiled: sources, compiler, flags and this machine's processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [version, *FLAGS, _processor(), *(path.read_text() for path in sorted(SOURCES.iterdir()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What instructions there are; a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if re.match(r"(flags|Features|model name)\s*:", line)]
    return "\n".join([platform.machine(), *dict.fromkeys(features)])
