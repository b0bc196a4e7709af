"""The verdicts of a step's verification: what each request's target says to its draft tokens.

greedy        the argmax of its logits is the token; draft tokens are accepted while they equal it
seeded        the same with the draw of the request's own noise in place of the argmax
sampled       rejection sampling with the request's own generator
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.attention.flat_batch import FlatBatch
from dspark.engine.logit_rules import LogitRules, penalise
from dspark.engine.noise import perturbed_argmax, position_keys
from dspark.engine.running import DecodingMode
from dspark.engine.step import Work
from dspark.engine.supports import RowFilters, SupportFinder
from dspark.speculation.proposal import Proposal, Verdict
from dspark.speculation.rejection import verify


def are_plain(works: Sequence[Work]) -> bool:
    """Whether the most likely tokens are all that is asked for: then no copy of the logits is made."""
    drawn = [work.running for work in works if work.yields_token]
    return all(running.is_greedy and not running.request.sampling.changes_logits for running in drawn)


def judge_plain(works: Sequence[Work], batch: FlatBatch, choices: Sequence[int]) -> list[Verdict | None]:
    """A verdict per request of a step that `are_plain` holds for. choices: the most likely token of each row."""
    return [
        judge_choices(choices[batch.cu_logits[i] : batch.cu_logits[i + 1]], work.draft_ids)
        if work.yields_token
        else None
        for i, work in enumerate(works)
    ]


class Judge:
    """Judges step after step; a request's verdict depends on its own rows, seed and generator alone.

    is_row_by_row: seeded rows are drawn for one by one, so that not even the last bit of an exponential depends on how
    many there are.
    """

    def __init__(self, device: torch.device, *, is_row_by_row: bool = False) -> None:
        self._finder = SupportFinder()
        self._is_row_by_row = is_row_by_row
        self._nothing = Proposal.nothing(device)

    def judge(self, works: Sequence[Work], batch: FlatBatch, logits: Tensor) -> list[Verdict | None]:
        """A verdict per request; None where the prompt goes on. logits: [N, V], changed in place by what is asked."""
        apply_rules(works, batch, logits)
        found = self._choices(works, batch, logits)
        choices = [] if found is None else found.tolist()
        probs = self._probs(works, batch, logits)
        verdicts: list[Verdict | None] = []
        for i, work in enumerate(works):
            if not work.yields_token:
                verdicts.append(None)
            elif i in probs:
                verdicts.append(verify(probs[i], work.proposal or self._nothing, work.running.generator))
            else:
                rows = slice(batch.cu_logits[i], batch.cu_logits[i + 1])
                verdicts.append(judge_choices(choices[rows], work.draft_ids))
        return verdicts

    def _choices(self, works: Sequence[Work], batch: FlatBatch, logits: Tensor) -> Tensor | None:
        """The target's own token of every row, [N] int64; rows that are sampled count nothing; None if all are."""
        seeded = _rows_of("seeded", works, batch)
        if not seeded and not _rows_of("greedy", works, batch):
            return None
        choices = logits.argmax(dim=-1)
        if not seeded:
            return choices
        rows = torch.tensor([row for i in seeded for row in seeded[i]], device=logits.device)
        runs = [(works[i].running, k) for i in seeded for k in range(len(seeded[i]))]
        stream_keys, positions = [r.noise_key for r, _ in runs], [r.next_position + k for r, k in runs]
        keys = position_keys(stream_keys, positions, logits.device)
        filters = RowFilters.of([running.request.sampling for running, _ in runs], logits.device)
        every = torch.arange(rows.numel(), device=logits.device)
        for own in every.split(1) if self._is_row_by_row else [every]:
            for support in self._finder.find(logits[rows[own]], filters.at(own)):
                found = own[support.rows]
                drawn = perturbed_argmax(support.scores, keys[found], support.token_ids)
                choices[rows[found]] = support.tokens(drawn)
        return choices

    def _probs(self, works: Sequence[Work], batch: FlatBatch, logits: Tensor) -> dict[int, Tensor]:
        """The filtered distributions [l + 1, V] of the requests that are sampled without noise of their own."""
        sampled = _rows_of("sampled", works, batch)
        if not sampled:
            return {}
        rows = torch.tensor([row for own in sampled.values() for row in own], device=logits.device)
        params = [works[i].running.request.sampling for i, own in sampled.items() for _ in own]
        probs = self._finder.probs(logits[rows], RowFilters.of(params, logits.device))
        return dict(zip(sampled, probs.split([len(own) for own in sampled.values()]), strict=True))


def apply_rules(works: Sequence[Work], batch: FlatBatch, logits: Tensor) -> None:
    """Change the rows of requests that ask for something before the temperature, in place. logits: [N, V]."""
    penalties = []
    for i, work in enumerate(works):
        running = work.running
        if not work.yields_token or not running.request.sampling.changes_logits:
            continue
        if running.rules is None:
            running.rules = LogitRules(running.request, logits.device)
        first = batch.cu_logits[i]
        running.rules.mask_and_bias(logits[first : batch.cu_logits[i + 1]], len(running.output_ids))
        own = running.rules.penalties(running.output_ids, work.draft_ids)
        if own is not None:
            penalties.append((first, own))
    penalise(logits, penalties)


def judge_choices(choices: Sequence[int], draft_ids: Sequence[int]) -> Verdict:
    """Accept while the draft equals the target's choice; `rejection.verify_greedy` is its twin on tensors."""
    num_accepted = 0
    while num_accepted < len(draft_ids) and draft_ids[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return Verdict(num_accepted, choices[num_accepted])


def _rows_of(mode: DecodingMode, works: Sequence[Work], batch: FlatBatch) -> dict[int, range]:
    """Rows of the logits by request, of those that decode so."""
    return {
        i: range(batch.cu_logits[i], batch.cu_logits[i + 1])
        for i, work in enumerate(works)
        if work.yields_token and work.running.mode == mode
    }
