"""The way from an engine to a draft replica through Ray Serve."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse

from dspark.engine.draft_messages import DraftAnswer, DraftMessage, DraftUnavailable
from dspark.errors import one_line


class ServeDraftLink:
    """Posts messages through a Serve handle, in threads: an engine's step waits for a future and nothing else.

    number: of the engine among those that share the draft replicas; all its messages go to one, see `TurnRouter`.
    """

    def __init__(self, handle: DeploymentHandle[Any], number: int) -> None:
        # Not by reference: the replica is called directly, at half the time of a call that makes an object of Ray's.
        self._handle: DeploymentHandle[Any] = handle.options(
            method_name="draft", session_id=str(number), _by_reference=False
        )
        self._is_closed = False
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="draft-ask")
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="draft-ahead")  # which no step waits for

    def post(self, message: DraftMessage) -> "Future[DraftAnswer]":
        threads = self._asking if message.asks else self._sending
        if self._is_closed:
            answer: Future[DraftAnswer] = Future()
            answer.set_exception(DraftUnavailable("the link was closed"))
            return answer
        return threads.submit(self._exchange, message)

    def close(self) -> None:
        """Let go of what was not sent yet; nothing more is sent."""
        self._is_closed = True
        for threads in (self._asking, self._sending):
            threads.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, message: DraftMessage) -> DraftAnswer:
        response = self._handle.remote(message)
        assert isinstance(response, DeploymentResponse)
        try:
            answer = response.result(timeout_s=message.timeout_s)
        except Exception as error:  # the draft replica may be missing in any way; the engine goes on without it
            response.cancel()
            raise DraftUnavailable(f"{type(error).__name__}: {one_line(error, max_chars=200)}") from None
        assert isinstance(answer, DraftAnswer)
        return answer
