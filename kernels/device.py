"""Scheme 1's arithmetic on the device, in Triton: the counterpart of ``philox.py`` and ``noise.py``.

Launch with ``enable_fp_fusion=False``: a fused multiply-add changes one noise word in six. For the
same reason there is no division but ``tl.div_rn``, no ``tl.floor``, no float to int64 conversion and
no library ``exp`` or ``log`` here.
"""

import triton
import triton.language as tl

from rowseed.kernels import noise, philox

_LOG = tl.constexpr(noise.LOG)
_EXP = tl.constexpr(noise.EXP)
_MULTIPLIER_0, _MULTIPLIER_1 = map(tl.constexpr, philox.MULTIPLIERS)
_WEYL_0, _WEYL_1 = map(tl.constexpr, philox.WEYL)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_SMALL_WORDS = tl.constexpr(noise.SMALL_WORDS)
_LN2 = tl.constexpr(noise.LN2)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 on uint32 tensors of one shape."""
    m0 = tl.zeros_like(c0) + tl.full([], _MULTIPLIER_0, tl.uint32)
    m1 = tl.zeros_like(c0) + tl.full([], _MULTIPLIER_1, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        hi0 = tl.umulhi(c0, m0)
        hi1 = tl.umulhi(c2, m1)
        lo0 = c0 * m0
        lo1 = c2 * m1
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = k0 + tl.full([], _WEYL_0, tl.uint32)
        k1 = k1 + tl.full([], _WEYL_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(blocks, seed, offset, domain):
    """Random words of four neighbouring tokens a block, in token order.

    blocks: token id >> 2, uint32 [N]; seed, offset: int64 scalars; domain: the last counter word,
    a uint32 scalar. Returns uint32 [4 * N].
    """
    zero = blocks * 0
    o0, o1, o2, o3 = philox4x32(
        zero + offset.to(tl.uint32),
        zero + (offset >> 32).to(tl.uint32),
        blocks,
        zero + domain,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    return tl.reshape(tl.join(tl.join(o0, o2), tl.join(o1, o3)), [4 * blocks.shape[0]])


@triton.jit
def word_of(token, seed, offset, domain):
    """Random words of single tokens, int32 ids of any shape; see ``words``."""
    zero = token.to(tl.uint32) * 0
    o0, o1, o2, o3 = philox4x32(
        zero + offset.to(tl.uint32),
        zero + (offset >> 32).to(tl.uint32),
        token.to(tl.uint32) >> 2,
        zero + domain,
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    odd = (token & 1) != 0
    return tl.where((token & 2) != 0, tl.where(odd, o3, o2), tl.where(odd, o1, o0))


@triton.jit
def _log2_slope(s):
    p = s * _LOG[7] + _LOG[6]
    for i in tl.static_range(6):
        p = p * s + _LOG[5 - i]
    return p


@triton.jit
def _centred(word):
    high, low = (word >> 16).to(tl.int32), (word & 0xFFFF).to(tl.int32)
    return high.to(tl.float32) * 65536.0 + (low.to(tl.float32) + 0.5)


@triton.jit
def _split(y):
    bits = y.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 23
    return e, (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def gumbel(word):
    """Base-2 Gumbel noise of uint32 words; see ``noise.gumbel``."""
    small = word < _SMALL_WORDS
    # Not `~word`: 3.7.1's interpreter takes -1 for it, and refuses it as a uint32.
    e, s = _split(_centred(word ^ tl.full([], 0xFFFFFFFF, tl.uint32)))
    e = tl.where(small, 0, e - 32)
    s = tl.where(small, _centred(word) * -(2.0**-32), s)
    # Times -1 keeps the sign of zero, whatever a Triton release lowers unary minus to.
    race = (e.to(tl.float32) + s * _log2_slope(s)) * -1.0
    e, s = _split(race)
    return (e.to(tl.float32) + s * _log2_slope(s)) * -1.0


@triton.jit
def log2(y):
    """See ``noise.log2``."""
    e, s = _split(y)
    return e.to(tl.float32) + s * _log2_slope(s)


@triton.jit
def log_share(t, total):
    """Scalars; see ``noise.log_share``."""
    rest = total
    shift = tl.full([], 0, tl.int32)
    for i in tl.static_range(6):
        bits = 32 >> i
        more = (rest >> bits) >= 8388608
        rest = tl.where(more, rest >> bits, rest)
        shift = tl.where(more, shift + bits, shift)
    e, s = _split(rest.to(tl.int32).to(tl.float32))
    log2_total = (e + shift - 30).to(tl.float32) + s * _log2_slope(s)
    return tl.minimum((t - log2_total) * _LN2, 0.0)


@triton.jit
def mass(t):
    """Integer masses proportional to 2**t, as int32; see ``noise.mass``."""
    d = tl.maximum(t, -64.0)
    n = d.to(tl.int32)
    n -= (n.to(tl.float32) > d).to(tl.int32)
    f = d - n.to(tl.float32)
    p = f * _EXP[5] + _EXP[4]
    for i in tl.static_range(4):
        p = p * f + _EXP[3 - i]
    return (p * 1073741824.0).to(tl.int32) >> tl.minimum(-n, 31)


@triton.jit
def order_key(value):
    """uint32 keys in the order of the float32 values; 0 is below every finite value's key."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
