"""How many draft tokens a step verifies, settled while the step before it computes.

    step t - 2     notes its requests' survival
    step t - 1     computes; K_t is searched for beside it, in what step t - 2 noted
    step t         verifies the K_t slots that rank first by its own survival

K_t is a number that is known before anything of step t is drawn, so that the whole ranking may be searched for it, on
the curve's stairs, and output stays lossless. Source: ALGORITHMS §5, lagged form.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark.engine.estimates import PriorEstimate
from dspark.speculation.cost_curve import CostCurve
from dspark.speculation.prefix_scheduler import best_total

LAG = 2


@dataclass(frozen=True)
class Picture:
    """What a step knew. rows: survival of its requests' draft tokens, by request id, empty where there were none;
    prior: survival of a request of which nothing is known."""

    rows: Mapping[str, Sequence[float]]
    prior: Sequence[float]


@dataclass(frozen=True)
class Members:
    """Who decodes in a step. is_drafted: by request id, whether it has draft tokens whose number is open.
    other_tokens: of prompts being read, and draft tokens whose number is fixed."""

    is_drafted: Mapping[str, bool] = field(default_factory=dict)
    other_tokens: int = 0


class LaggedCapacity:
    """K of step after step. What a step notes is looked at for the step after the next one, and by nothing before.

    A request that has come since, or had no draft tokens then, enters the old picture with that picture's prior; one
    that has gone leaves it. curve: may be replaced at any time. context_tokens: of the newest step's requests, hardly
    fewer than those of the next one.
    """

    def __init__(self, curve: CostCurve, *, block_size: int) -> None:
        self.curve = curve
        self.context_tokens: int | None = None
        before = Picture({}, PriorEstimate().survival(block_size))
        self._pictures = deque([before] * LAG, maxlen=LAG)  # in step t: those of t - 2 and t - 1
        self._newest = Members()
        self._prepared: tuple[Members, int] | None = None

    def total(self, members: Members) -> int:
        """K of the present step: as it was prepared if its members are those that were expected."""
        if self._prepared is None or self._prepared[0] != members:
            self._prepared = members, self._search(members)
        self._newest = members
        return self._prepared[1]

    def note(self, picture: Picture) -> None:
        """The present step is decided; what follows is asked for the next one."""
        self._pictures.append(picture)
        self._prepared = None

    def prepare(self) -> None:
        """Search for the next step's K, which mostly has the members of this one."""
        self._prepared = self._newest, self._search(self._newest)

    def _search(self, members: Members) -> int:
        old = self._pictures[0]
        rows = [
            (old.rows.get(name) or old.prior) if has_drafts else () for name, has_drafts in members.is_drafted.items()
        ]
        draft_s = self.curve.draft_seconds(sum(members.is_drafted.values()))
        return best_total(
            rows,
            self.curve,
            prefill_tokens=members.other_tokens,
            context_tokens=self.context_tokens,
            draft_s=draft_s,
        )
