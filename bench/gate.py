"""The gate before any speed: are the codes that an implementation draws from its inputs right?

Each code drawn must be one of the kept tokens, and the codes together must follow the kept
distribution. The second is tested by the randomised probability integral transform: a code's
place in the cumulative distribution of its own row (most likely tokens first), spread evenly over
the code's own probability, is uniform on [0, 1) if and only if the draw is right; rows and draws
are pooled and tested by chi-square. What is kept is computed here in float64 by sorting, apart
from any implementation.
"""

import math

import torch

BINS = 32
CHI_SQUARE_LIMIT = 83.6
"""Upper 1e-6 point of chi-square with 31 degrees of freedom (computed with scipy.stats.chi2.isf)."""

SLACK = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""How far below the k-th value, relative to the largest, a peer may go: some scale in the logits' dtype."""

NUCLEUS_SLACK = 0.01
"""How far above top_p the mass may be at which a peer stops: sums are rounded, ties split."""

OUTSIDE_LIMIT = 0.05
"""Share of draws that may use the slack."""


class WrongError(Exception):
    """An implementation's codes are not right; the message says how."""


class Expected:
    """What may be drawn from logits [B, V], and how often."""

    def __init__(self, logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> None:
        x = logits.detach().double().cpu()
        largest_first, self.tokens = x.sort(dim=1, descending=True, stable=True)
        kth = largest_first[:, top_k - 1 : top_k] if 0 < top_k < x.shape[1] else largest_first[:, -1:]
        slack = SLACK[logits.dtype] * x.abs().amax(1, keepdim=True)
        tempered = largest_first / temperature
        p = tempered.masked_fill(largest_first < kth, -math.inf).softmax(1)
        above = p.cumsum(1) - p
        # Equal values stay or go together: each has the mass above the first of them.
        starts = torch.ones_like(largest_first, dtype=torch.bool)
        starts[:, 1:] = largest_first[:, 1:] != largest_first[:, :-1]
        above = torch.where(starts, above, 0).cummax(1).values
        kept = (p > 0) & (above < top_p) if top_p < 1 else p > 0
        allowed = largest_first >= kth - slack
        if top_p < 1:
            allowed &= above < top_p + NUCLEUS_SLACK
        p = torch.where(kept, p, 0)
        p /= p.sum(1, keepdim=True)
        self.probability, self.below = p, p.cumsum(1) - p
        self.allowed = allowed | kept
        self.rank = torch.empty_like(self.tokens).scatter_(
            1, self.tokens, torch.arange(x.shape[1]).expand_as(x)
        )

    def ranks(self, codes: torch.Tensor) -> torch.Tensor:
        """Places [n, B] of codes [n, B] in their rows, most likely first; WrongError for one not allowed."""
        B, V = self.rank.shape
        codes = codes.detach().cpu().long().reshape(-1, B)
        outside = (codes < 0) | (codes >= V)
        if outside.any():
            raise WrongError(f"code {int(codes[outside][0])} is not in [0, {V})")
        ranks = self.rank.gather(1, codes.T).T
        if not (fine := self.allowed.gather(1, ranks.T).T).all():
            row = int((~fine).nonzero()[0, 1])
            raise WrongError(f"row {row} drew a token that is not kept: code {int(codes[~fine][0])}")
        return ranks

    def check(self, codes: torch.Tensor) -> None:
        """Raise WrongError unless codes [n, B], n draws a row, look drawn from the kept distribution."""
        ranks = self.ranks(codes)
        p, below = self.probability.gather(1, ranks.T).T, self.below.gather(1, ranks.T).T
        inside = p > 0
        if (share := 1 - float(inside.double().mean())) > OUTSIDE_LIMIT:
            raise WrongError(f"{share:.1%} of the draws are not of kept tokens, limit {OUTSIDE_LIMIT:.0%}")
        random = torch.Generator().manual_seed(5)
        place = (below + p * torch.rand(p.shape, dtype=p.dtype, generator=random))[inside]
        counts = torch.bincount((place * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
        mean = len(place) / BINS
        if (statistic := float(((counts - mean) ** 2).sum() / mean)) > CHI_SQUARE_LIMIT:
            raise WrongError(
                f"{len(place)} draws do not follow the kept distribution: chi-square {statistic:.0f} over "
                f"{BINS} bins, limit {CHI_SQUARE_LIMIT}"
            )
