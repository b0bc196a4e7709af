"""Scripts of benchmarks/ as modules: what they compute is tested, nothing is measured."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script by its name; it finds the others beside it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module
