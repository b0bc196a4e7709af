"""Starting a training job when acceptance has fallen: once per cool-down, whichever replica sees it first."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from dspark.errors import one_line
from dspark.provenance import read_json, write_json
from dspark.storage import Location
from dspark.traffic.config import FineTuneConfig

STATE = "fine_tune.json"
ID = "dspark-fine-tune"

# Takes the command and the job's id; raises AlreadySubmitted where there is a job of that id.
Submit = Callable[[list[str], str], None]

log = logging.getLogger("dspark.traffic")


class AlreadySubmitted(Exception):
    """A job of this id is there."""


class FineTune:
    """The one way to start the job. Replicas agree by the folder's fine_tune.json, and by the job's id where two look
    at it in the same moment: it holds the drafter and the number of the cool-down, and Ray takes an id once."""

    def __init__(
        self,
        config: FineTuneConfig,
        *,
        folder: Location,
        submit: Submit,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.outcomes = {"started": 0, "cooling_down": 0, "failed": 0}
        self._config = config
        self._folder = folder
        self._submit = submit
        self._clock = clock
        self._busy = threading.Lock()

    def start(self, drafter: str, drafter_sha256: str, reason: str) -> "threading.Thread | None":
        """Submit in a thread, unless one of this replica is at it."""
        if not self._busy.acquire(blocking=False):
            return None
        thread = threading.Thread(target=self._run, args=(drafter, drafter_sha256, reason), daemon=True)
        thread.start()
        return thread

    def _run(self, drafter: str, drafter_sha256: str, reason: str) -> None:
        try:
            outcome = self.start_now(drafter, drafter_sha256, reason)
        except Exception as error:  # whatever a store or a cluster raises: serving goes on, the next alarm tries again
            log.error("no fine-tuning was started after %s: %s", reason, one_line(error))
            outcome = "failed"
        finally:
            self._busy.release()
        self.outcomes[outcome] += 1

    def start_now(self, drafter: str, drafter_sha256: str, reason: str) -> str:
        """ "started" or "cooling_down". Raises: what reading, writing and submitting raise."""
        now = self._clock()
        if now - self._last_start() < self._config.cooldown_s:
            return "cooling_down"
        job_id = f"{ID}-{drafter_sha256[:8]}-{int(now // self._config.cooldown_s)}"
        values = {"drafter": drafter, "traffic": str(self._folder), "id": job_id}
        command = [part.format_map(values) for part in self._config.command]
        try:
            self._submit(command, job_id)
        except AlreadySubmitted:
            return "cooling_down"
        state = {"started_s": now, "id": job_id, "drafter": drafter, "drafter_sha256": drafter_sha256}
        write_json(self._folder / STATE, state | {"reason": reason, "command": command})
        log.warning("fine-tuning job %s was started: %s", job_id, reason)
        return "started"

    def _last_start(self) -> float:
        path: Any = self._folder / STATE
        return float(read_json(path)["started_s"]) if path.is_file() else float("-inf")
