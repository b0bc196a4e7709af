"""Environment that must stand before torch and Ray load, and fixtures that many tests share."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    GOMP_SPINCOUNT="0",
    HF_HUB_OFFLINE="1",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.pop("RAY_ADDRESS", None)  # a developer's own cluster is not for tests

from pathlib import Path
from typing import Any

import pytest

from tiny_target import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random four-layer Llama with tokenizer and chat template; tests must not write into it."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny_target"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes one runs all files that need a cluster; every other file runs in one of them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cluster" if file.startswith(("tests/ray/", "tests/e2e/")) else file

    return ByFile(config, log)
