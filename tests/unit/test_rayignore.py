"""A job that is submitted with the checkout as its working directory leaves behind what jobs wrote there."""

import shutil
import zipfile
from pathlib import Path

from ray._private.runtime_env.packaging import _zip_files

ROOT = Path(__file__).resolve().parents[2]
LEFT = (
    ".git/pack",
    ".venv/lib/x.so",
    "runs/demo/cache/shard.safetensors",
    "mlflow.db",
    "mlruns/1/x",
    "jobs/__pycache__/x.pyc",
)
TAKEN = ("jobs/train.py", "configs/demo/train.yaml", "platform/dspark/config.py", "prompts/train.jsonl")


def test_caches_and_environments_are_not_uploaded(tmp_path: Path) -> None:
    checkout, archive = tmp_path / "checkout", tmp_path / "uploaded.zip"
    for name in (*LEFT, *TAKEN):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with open(checkout / "runs" / "demo" / "cache" / "shard.safetensors", "wb") as stream:
        stream.truncate(300 * 2**20)  # over what Ray uploads
    shutil.copy(ROOT / ".rayignore", checkout)
    _zip_files(str(checkout), excludes=[], output_path=str(archive), include_gitignore=False)
    with zipfile.ZipFile(archive) as uploaded:
        names = {name for name in uploaded.namelist() if not name.endswith("/")}
    assert {name for name in names if not name.startswith(".ray")} == set(TAKEN)
