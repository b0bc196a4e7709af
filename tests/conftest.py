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

import pytest

from tiny_target import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random four-layer Llama with tokenizer and chat template; tests must not write into it."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny_target"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where tests run in several processes, those of a cluster share one of these."""
    if item.get_closest_marker("ray") or item.get_closest_marker("e2e"):
        item.add_marker(pytest.mark.xdist_group("cluster"))
