"""What one process of the API knows of the replicas' load: their newest reports, and what it sent and saw end since.

    choices open now = those that the replicas told of
                       + requests begun here since they were asked - requests ended here since then
                       and never fewer than are open here

It needs no request's content, so that what is too much is refused before anything of it is read.
"""

from collections.abc import Sequence

from dspark.serving.admission import Room, refusal
from dspark.serving.config import LimitsConfig
from dspark.serving.engine_client import LoadReport
from dspark.serving.openai_schema import Refusal


class FleetView:
    """Of one event loop. Replicas that told nothing yet, or that are not there yet, count as one."""

    def __init__(self, limits: LimitsConfig) -> None:
        self.num_open = 0
        self._limits = limits
        self._num_begun = self._num_ended = 0
        self._reports: dict[str, LoadReport] = {}
        self._seen = (0, 0)  # begun and ended when the replicas were asked

    def begin(self) -> None:
        """A request was let in."""
        self.num_open += 1
        self._num_begun += 1

    def end(self) -> None:
        """It has ended, in whatever way."""
        self.num_open -= 1
        self._num_ended += 1

    def asked(self) -> tuple[int, int]:
        """To be noted when the replicas are asked how they stand."""
        return self._num_begun, self._num_ended

    def heard(self, answers: Sequence[LoadReport | None], asked: tuple[int, int]) -> None:
        """Take note of their answers. None: of one that did not answer in time, which stands as it stood before."""
        reports = {report.replica_id: report for report in answers if report is not None}
        unheard = [report for name, report in self._reports.items() if name not in reports]
        kept = unheard[: sum(report is None for report in answers)]
        self._reports = reports | {report.replica_id: report for report in kept}
        self._seen = asked

    def room(self, priority: int = 0) -> Room:
        """Of all replicas together; a pace that one did not tell is taken for the mean of the others'.

        Of what was sent since they were asked nobody has read whether it goes before others.
        """
        most = self._limits.most_open(priority)
        if not self._reports:
            return Room(self.num_open, max_running=most, most=most, per_s=None)
        reports = self._reports.values()
        begun, ended = self._seen
        since = (self._num_begun - begun) - (self._num_ended - ended)
        told = sum(report.num_open for report in reports)
        behind = sum(report.num_open - report.num_ahead for report in reports if report.num_ahead is not None)
        urgent = sum(report.num_urgent for report in reports)
        num_open = max(self.num_open, told + since)
        paces = [report.per_s for report in reports if report.per_s is not None]
        return Room(
            num_open=num_open,
            num_ahead=urgent if priority < 0 else num_open - behind,
            max_running=sum(report.max_running for report in reports),
            most=most * len(reports),
            per_s=sum(paces) / len(paces) * len(reports) if paces else None,
        )

    def refusal(self, priority: int = 0) -> Refusal | None:
        """Why no request of this priority is let in now, or None."""
        return refusal(self.room(priority), self._limits, num_new=1)
