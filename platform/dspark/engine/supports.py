"""Which tokens the filters leave, found without sorting the vocabulary where few tokens hold the mass.

Legend: N rows, n of them, V vocabulary, W tokens of a shortlist. `sampling.filtered_probs` is the slow twin.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.engine.sampling import SamplingParams, invert, mass_before

SHORTLIST = 64  # tokens looked at first; a row that may keep more is looked at in a list
WIDER = 16  # times as long, and so on up to the whole vocabulary
KEEP_ALL = 2**62


@dataclass(frozen=True)
class RowFilters:
    """Temperature and filters of every row, [N, 1] each; what keeps all tokens is KEEP_ALL, inf and -inf."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> "RowFilters":
        """One of `params` per row; none of temperature 0."""

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=column([p.top_k or KEEP_ALL for p in params], torch.int64),
            top_p=column([torch.inf if p.top_p == 1 else p.top_p for p in params]),
            log_min_p=column([math.log(p.min_p) if p.min_p else -torch.inf for p in params]),
        )

    def at(self, rows: Tensor) -> "RowFilters":
        """Those of some rows. rows: [n] int64."""
        return RowFilters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows])

    @property
    def cuts_by_mass_alone(self) -> Tensor:
        """[N, 1] bool: neither top-k nor min-p."""
        return (self.top_k == KEEP_ALL) & (self.log_min_p == -torch.inf)

    @property
    def keeps_all(self) -> Tensor:
        """[N] bool."""
        return (self.cuts_by_mass_alone & (self.top_p == torch.inf))[:, 0]


@dataclass(frozen=True)
class Support:
    """What is left of some rows.

    rows: [n] int64; scores: [n, W] float32, logits / temperature, -inf where a filter cut; token_ids: [n, W] int64 of
    the columns, in rank order, or None where the columns are the vocabulary in its own order.
    """

    rows: Tensor
    scores: Tensor
    token_ids: Tensor | None

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of one column per row. columns: [n]."""
        return columns if self.token_ids is None else self.token_ids.gather(-1, columns[:, None])[:, 0]


class SupportFinder:
    """Finds what rows keep; a row's answer depends on that row alone. Its scratch memory is kept between calls."""

    def __init__(self, *, shortlist: int = SHORTLIST) -> None:
        self._shortlist = shortlist
        self._scratch = torch.empty(0, 0)

    def find(self, logits: Tensor, filters: RowFilters) -> Iterator[Support]:
        """Every row once, in some order. logits: [N, V]."""
        is_whole = filters.keeps_all
        rows = torch.arange(logits.shape[0], device=logits.device)
        if bool(is_whole.any()):
            whole, rows = rows[is_whole], rows[~is_whole]
            yield Support(whole, logits[whole] / filters.temperature[whole], None)
        width = min(self._shortlist, logits.shape[1])
        while rows.numel():
            own = logits if rows.numel() == logits.shape[0] else logits[rows]
            found, is_settled = self._look_at(own, filters.at(rows), width)
            if bool(is_settled.all()):
                yield Support(rows, found.scores, found.token_ids)
                return
            done = is_settled.nonzero()[:, 0]
            if done.numel():
                assert found.token_ids is not None
                yield Support(rows[done], found.scores[done], found.token_ids[done])
            rows = rows[~is_settled]
            width = min(width * WIDER, logits.shape[1])

    def probs(self, logits: Tensor, filters: RowFilters) -> Tensor:
        """The filtered distributions, [N, V] float32."""
        probs = torch.zeros(logits.shape, device=logits.device)
        for support in self.find(logits, filters):
            weights = torch.softmax(support.scores, -1)
            if support.token_ids is None:
                probs[support.rows] = weights
            else:
                probs[support.rows[:, None], support.token_ids] = weights
        return probs

    def _look_at(self, logits: Tensor, filters: RowFilters, width: int) -> tuple[Support, Tensor]:
        """The `width` best tokens of all rows after the filters, and which rows are settled: [n] bool.

        A row is settled when it keeps nothing that ties with the list's worst token: such ties may go on outside.
        """
        best, token_ids, is_sure = _ranked(logits, width)
        scores = best / filters.temperature
        is_kept = scores > -torch.inf
        is_kept &= scores >= scores[:, :1] + filters.log_min_p
        is_kept &= torch.arange(width, device=logits.device) < filters.top_k
        scores.masked_fill_(~is_kept, -torch.inf)
        is_closed = ~(is_kept & ~is_sure).any(-1, keepdim=True)  # all that min-p and top-k keep is in the list
        shares = (scores - scores[:, :1]).exp()
        total = shares.sum(-1, keepdim=True)
        needs_row = ~is_closed & filters.cuts_by_mass_alone
        if bool(needs_row.any()):
            total = torch.where(needs_row, self._total(logits, filters.temperature, scores[:, :1]), total)
        scores.masked_fill_(mass_before(shares / total) >= filters.top_p, -torch.inf)
        is_inside = ~((scores > -torch.inf) & ~is_sure).any(-1, keepdim=True)
        rows = torch.arange(logits.shape[0], device=logits.device)
        return Support(rows, scores, token_ids), (is_closed | (needs_row & is_inside))[:, 0]

    def _total(self, logits: Tensor, temperature: Tensor, top: Tensor) -> Tensor:
        """Sum of exp(score - top) over the whole row, [n, 1]."""
        num_rows, width = logits.shape
        kept = self._scratch
        if kept.shape[0] < num_rows or kept.shape[1] != width or kept.device != logits.device:
            kept = self._scratch = torch.empty(num_rows, width, device=logits.device)
        terms = torch.div(logits, temperature, out=kept[:num_rows])
        return terms.sub_(top).exp_().sum(-1, keepdim=True)


def _ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best logits in float32, their ids, and whether each is above the worst: [n, W] each; equals rank by id."""
    if width == logits.shape[1]:
        best, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return best.float(), token_ids, torch.ones_like(best, dtype=torch.bool)
    best, token_ids = logits.topk(width, dim=-1)
    token_ids, by_id = token_ids.sort(dim=-1)
    best, by_logit = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return best.float(), token_ids.gather(-1, by_logit), best > best[:, -1:]


class ShortlistSampler:
    """Draws from `filtered_probs` of one `params` for all rows.

    Token = inverse of the cumulative filtered distribution at a uniform number, so a row's token depends on its own
    logits and number alone. Raises: ValueError for params that need a request's history.
    """

    def __init__(self, params: SamplingParams, *, shortlist: int = SHORTLIST) -> None:
        params.require_plain("a batch of plain rows")
        self.params = params
        self._finder = SupportFinder(shortlist=shortlist)

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Token ids, [R] int64. logits: [R, V]; uniforms: [R] in [0, 1)."""
        if self.params.temperature == 0:
            return logits.argmax(-1)
        drawn = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        filters = RowFilters.of([self.params] * logits.shape[0], logits.device)
        for support in self._finder.find(logits, filters):
            weights = torch.softmax(support.scores, -1)
            drawn[support.rows] = support.tokens(invert(weights, uniforms[support.rows]))
        return drawn
