"""Engines are spread evenly over draft replicas, and each keeps to one."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

from dspark.serving.draft_router import TurnRouter


class Replica(NamedTuple):
    """What the router looks at of a replica's id."""

    unique_id: str


def router_over(names: list[str]) -> Any:
    """A router that has heard of these replicas; what it would need of a running Serve is left out."""
    router: Any = TurnRouter.__new__(TurnRouter)
    router._replica_set_snapshot = frozenset(Replica(name) for name in names)
    return router


def chosen(router: Any, key: str) -> list[str]:
    return [replica.unique_id for replica in router._lookup_ranked_replicas(key)]


@pytest.mark.parametrize(("num_engines", "num_replicas"), [(2, 2), (6, 3), (7, 3), (2, 5)])
def test_no_replica_has_two_engines_more_than_another(num_engines: int, num_replicas: int) -> None:
    names = [f"replica {k}" for k in range(num_replicas)]
    count = Counter(dict.fromkeys(names, 0))
    for engine in range(num_engines):
        (name,) = chosen(router_over(names[::-1]), str(engine))
        assert chosen(router_over(names), str(engine)) == [name], "routers of two processes must agree"
        count[name] += 1
    assert max(count.values()) - min(count.values()) <= 1


def test_a_call_without_a_number_goes_somewhere_and_without_replicas_nowhere() -> None:
    assert len(chosen(router_over(["a", "b"]), "5f6d1c-no-number")) == 1
    assert chosen(router_over([]), "1") == []
