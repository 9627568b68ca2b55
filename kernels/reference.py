"""The torch reference of the sampler, on any device: the kernel's codes, bit for bit.

Filters first, on values alone; then the noise of the kept tokens only.
"""

import math

import torch

from rowseed.kernels import noise
from rowseed.kernels.philox import SCHEME, TAG_GLOBAL, TAG_SEEDED, philox4x32


@torch.no_grad()
def sample(
    logits: torch.Tensor,  # [B, C, V]
    streams: torch.Tensor,  # int64 [N, 3]
    temperature: float,
    temperatures: torch.Tensor | None,  # float32 [B]
    top_k: int,
    top_ks: torch.Tensor | None,  # int32 or int64 [B]
    top_p: float,
    top_ps: torch.Tensor | None,  # float32 [B]
    min_p: float,
    min_ps: torch.Tensor | None,  # float32 [B]
    codebook: int,
    out: torch.Tensor,  # int64 [B, C]
    status: torch.Tensor | None,  # int32 [B, C]
    logprob: torch.Tensor | None,  # float32 [B, C]
    table: torch.Tensor | None,  # [>= V, D]
    total: torch.Tensor | None,  # float32 [B, D]
    next_table: torch.Tensor | None,  # [>= V, E]
    next_input: torch.Tensor | None,  # [B, E]
) -> None:
    """See ``sampling.sample``, which has checked every argument."""
    B, C, V = logits.shape
    device = logits.device
    lines = streams[1 : B + 1]
    rows = torch.arange(B, device=device)
    rows = rows[(rows < streams[0, 2]) & (lines[:, 2] & 2 == 0)]
    everyone = len(rows) == B
    if not everyone:
        out.zero_()
        if len(rows) == 0:
            return
        logits = logits[rows]

    def per_program(values: torch.Tensor | None, number: float, dtype: torch.dtype) -> torch.Tensor:
        """[R * C, 1]: a row's parameter for each of its codebooks."""
        if values is None:
            return torch.full((len(rows) * C, 1), number, dtype=dtype, device=device)
        return values[rows].to(dtype).repeat_interleave(C)[:, None]

    t = per_program(temperatures, temperature, torch.float32)
    k = per_program(top_ks, top_k, torch.int64)
    p = per_program(top_ps, top_p, torch.float32)
    m = per_program(min_ps, min_p, torch.float32)
    bad = ~((t >= 0) & (t < math.inf) & (p >= 0) & (p <= 1) & (m >= 0) & (m <= 1))
    greedy = bad | (t < noise.GREEDY_BELOW)
    # Not LOG2E / t: torch makes that a reciprocal and a multiply, two roundings.
    scale = torch.full_like(t, noise.LOG2E) / torch.where(greedy, 1.0, t)

    raw = logits.reshape(-1, V).to(torch.float32)
    # Adding +0 makes -0 a +0.
    value = torch.where(raw.isnan(), -math.inf, raw.clamp_max(noise.FLOAT32_MAX)) + 0.0
    largest = value.amax(-1, keepdim=True)

    threshold = torch.where(greedy, largest, _top_k_threshold(value, torch.where(greedy, 0, k)))
    above = (m >= noise.SMALLEST_MIN_P) & ~greedy
    if bool(above.any()):
        lowest = _min_p_threshold(value, largest, scale, torch.where(above, m, 0.0))
        threshold = torch.maximum(threshold, lowest)
    nucleus = (p < 1) & ~greedy
    if bool(nucleus.any()):
        threshold = _top_p_threshold(value, threshold, largest, scale, torch.where(nucleus, p, 1.0))
    kept = (value >= threshold) & (value > -math.inf)

    program, token = kept.nonzero(as_tuple=True)
    tempered = (value[program, token] - largest[program, 0]) * scale[program, 0]
    tempered = tempered.clamp_min(-noise.FLOAT32_MAX)
    words = _words(streams, rows, codebook, C, V, program, token)
    score = torch.where(greedy[program, 0], 0.0, tempered + noise.gumbel(words))
    # The largest score of each program, then the lowest id that has it; nothing alive gives 0.
    best = score.new_full((len(value),), -math.inf).scatter_reduce(0, program, score, "amax")
    won = score == best[program]
    codes = token.new_full((len(value),), V).scatter_reduce(0, program[won], token[won], "amin")
    codes = torch.where(codes == V, 0, codes).view(-1, C)

    out[rows] = codes
    if logprob is not None:
        masses = noise.mass(tempered)
        kept_mass = torch.zeros(len(value), dtype=torch.int64, device=device).index_add_(0, program, masses)
        of_code = (value.gather(1, codes.view(-1, 1)) - largest) * scale
        of_code = of_code.clamp_min(-noise.FLOAT32_MAX)[:, 0]
        drawn = (kept_mass > 0) & ~greedy[:, 0]
        shares = noise.log_share(of_code, kept_mass.clamp_min(1))
        logprob[rows] = torch.where(drawn, shares, 0.0).view(-1, C)
    if status is not None:
        flags = raw.isnan().any(-1, keepdim=True) * 1 | (raw == math.inf).any(-1, keepdim=True) * 2
        flags = flags | (largest == -math.inf) * 4 | bad * 8
        status[rows] = flags.to(torch.int32).view(-1, C)
    if table is not None and total is not None:
        total[rows] += table[codes[:, 0]].to(torch.float32)
    if next_table is not None and next_input is not None:
        next_input[rows] = next_table[codes[:, 0]]


