"""The same question to every replica, none of which can hold up the others' answers."""

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


class Silent(TimeoutError):
    """A replica did not answer in time."""


async def ask_every(handle: DeploymentHandle[Any], method: str, *, timeout_s: float) -> list[Any]:
    """An answer, or the exception in its place, of each replica that runs; [] where there is none.

    timeout_s: after which a replica counts as Silent.
    """
    calls = await _calls(handle, method, timeout_s)
    return list(await asyncio.gather(*(_answer(call, timeout_s) for call in calls)))


async def ask_any(handle: DeploymentHandle[Any], method: str, *, timeout_s: float) -> Any:
    """The first answer that comes, else an exception of those that came in its place; None where no replica runs."""
    calls = await _calls(handle, method, timeout_s)
    asking = [asyncio.ensure_future(_answer(call, timeout_s)) for call in calls]
    answer: Any = None
    try:
        for coming in asyncio.as_completed(asking):
            answer = await coming
            if not isinstance(answer, Exception):
                break
        return answer
    finally:
        for task in asking:
            task.cancel()


async def _calls(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> list[Any]:
    """Under way, one per replica. Raises: Silent where it is not even known which there are."""
    # Serve's own way to collect them waits for the slowest, and gives none where that one is too late.
    # TODO: `results_async` once it takes a limit for each replica.
    try:
        return list(await asyncio.wait_for(handle.broadcast(method)._fetch_replica_results_async(), timeout_s))
    except DeploymentUnavailableError:
        return []
    except TimeoutError:
        raise Silent(f"no replica is known after {timeout_s:g} s") from None


async def _answer(call: Any, timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(call.get_async(), timeout_s)
    except TimeoutError:
        return Silent(f"no answer within {timeout_s:g} s")
    except Exception as error:  # whatever became of that replica, the others' answers count
        return error
