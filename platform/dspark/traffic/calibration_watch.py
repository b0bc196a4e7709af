"""A drafter's calibration.json as it changes: looked at from time to time, in a thread of its own."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.errors import one_line
from dspark.provenance import fingerprint
from dspark.speculation.calibration import CALIBRATE_REMEDY, Calibration
from dspark.storage import Location

log = logging.getLogger("dspark.traffic")


@dataclass(frozen=True)
class FoundCalibration:
    """digest: of the file's content, None where there is no file: then confidences are used as they are."""

    calibration: Calibration
    digest: str | None


def read_calibration(path: Location, *, drafter_sha256: str, block_size: int) -> FoundCalibration:
    """Raises: ValueError for a broken file or too few slots; Mismatch when it was fitted for another drafter."""
    if not path.is_file():
        return FoundCalibration(Calibration(), None)
    calibration = Calibration.load(path, drafter_sha256=drafter_sha256)
    for mode, scales in calibration.scales.items():
        if len(scales) < block_size:
            raise ValueError(f"{path}: {len(scales)} slots for mode {mode!r}, {block_size} needed; {CALIBRATE_REMEDY}")
    return FoundCalibration(calibration, fingerprint(calibration.to_dict()))


class CalibrationWatch:
    """Calls `take` with each new calibration, from its thread. What does not fit is refused, and all stays as it was.

    outcomes: files "taken" since the start and "refused", each content once.
    """

    def __init__(
        self,
        path: Location,
        *,
        drafter_sha256: str,
        block_size: int,
        period_s: float | None,
        take: Callable[[FoundCalibration], None],
    ) -> None:
        """The present one is read here; `take` is not called for it. Without a period nothing more is."""
        self.outcomes = {"taken": 0, "refused": 0}
        self._path = path
        self._wanted: dict[str, Any] = {"drafter_sha256": drafter_sha256, "block_size": block_size}
        self._take = take
        self._seen: str | None = None
        self._stop = threading.Event()
        self.present = FoundCalibration(Calibration(), None)
        self._look(is_first=True)
        self._thread = None
        if period_s is not None:
            self._thread = threading.Thread(target=self._run, args=(period_s,), name="calibration", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Look now."""
        self._look(is_first=False)

    def stop(self) -> None:
        self._stop.set()

    def _run(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            self.look()

    def _look(self, *, is_first: bool) -> None:
        try:
            found = read_calibration(self._path, **self._wanted)
        except Exception as error:  # whatever a store raises, too: what is in force stays so
            self._refuse(one_line(error))
            return
        if found.digest is None or found.digest == self.present.digest:
            self._seen = None  # one that is gone, or written anew as it was, changes nothing
            return
        self.present = found
        if not is_first:
            self.outcomes["taken"] += 1
            log.info("confidences are scaled by the new %s from now on", self._path)
            self._take(found)

    def _refuse(self, reason: str) -> None:
        if reason != self._seen:
            self._seen = reason
            self.outcomes["refused"] += 1
            log.error("calibration is refused, the one before stays in force: %s", reason)
