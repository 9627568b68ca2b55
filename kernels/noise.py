"""Scheme 1's arithmetic in torch: Gumbel noise from random words, and integer masses for top-p.

Only integer operations and single IEEE-754 binary32 multiplies, adds and conversions, rounded to
nearest, so that numpy, torch, the Triton interpreter and every GPU agree bit for bit. The Triton
side is ``device.py``.
"""

import torch

LOG = tuple(
    float.fromhex(c)
    for c in (
        "0x1.715474p+0",
        "-0x1.715528p-1",
        "0x1.ec7724p-2",
        "-0x1.70e2a8p-2",
        "0x1.25fd3cp-2",
        "-0x1.fdb34cp-3",
        "0x1.df512ep-3",
        "-0x1.2a9e52p-3",
    )
)
"""log2(1 + s) / s for s in [sqrt(1/2) - 1, sqrt(2) - 1), constant term first."""

EXP = tuple(
    float.fromhex(c)
    for c in (
        "0x1.fffffep-1",
        "0x1.62e4f6p-1",
        "0x1.ebd5a8p-3",
        "0x1.c95446p-5",
        "0x1.269010p-7",
        "0x1.ec31fep-10",
    )
)
"""2**f for f in [0, 1], constant term first; the top stays below 2 after the conversion to integers."""

LOG2E = float.fromhex("0x1.715476p+0")
FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
LN2 = float.fromhex("0x1.62e430p-1")
SMALLEST_MIN_P = float.fromhex("0x1p-126")
"""A smaller min_p is off."""

GREEDY_BELOW = float.fromhex("0x1.4f8b58p-17")
"""float32(1e-5): rows with a smaller temperature take the largest logit."""

SMALL_WORDS = 1257966796
"""Words below it have u < 1 - sqrt(1/2): there log2(1 - u) needs no exponent of its own."""

SQRT_HALF_BITS = 0x3F3504F3


def _horner(s: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    p = torch.full_like(s, coefficients[-1])
    for c in coefficients[-2::-1]:
        p = p * s + c
    return p


def _centred(word: torch.Tensor) -> torch.Tensor:
    """float32(word + 1/2), by halves: a direct conversion would round twice."""
    return (word >> 16).to(torch.float32) * 65536.0 + ((word & 0xFFFF).to(torch.float32) + 0.5)


def _split(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y = 2**e * (1 + s) with 1 + s in [sqrt(1/2), sqrt(2))."""
    bits = y.view(torch.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    return e, (bits - (e << 23)).view(torch.float32) - 1.0


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Base-2 Gumbel noise -log2(-log2(1 - u)), u = (word + 1/2) / 2**32.

    words: int64 tensor of uint32 values, any shape. Returns float32 of that shape, finite, never
    increasing with the word, within 1.3e-6 of the exact value.
    """
    small = words < SMALL_WORDS
    e, s = _split(_centred(words ^ 0xFFFFFFFF))
    e = torch.where(small, 0, e - 32)
    s = torch.where(small, -(_centred(words) * 2.0**-32), s)
    race = -(e.to(torch.float32) + s * _horner(s, LOG))
    e, s = _split(race)
    return -(e.to(torch.float32) + s * _horner(s, LOG))


def mass(t: torch.Tensor) -> torch.Tensor:
    """Integer masses proportional to 2**t, 2**30 at t = 0 and none below t = -31.

    t: float32 tensor, t <= 0. Returns int64: sums of integers have no order.
    """
    d = t.clamp_min(-64.0)
    n = d.floor()
    f = d - n  # rounds to 1 for the smallest negative t
    return (_horner(f, EXP) * 2.0**30).to(torch.int64) >> (-n).clamp_max(31.0).to(torch.int64)


def log2(y: torch.Tensor) -> torch.Tensor:
    """log2 of positive normal float32 values, within 2e-7 of it relative to the larger of 1 and itself."""
    e, s = _split(y)
    return e.to(torch.float32) + s * _horner(s, LOG)


def log_share(t: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of 2**t over the sum that an int64 total of ``mass`` stands for; at most 0.

    The total's leading 24 bits, cut off below, are what is taken the logarithm of: m = total >> shift with
    2**23 <= m < 2**24, shift at least 0. With e, s = split(float32(m)) the result is
    min((t - (float32(e + shift - 30) + s * Q(s))) * LN2, 0), every operation rounded to float32.
    """
    rest, shift = total, torch.zeros_like(total)
    for bits in (32, 16, 8, 4, 2, 1):
        more = (rest >> bits) >= 1 << 23
        rest = torch.where(more, rest >> bits, rest)
        shift = torch.where(more, shift + bits, shift)
    e, s = _split(rest.to(torch.float32))
    log2_total = (e + shift - 30).to(torch.float32) + s * _horner(s, LOG)
    return ((t - log2_total) * LN2).clamp_max(0.0)
