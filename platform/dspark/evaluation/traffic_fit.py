"""The calibrate job's work on recorded traffic: which rounds count, new scales, and what they are worth."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.engine.drafter_folder import CALIBRATION, DRAFTER_FILES, PROVENANCE, drafter_sha256
from dspark.errors import DsparkError, Mismatch
from dspark.evaluation.config import CalibrateConfig
from dspark.evaluation.traffic_calibration import (
    Traffic,
    acceptance_levels,
    new_calibration,
    read_traffic,
    traffic_report,
)
from dspark.provenance import fingerprint, git_revision, read_json
from dspark.run_contents import DatasetRecord
from dspark.speculation.calibration import Calibration
from dspark.storage import Location, absolute, locate
from dspark.traffic.drift import LEVELS
from dspark.transfer import local_folder

TRAFFIC_REPORT = "traffic_calibration_report.json"

log = logging.getLogger("dspark.calibrate")


@dataclass(frozen=True)
class TrafficFit:
    """A drafter, and the rounds of it that a server recorded."""

    config: CalibrateConfig
    folder: Location
    drafter: Location
    sha256: str
    target: dict[str, Any]
    traffic: Traffic

    @classmethod
    def open(cls, config: CalibrateConfig, *, block_size: int) -> "TrafficFit":
        """Read the rounds of the config's drafter."""
        drafter, folder = locate(absolute(config.drafter)), locate(absolute(str(config.from_traffic)))
        digest = drafter_sha256(local_folder(drafter, DRAFTER_FILES))
        target: dict[str, Any] = read_json(drafter / PROVENANCE)["target"]
        known: dict[str, Any] = {"drafter_sha256": digest, "target": target, "block_size": block_size}
        traffic = read_traffic(folder, max_rounds=config.max_rounds, **known)
        return cls(config, folder, drafter, digest, target, traffic)

    @property
    def request(self) -> str:
        """Fingerprint of all that decides the scales."""
        config = self.config
        return fingerprint([self.sha256, self.traffic.files, config.seed, config.num_bins, config.shift])

    @property
    def counts(self) -> dict[str, Any]:
        """What was read, as the job tells it."""
        return {
            "stage": "calibrate",
            "output": self.config.output,
            "from_traffic": str(self.folder),
            "rounds_read": len(self.traffic.rounds),
            "answers": self.traffic.num_answers,
            "refused": self.traffic.refused,
        }

    def dataset(self) -> DatasetRecord:
        """The rounds, as a run records what it reads."""
        profile = {"rounds": len(self.traffic.rounds), "answers": self.traffic.num_answers}
        return DatasetRecord("served rounds", fingerprint(self.traffic.files), str(self.folder), "calibration", profile)

    def plan(self) -> str:
        """The same in words."""
        lines = [
            f"calibration of {self.config.drafter} from {self.folder}: {len(self.traffic.rounds):,} rounds of "
            f"{self.traffic.num_answers:,} answers in {len(self.traffic.files)} files, half of the answers to fit on"
        ]
        return "\n".join(lines + [f"  refused: {number:,} {reason}" for reason, number in self.traffic.refused.items()])

    def require_rounds(self) -> None:
        """Raises: DsparkError saying why there are none."""
        if not len(self.traffic.rounds):
            refused = "; ".join(f"{number:,} {reason}" for reason, number in self.traffic.refused.items())
            raise DsparkError(
                f"{self.folder} holds no recorded round of drafter {self.config.drafter}"
                f"{': ' + refused if refused else ''}; serve it with `traffic` in its deployment's args"
            )

    def earlier_result(self, path: Path) -> dict[str, Any] | None:
        """Of a run that did all this already, whose scales are still the drafter's."""
        report = read_json(path) if path.is_file() else {}
        if report.get("request") != self.request:
            return None
        result: dict[str, Any] = report["result"]
        is_there = not result["taken"] or self._present().fitted_on.get("request") == self.request
        return result if is_there else None

    def run(self) -> dict[str, Any]:
        """Fit, write the drafter's calibration where anything of it is new; the report."""
        started = time.monotonic()
        config, present, rounds = self.config, self._present(), self.traffic.rounds
        modes = traffic_report(rounds, present, num_bins=config.num_bins, with_shift=config.shift, seed=config.seed)
        taken = [mode for mode, content in modes.items() if content["is_taken"]]
        fitted_on = {
            "request": self.request,
            "traffic": str(self.folder),
            "answers": self.traffic.num_answers,
            "rounds": {mode: content["rounds"]["fit"] for mode, content in modes.items()},
            "taken": taken,
            "mean_ece_on_other_answers": {mode: content["mean_ece"] for mode, content in modes.items()},
            "calibrations_before": self.traffic.calibrations,
            "num_bins": config.num_bins,
            "target": self.target,
            "git_revision": git_revision(),
            LEVELS: acceptance_levels(rounds),
        }
        calibration = new_calibration(modes, present, drafter_sha256=self.sha256, fitted_on=fitted_on)
        if taken:
            calibration.save(self.drafter / CALIBRATION)
        else:
            log.warning("no scales are better than those there are: %s stays as it is", self.drafter / CALIBRATION)
        result = self.counts | {
            "calibration": str(self.drafter / CALIBRATION),
            "taken": taken,
            "rounds": {mode: content["rounds"] for mode, content in modes.items()},
            "mean_ece": {mode: content["mean_ece"] for mode, content in modes.items()},
            "temperatures": {mode: list(scales.temperatures) for mode, scales in calibration.scales.items()},
            "shifts": {mode: list(scales.shifts) for mode, scales in calibration.scales.items()},
            "seconds": round(time.monotonic() - started, 1),
        }
        return {"modes": modes, "num_bins": config.num_bins, "request": self.request, "result": result}

    def _present(self) -> Calibration:
        """The scales in force; another drafter's, or a broken file, count as none."""
        try:
            return Calibration.load(self.drafter / CALIBRATION, drafter_sha256=self.sha256)
        except (ValueError, Mismatch) as unusable:
            log.warning("%s", unusable)
            return Calibration()
