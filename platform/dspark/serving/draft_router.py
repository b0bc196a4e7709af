"""Which draft replica an engine keeps to."""

import zlib

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import ReplicaID


class TurnRouter(ConsistentHashRouter):
    """Deals engines to draft replicas in turn, by the number that is their session id.

    An engine's calls all go to one replica, as with consistent hashing, by which two engines fall to the same one of
    two as often as not. When replicas come or go, engines may get another one, where their contexts are rebuilt.
    """

    def _lookup_ranked_replicas(self, routing_key: str) -> list[ReplicaID]:  # the base class asks it for each call
        replicas = sorted(self._replica_set_snapshot, key=lambda replica: str(replica.unique_id))
        turn = int(routing_key) if routing_key.isdecimal() else zlib.crc32(routing_key.encode())
        return [replicas[turn % len(replicas)]] if replicas else []
