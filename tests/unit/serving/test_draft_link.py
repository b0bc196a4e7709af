"""What a Serve handle does wrong reaches the engine as one kind of failure, in time; nothing goes after the end."""

from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentResponse
from torch import empty

from draft_pool import IDENTITY
from dspark.engine.draft_messages import DraftAnswer, DraftAsk, DraftMessage, DraftUnavailable, to_array
from dspark.serving.draft_link import ServeDraftLink

ASK = DraftAsk(0, 5, 7, 3, 0.0, None, 6, None, None)


class Response(DeploymentResponse[Any]):
    """What a call gives: an answer, or what is raised in its place."""

    def __init__(self, outcome: DraftAnswer | Exception) -> None:
        self.outcome, self.waited_s, self.is_cancelled = outcome, 0.0, False

    def result(self, *, timeout_s: float | None = None, _skip_asyncio_check: bool = False) -> Any:
        self.waited_s = timeout_s or 0.0
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.is_cancelled = True


class Network:
    """In place of Serve's handle: the network is what a test may act."""

    def __init__(self, outcome: DraftAnswer | Exception) -> None:
        self.outcome = outcome
        self.responses: list[Response] = []
        self.asked_for: dict[str, Any] = {}

    def options(self, **options: Any) -> "Network":
        self.asked_for = options
        return self

    def remote(self, message: DraftMessage) -> Response:
        self.responses.append(Response(self.outcome))
        return self.responses[-1]


def message(*, asks: tuple[DraftAsk, ...] = (ASK,)) -> DraftMessage:
    return DraftMessage("engine", 1, IDENTITY, (), asks, (), to_array(empty(0, 4)), "float32", 0.25)


@pytest.mark.parametrize("asks", [(ASK,), ()])
def test_an_answer_comes_back_within_the_messages_own_time(asks: tuple[DraftAsk, ...]) -> None:
    network: Any = Network(DraftAnswer(()))
    link = ServeDraftLink(network, 7)
    assert link.post(message(asks=asks)).result(5) == DraftAnswer(())
    (response,) = network.responses
    assert (response.waited_s, response.is_cancelled) == (0.25, False)
    assert (network.asked_for["method_name"], network.asked_for["session_id"]) == ("draft", "7")
    link.close()


@pytest.mark.parametrize("error", [TimeoutError("late"), RayActorError(), ConnectionError("refused")])
def test_whatever_fails_is_one_kind_of_failure_and_is_not_left_running(error: Exception) -> None:
    network: Any = Network(error)
    link = ServeDraftLink(network, 0)
    with pytest.raises(DraftUnavailable, match=type(error).__name__):
        link.post(message()).result(5)
    assert network.responses[0].is_cancelled
    link.close()


def test_nothing_is_sent_after_the_end() -> None:
    network: Any = Network(DraftAnswer(()))
    link = ServeDraftLink(network, 0)
    link.close()
    with pytest.raises(DraftUnavailable, match="closed"):
        link.post(message()).result(5)
    assert network.responses == []
