"""Figures of speculation, added up by hand."""

from dspark.serving.speculation_metrics import SpeculationTally, StepDraft


def test_the_figures_are_those_of_the_steps() -> None:
    tally = SpeculationTally()
    for step in (None, StepDraft(7, 3, 2, 3), StepDraft(7, 4, 4, 5), StepDraft(7, 0, 0, 1), StepDraft(0, 0, 0, 1)):
        tally.add(step)
    told = tally.metrics().speculative_decoding
    assert (told.num_decode_steps, told.num_spec_steps) == (4, 2)
    assert (told.num_draft_tokens, told.num_verified_tokens, told.num_accepted_draft_tokens) == (21, 7, 6)
    assert (told.mean_acceptance_length, told.draft_acceptance_rate) == (4.0, 6 / 7)


def test_nothing_verified_is_no_rate() -> None:
    told = SpeculationTally().metrics().speculative_decoding
    assert (told.mean_acceptance_length, told.draft_acceptance_rate, told.num_decode_steps) == (None, None, 0)
