"""What a simulated fleet is compared with, and what it is told of the real one."""

from argparse import Namespace
from typing import Any

import pytest


def test_what_predicts_a_rules_runs_is_that_of_the_other_rule(script: Any) -> None:
    simulated = script("simulated_fleet")
    first = {"drift": [1.1, 1.2], "read_tokens": 3.6, "call_ms": 2.0}
    rows: list[dict[str, Any]] = [
        {"rule": "local", "first half": first, "tokens_per_s": 90.0},
        {"rule": "fleet", "first half": first | {"drift": [1.3, 1.4]}, "tokens_per_s": 99.0},
    ]
    options = Namespace(measured="m.json", policy="fleet", drift=None, prompt_tokens=None, call_ms=None)
    told = {"drift": (1.1, 1.2), "prompt_tokens": 4, "call_s": 0.002}
    assert simulated.measured_by({"rows": rows}, options) == (rows[1], told)
    given = Namespace(**(vars(options) | {"drift": [1.0], "call_ms": 0.0}))
    assert simulated.measured_by({"rows": rows}, given) == (rows[1], {"prompt_tokens": 4})
    assert simulated.measured_by({"tokens_per_s": 5.0}, given) == ({"tokens_per_s": 5.0}, {})
    for content in ({"rows": rows[1:]}, {"tokens_per_s": 5.0}, {"rows": rows[:1]}):
        with pytest.raises(SystemExit):
            simulated.measured_by(content, options)
