"""What a training run leaves behind as it goes: a line per step, a curve in MLflow, a word on the console."""

import json
import logging
import time
from typing import Any

from dspark.storage import Location, RemotePath, locate
from dspark.tracking import attach

log = logging.getLogger("dspark.train")

HISTORY = "history.jsonl"
DATA_COUNTED = ("samples", "samples_not_finite", "samples_captured", "step_s", "data_wait_s", "target_s")
COUNTED = ("blocks", "supervised_slots", "tokens", *DATA_COUNTED)


class History:
    """Rank 0's record; `totals`, `seconds` and `validation`, the latest held-out figures, run on over restarts.

    Lines past the step that a run resumes at are dropped: those steps are trained again.
    run: {"output": folder, "tracking_uri": …, "run_id": …}.
    """

    def __init__(self, run: dict[str, Any], *, start_step: int) -> None:
        self.path = locate(run["output"]) / HISTORY
        self._tracking = attach(run["tracking_uri"], run["run_id"])
        # A run that starts at step 0 validates there first, and so writes that line anew.
        kept = [row for row in read_history(run["output"]) if row["step"] <= start_step and start_step > 0]
        self._lines = [json.dumps(row) + "\n" for row in kept]
        self.path.write_bytes("".join(self._lines).encode())
        self.totals = {name: sum(row.get(name, 0.0) for row in kept) for name in COUNTED}
        self.validation: dict[str, float] = next((row["heldout"] for row in reversed(kept) if "heldout" in row), {})
        self.seconds = kept[-1].get("elapsed_s", 0.0) if kept else 0.0
        self._earlier_s = self.seconds
        self._start_step, self._started = start_step, time.monotonic()

    def add_step(
        self,
        step: int,
        steps: int,
        metrics: dict[str, float],
        *,
        log_line: bool,
        expert_loads: list[list[int]] | None = None,
    ) -> None:
        """Record a training step. expert_loads: per sparse layer the tokens of each expert, for the history alone."""
        for name in COUNTED:
            self.totals[name] += metrics.get(name, 0.0)
        self.seconds = self._earlier_s + time.monotonic() - self._started
        self._append(
            {"step": step, "elapsed_s": round(self.seconds, 2)}
            | metrics
            | ({"expert_loads": expert_loads} if expert_loads else {})
        )
        self._tracking.log_metrics({f"train/{name}": value for name, value in metrics.items()}, step)
        if log_line:
            rate = (step - self._start_step) / (time.monotonic() - self._started)
            log.info(
                "step %d/%d  loss %.3f  ce %.3f  tv %.3f  expected tau %.3f  lr %.2e  %.2f steps/s  "
                "%.0f %% waiting for samples  %.0f s left",
                step,
                steps,
                metrics["loss"],
                metrics["ce"],
                metrics["tv"],
                metrics["expected_accepted_length"],
                metrics["learning_rate"],
                rate,
                100 * metrics.get("data_wait_s", 0.0) / max(metrics.get("step_s", 0.0), 1e-9),
                (steps - step) / rate,
            )

    def add_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Record figures on held-out samples."""
        self.validation = metrics
        self._append({"step": step, "elapsed_s": round(self.seconds, 2), "heldout": metrics})
        self._tracking.log_metrics({f"heldout/{name}": value for name, value in metrics.items()}, step)
        log.info("step %d  held-out expected accepted length %.3f", step, metrics["expected_accepted_length"])

    def close(self) -> None:
        """Write and send what is still held."""
        self.flush()
        self._tracking.finish()

    def flush(self) -> None:
        """Write what an object store lacks of the lines so far: before a checkpoint, which counts on them."""
        if isinstance(self.path, RemotePath):
            self.path.write_bytes("".join(self._lines).encode())

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        if isinstance(self.path, RemotePath):  # an object cannot grow
            self._lines.append(line)
            return
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(line)


def read_history(folder: str | Location) -> list[dict[str, Any]]:
    """Rows of a run's history; a half-written last line (after a kill) is left out."""
    path = locate(folder) / HISTORY
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
