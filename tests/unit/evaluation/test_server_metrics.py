"""Figures of rounds from two looks at /metrics."""

from dspark.evaluation.server_metrics import round_figures, sum_samples

TEXT = """# HELP dspark_rounds_total Verifications.
# TYPE dspark_rounds_total counter
dspark_rounds_total{replica="a"} 3.0
dspark_rounds_total{replica="b"} 4.0
dspark_decodes_total 12.0
vllm:num_requests_running 5.0
"""


def test_samples_of_ours_are_summed_over_replicas_and_others_left_out():
    assert sum_samples(TEXT) == {"dspark_rounds_total": 7.0, "dspark_decodes_total": 12.0}


def test_figures_are_of_what_came_between_the_two_looks():
    names = ("rounds", "committed_tokens", "plain_rounds", "decodes", "verified_tokens", "accepted_tokens")
    before = dict.fromkeys((f"dspark_{name}_total" for name in names), 100.0)
    grown = {"rounds": 4, "committed_tokens": 10, "plain_rounds": 6, "decodes": 10, "verified_tokens": 12}
    after = {name: value + grown.get(name[7:-6], 6) for name, value in before.items()}
    assert round_figures(before, after) == {
        "accepted_length": 2.5,
        "acceptance": 0.5,
        "verify_length": 1.2,
        "drafted_share": 0.0,
        "copied_share": 0.0,
        "round_tokens": 1.6,
    }


def test_where_nothing_is_told_or_nothing_happened_nothing_is_made_up():
    assert round_figures({}, {}) == {}
    idle = {"dspark_decodes_total": 5.0}
    assert set(round_figures(idle, idle).values()) == {None}
