"""Ray actors that run the target for the trainer workers, and what a trainer worker asks them through."""

import logging
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any

import ray

from dspark.data.capture import CaptureWorker, PlannedSample
from dspark.data.captured import CapturedGroup, KeptStates, capture_group, merged
from dspark.data.online import DataConfig
from dspark.errors import DsparkError

log = logging.getLogger("dspark.online")

PATIENCE_S = 30.0  # a wait this long gets a line in the log


class TargetWorker:
    """One actor: holds the target and answers one request at a time."""

    def __init__(
        self, target: dict[str, Any], layer_ids: tuple[int, ...], batch_tokens: int, threads: int, keep_bytes: int
    ) -> None:
        self._worker = CaptureWorker(target, layer_ids, None, batch_tokens, threads)
        self._kept = KeptStates(keep_bytes)

    def process(self) -> int:
        """Its process id; answered once the target is loaded."""
        return os.getpid()

    def capture(self, planned: list[PlannedSample]) -> CapturedGroup:
        process = f"{os.uname().nodename}:{os.getpid()}"
        return capture_group(self._worker, planned, self._kept, process=process)


class TargetPool:
    """The driver's side: starts the target workers, ends them at the end of its `with` block.

    Ray replaces a worker that dies, up to max_target_restarts times, and asks the new one what the old one owed.
    """

    def __init__(self, config: DataConfig, target: dict[str, Any], layer_ids: tuple[int, ...]) -> None:
        self._config, self._arguments = config, (target, layer_ids)
        self.actors: list[Any] = []

    def __enter__(self) -> "TargetPool":
        config = self._config
        gpus = config.gpus_per_target_worker
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU", 0) > 0 else 0.0
        actor_class = ray.remote(TargetWorker).options(
            num_cpus=1, num_gpus=gpus, max_restarts=config.max_target_restarts, max_task_retries=-1
        )
        limits = (config.batch_tokens, config.threads_per_target_worker, config.keep_bytes)
        self.actors = [actor_class.remote(*self._arguments, *limits) for _ in range(config.target_workers)]
        try:
            self._wait_until_ready(gpus)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _wait_until_ready(self, gpus: float) -> None:
        started, waiting = time.monotonic(), [actor.process.remote() for actor in self.actors]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PATIENCE_S)
            for one in ready:
                _get(one)
            if waiting:
                log.info(
                    "%.0f s: %d of %d target workers (1 CPU, %g GPU each) are not up yet; free on the cluster: %s",
                    time.monotonic() - started,
                    len(waiting),
                    len(self.actors),
                    gpus,
                    {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")},
                )


class RayTargets:
    """A trainer worker's view of the target workers.

    A request goes to the worker that owes it the least. Where workers keep states (by_id), each sample goes to its own
    worker, the same for all trainer workers and epochs.
    """

    def __init__(self, actors: Sequence[Any], *, rank: int, by_id: bool) -> None:
        self._actors, self._by_id = actors, by_id
        self._turn = rank  # trainer workers start at different target workers
        self._owed: dict[Any, tuple[int, int]] = {}  # reference -> (actor, tokens)
        self._processes: dict[int, str] = {}

    def submit(self, planned: list[PlannedSample]) -> list[tuple[list[int], int, Any]]:
        """Places of the samples in each request, the worker it went to and what will be its answer."""
        requests: dict[int, list[int]] = {}
        if self._by_id:
            for place, sample in enumerate(planned):
                requests.setdefault(zlib.crc32(sample.id.encode()) % len(self._actors), []).append(place)
        else:
            requests[self._least_busy()] = list(range(len(planned)))
        return [
            (places, number, self._ask(number, [planned[k] for k in places])) for number, places in requests.items()
        ]

    def result(self, ticket: list[tuple[list[int], int, Any]]) -> CapturedGroup:
        return merged([(places, self._answer(number, reference)) for places, number, reference in ticket])

    def _ask(self, number: int, planned: list[PlannedSample]) -> Any:
        reference = self._actors[number].capture.remote(planned)
        self._owed[reference] = (number, sum(len(sample.input_ids) for sample in planned))
        return reference

    def _answer(self, number: int, reference: Any) -> CapturedGroup:
        started = time.monotonic()
        while not ray.wait([reference], timeout=PATIENCE_S)[0]:
            log.info("waiting for target worker %d for %.0f s", number, time.monotonic() - started)
        answer: CapturedGroup = _get(reference)
        self._owed.pop(reference, None)
        if self._processes.setdefault(number, answer.process) != answer.process:
            log.warning("target worker %d was replaced: now process %s", number, answer.process)
            self._processes[number] = answer.process
        return answer

    def _least_busy(self) -> int:
        if self._owed:
            done, _ = ray.wait(list(self._owed), num_returns=len(self._owed), timeout=0, fetch_local=False)
            for reference in done:
                del self._owed[reference]
        owed = [0] * len(self._actors)
        for number, tokens in self._owed.values():
            owed[number] += tokens
        self._turn += 1
        return min(range(len(owed)), key=lambda number: (owed[number], (number - self._turn) % len(owed)))


def _get(reference: Any) -> Any:
    """Raises: DsparkError when the target worker died for good."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError as error:
        reason = str(error).strip().splitlines()[-1].strip()  # above it stand the traceback and Ray's own words
        raise DsparkError(
            "a target worker could not start, or died more often than data.max_target_restarts allows "
            f"(too little memory? then lower data.batch_tokens): {reason}"
        ) from error
