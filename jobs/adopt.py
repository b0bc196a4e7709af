"""Take over a drafter trained elsewhere, so that it can be profiled, calibrated and served without training."""

import logging
import sys
from pathlib import Path
from typing import Any

import runner
from dspark.drafters.released import AdoptConfig, find_drafter, take_drafter
from dspark.engine.drafter_folder import CALIBRATION, COST_CURVE, PROVENANCE, drafter_sha256, is_drafter_folder
from dspark.engine.hidden_states import check_layer_ids
from dspark.errors import Mismatch
from dspark.provenance import git_revision, read_json, write_json
from dspark.targets import target_identity

log = logging.getLogger("dspark.adopt")


def run(config: AdoptConfig, *, fresh: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """Write the drafter's folder unless it is there; returns its shape."""
    output = Path(config.output).resolve()
    source = find_drafter(config.drafter, config.revision)
    identity = target_identity(config.target)
    print(f"adoption of {config.drafter} ({source.folder}) for {config.target.name} into {config.output}", flush=True)
    if dry_run:
        return {"stage": "adopt", "output": config.output, "source": source.name, "dry_run": True}
    request = {"source": source.to_dict(), "target": identity, "chat": config.chat.model_dump()}
    if not fresh and (output / PROVENANCE).is_file():
        _require_same_drafter(output, request)
        if is_drafter_folder(output):
            log.info("%s holds this drafter already", output)
            return read_json(output / PROVENANCE)["adopted"]["result"] | {"skipped": True}
    with runner.track(config, "adopt", drafter=config.drafter, target=config.target.name) as tracked:
        for name in (CALIBRATION, COST_CURVE, PROVENANCE):  # of the drafter that was there
            (output / name).unlink(missing_ok=True)
        shape = take_drafter(source, config.target, identity, output)
        check_layer_ids(shape.target_layer_ids, identity["num_hidden_layers"])
        result = {
            "stage": "adopt",
            "output": config.output,
            "source": source.name,
            "architecture": shape.architecture,
            "block_size": shape.block_size,
            "target_layer_ids": list(shape.target_layer_ids),
            "confidence_head": shape.enable_confidence_head,
            "drafter_sha256": drafter_sha256(output),
        }
        provenance = {
            "target": identity,
            "target_config": config.target.model_dump(),
            "chat": config.chat.model_dump(),
            "git_revision": git_revision(),
            "trained_elsewhere": True,
            "adopted": {"request": request, "result": result},
        }
        write_json(output / PROVENANCE, provenance)
        tracked.log_artifact(output / PROVENANCE, "drafter")
    return result


def _require_same_drafter(output: Path, request: dict[str, Any]) -> None:
    """Raises: Mismatch when the folder holds another drafter."""
    adopted = read_json(output / PROVENANCE).get("adopted")
    if adopted is None or adopted["request"] != request:
        raise Mismatch(f"{output} holds another drafter; use --fresh to replace it, or another output")


if __name__ == "__main__":
    sys.exit(runner.main(AdoptConfig, run, default_config="adopt.yaml"))
