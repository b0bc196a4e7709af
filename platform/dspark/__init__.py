"""From prompts to a served speculative drafter; see README.md."""
