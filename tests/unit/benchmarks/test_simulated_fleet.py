"""What a simulated fleet is compared with, and which drift it takes."""

from argparse import Namespace
from typing import Any

import pytest


def test_the_drift_that_predicts_a_rules_runs_is_that_of_the_other_rule(script: Any) -> None:
    simulated = script("simulated_fleet")
    rows = [
        {"rule": "local", "drift": 1.1, "tokens_per_s": 90.0},
        {"rule": "fleet", "drift": 1.3, "tokens_per_s": 99.0},
    ]
    options = Namespace(measured="m.json", policy="fleet", drift=None)
    assert simulated.measured_by({"rows": rows}, options) == (rows[1], 1.1)
    given = Namespace(**(vars(options) | {"drift": 1.0}))
    assert simulated.measured_by({"rows": rows}, given) == (rows[1], 1.0)
    assert simulated.measured_by({"tokens_per_s": 5.0}, given) == ({"tokens_per_s": 5.0}, 1.0)
    for content in ({"rows": rows[1:]}, {"tokens_per_s": 5.0}, {"rows": rows[:1]}):
        with pytest.raises(SystemExit):
            simulated.measured_by(content, options)
