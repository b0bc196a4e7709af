"""What `fleet` of a deployment may say. By itself, so that a scheduler that takes a dead one's place starts at once: it
needs nothing of the engine, which is slow to load, and that beside replicas which are at work."""

from pydantic import Field

from dspark.config import Config


class FleetConfig(Config):
    """How replicas talk to the fleet scheduler. None of it is ever waited for."""

    enabled: bool = True
    """Off: every replica decides alone. A single replica decides alone either way."""
    name: str = "dspark-fleet"
    """Name of the scheduler's actor: one per fleet that shares draft capacity."""
    namespace: str = "dspark"
    """Ray namespace of the actor."""
    report_every_s: float = Field(0.1, gt=0)
    """Seconds between a replica's reports, more where the scheduler is busy."""
    lease_ttl_s: float = Field(1.0, gt=0)
    """Seconds a lease holds, more where reports come less often. A replica that gets no other in time decides by its
    local rule."""
    idle_exit_s: float = Field(60.0, gt=0)
    """Seconds without a report after which the actor ends itself."""
    draft_blocks_per_s: float | None = Field(None, gt=0)
    """Blocks per second that shared drafters can draft for all replicas; None: what draft replicas say of themselves,
    and where there are none each replica drafts on its own hardware."""
    max_draft_load: float = Field(0.9, gt=0, le=1)
    """Share of the drafters' time that is given out: nearer to 1, more is drafted and waits are longer."""
    min_tokens_per_s: dict[int, float] = {}
    """Tokens per second that a tier's users get at least, in the mean over a replica's and as far as that can be, by
    the `priority` of their requests: {-1: 20.0}. Others then get fewer draft tokens where need be."""
    speed_headroom: float = Field(0.15, ge=0)
    """Share by which these minima are aimed over: a user's speed wavers from second to second."""
    max_scheduler_load: float = Field(0.4, gt=0, le=1)
    """Of one core, what the scheduler's process may take; above it replicas are asked to report less often."""
