"""A request's turn: OpenAI's `service_tier`, or a priority as a number, and who may ask for which.

    tier        its number in limits.service_tiers; "auto" is "default"
    number      the field `priority` or the header X-Priority, under limits.allow_priority

A smaller number goes first. A tier that goes before others is for those keys whose line in `api_keys_file` names it
behind the key, or for everybody under limits.allow_priority; nobody needs leave to go behind others.
"""

import re
from dataclasses import dataclass
from typing import TypeVar

from dspark.serving.config import LimitsConfig
from dspark.serving.openai_schema import MAX_SHOWN, GenerateRequest, RequestRefused

PRIORITY = "X-Priority"
AUTO, DEFAULT = "auto", "default"

G = TypeVar("G", bound=GenerateRequest)


@dataclass(frozen=True)
class ApiKey:
    """What a line of the file of keys says. tiers: that its holder may ask for, beside those for everybody."""

    secret: bytes
    tiers: frozenset[str] = frozenset()


NOBODYS = ApiKey(b"")  # of clients where no keys are asked for


class ServiceTiers:
    """Gives requests their priority."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._numbers = {DEFAULT: 0} | limits.service_tiers
        self._allows_all = limits.allow_priority

    def require_known(self, key: ApiKey) -> None:
        """Raises: ValueError for a tier that a line of the file of keys names and no setting does."""
        for tier in key.tiers - self._numbers.keys():
            known = ", ".join(sorted(self._numbers))
            raise ValueError(f"a key's line names the tier {tier!r}; limits.service_tiers has {known}; add it there")

    def may_be_urgent(self, header: str | None, key: ApiKey) -> bool:
        """Whether a request with this key may go before others. header: X-Priority's value; what the body says must
        agree with it, and is not known yet."""
        if header is not None and not header.startswith("-"):
            return False
        return self._allows_all or any(self._numbers[tier] < 0 for tier in key.tiers)

    def with_priority(self, request: G, header: str | None, key: ApiKey) -> G:
        """The request with the priority that it asks for, and the name of its tier where it asked for one.

        header: X-Priority's value, by which a gateway may say it for clients that do not. Raises: RequestRefused (400).
        """
        number = self._number(request, header)
        if request.service_tier is None:
            return request if number is None else request.model_copy(update={"priority": number})
        tier = DEFAULT if request.service_tier == AUTO else request.service_tier
        own = self._number_of(tier, key)
        if number is not None and number != own:
            message = f"service_tier {tier!r} has priority {own}, but {number} was sent; send one of them"
            raise RequestRefused.of(message, param="service_tier")
        return request.model_copy(update={"priority": own, "service_tier": tier})

    def _number_of(self, tier: str, key: ApiKey) -> int:
        number = self._numbers.get(tier)
        if number is None:
            known = ", ".join(sorted({AUTO, *self._numbers}))
            message = f"service_tier {tier[:MAX_SHOWN]!r} is not known; this server has {known}"
            raise RequestRefused.of(message, param="service_tier")
        if number < 0 and tier not in key.tiers and not self._allows_all:
            message = f"service_tier {tier!r} is for API keys that it was given to; leave it out, or send another key"
            raise RequestRefused.of(message, param="service_tier")
        return number

    def _number(self, request: GenerateRequest, header: str | None) -> int | None:
        """What field and header say; None where neither does."""
        is_set = "priority" in request.model_fields_set
        number = request.priority if is_set else None
        if header is not None:
            if not (re.fullmatch(r"-?[0-9]{1,10}", header) and -(2**31) <= int(header) < 2**31):
                raise RequestRefused.of(f"{PRIORITY} must be an integer of 32 bits; leave it out for 0", param=PRIORITY)
            if is_set and number != int(header):
                message = f"priority is {number} but {PRIORITY} is {int(header)}; send one of them"
                raise RequestRefused.of(message, param="priority")
            number = int(header)
        if number and not self._allows_all:
            message = f"priority {number}: this server takes 0 only (limits.allow_priority is off)"
            raise RequestRefused.of(message, param="priority")
        return number
