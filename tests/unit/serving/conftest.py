"""What several tests of the API share."""

from pathlib import Path

import pytest

from tool_calling_target import make_tool_calling_target


@pytest.fixture(scope="session")
def tool_calling_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target that calls a tool; tests must not write into it."""
    return make_tool_calling_target(tmp_path_factory.mktemp("calling") / "target")