def _top_k_threshold(value: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each line, counting duplicates; -inf where top-k is off."""
    V = value.shape[-1]
    on = (k > 0) & (k < V)
    k = torch.where(on, k, 1)
    top = value.topk(int(k.max())).values
    return torch.where(on, top.gather(-1, k - 1), -math.inf)


def _min_p_threshold(
    value: torch.Tensor,  # [R, V]
    largest: torch.Tensor,  # [R, 1]
    scale: torch.Tensor,  # [R, 1]
    min_p: torch.Tensor,  # [R, 1], 0 where min-p is off
) -> torch.Tensor:
    """The smallest value that min-p keeps, -inf where it is off."""
    on = min_p > 0
    lowest = noise.log2(torch.where(on, min_p, 1.0))
    tempered = ((value - largest) * scale).clamp_min(-noise.FLOAT32_MAX)
    smallest = torch.where((tempered >= lowest) & (value > -math.inf), value, math.inf).amin(-1, keepdim=True)
    return torch.where(on & (smallest < math.inf), smallest, -math.inf)


def _top_p_threshold(
    value: torch.Tensor,  # [R, V]
    threshold: torch.Tensor,  # [R, 1]: what top-k keeps
    largest: torch.Tensor,  # [R, 1]
    scale: torch.Tensor,  # [R, 1]
    p: torch.Tensor,  # [R, 1], 1 where top-p is off
) -> torch.Tensor:
    """The smallest value that top-k and top-p keep."""
    kept = value >= threshold
    width = int(kept.sum(-1).max())
    top = torch.where(kept, value, -math.inf).topk(width).values
    alive = top > -math.inf
    masses = noise.mass(torch.where(alive, (top - largest) * scale, -math.inf))
    above = masses.cumsum(-1) - masses
    bar = (masses.sum(-1, keepdim=True).double() * p.double()).to(torch.int64).clamp_min(1)
    # `above` grows with the position, and the first of equal values decides for them all: the last
    # token below the bar has the smallest kept value.
    last = ((above < bar) & alive).sum(-1, keepdim=True) - 1
    return torch.where(p < 1, top.gather(-1, last.clamp_min(0)), threshold)


def _words(
    streams: torch.Tensor,  # int64 [N, 3]
    rows: torch.Tensor,  # int64 [R]: the batch rows sampled
    codebook: int,
    C: int,
    V: int,
    program: torch.Tensor,  # int64 [K]: position in rows, times C, plus codebook
    token: torch.Tensor,  # int64 [K]
) -> torch.Tensor:
    """Random words of the kept tokens, int64 [K] holding uint32 values."""
    lines = streams[rows + 1]
    seeded = lines[:, 2] & 1 != 0
    seed = torch.where(seeded, lines[:, 0], streams[0, 0]).repeat_interleave(C)
    offset = torch.where(seeded, lines[:, 1], streams[0, 1] + rows).repeat_interleave(C)
    tag = torch.where(seeded, TAG_SEEDED, TAG_GLOBAL).repeat_interleave(C)
    c = torch.arange(codebook, codebook + C, device=rows.device).repeat(len(rows))
    domain = SCHEME << 24 | tag << 16 | c

    blocks = (V + 3) // 4
    if len(token) * 4 > len(domain) * V:
        # Most tokens are kept: a block for every four neighbours is less work than one a token.
        block = torch.arange(blocks, device=rows.device)
        seed, offset, domain = seed[:, None], offset[:, None], domain[:, None]
        words = philox4x32((offset, offset >> 32, block, domain), (seed, seed >> 32))
        return torch.stack(words, -1).view(-1, 4 * blocks)[program, token]
    seed, offset, domain = seed[program], offset[program], domain[program]
    words = philox4x32((offset, offset >> 32, token >> 2, domain), (seed, seed >> 32))
    return torch.stack(words).gather(0, (token & 3)[None])[0]
