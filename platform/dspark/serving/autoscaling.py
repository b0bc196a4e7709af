"""How many target replicas there should be, by what those that run can carry. Ray Serve calls it from its controller.

    autoscaling_config:
      min_replicas: 0
      max_replicas: 4
      policy:
        policy_function: dspark.serving.autoscaling:HeadroomPolicy
        policy_kwargs: {target_utilisation: 0.7}

Serve adds its delays and bounds, and starts the first replica at once when a request comes while there is none.
"""

import math
from collections.abc import Collection
from typing import Any

from ray.serve.config import AutoscalingContext

CAPACITY = "capacity"  # as in replica_load.py, which a controller need not load


def desired_replicas(num_requests: float, capacities: Collection[float], *, target_utilisation: float) -> float:
    """Replicas of the mean measured capacity that carry the requests, each used to that share; 0 for no requests.

    num_requests: running and waiting, wherever they wait. capacities: requests at once, of each replica that told it;
    at least one.
    """
    mean = sum(capacities) / len(capacities)
    return math.ceil(num_requests / (target_utilisation * mean) - 1e-9)


class HeadroomPolicy:
    """As Serve takes a policy: made once with the file's kwargs, then asked again and again.

    target_utilisation: share of what the replicas can carry that should be used; the rest is headroom, for what comes
    until the next replica has started.
    Raises: ValueError for a share that is none.
    """

    def __init__(self, target_utilisation: float = 0.7) -> None:
        if not 0 < target_utilisation <= 1:
            raise ValueError(f"target_utilisation is {target_utilisation}; use a share above 0, at most 1")
        self._target_utilisation = target_utilisation

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Replicas to have. Without a word from any replica it stays as it is."""
        told = (ctx.aggregated_metrics or {}).get(CAPACITY, {})
        capacities = [capacity for capacity in told.values() if capacity > 0]
        if not capacities or ctx.current_num_replicas == 0:
            return ctx.target_num_replicas, {}
        return desired_replicas(ctx.total_num_requests, capacities, target_utilisation=self._target_utilisation), {}
