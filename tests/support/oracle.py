"""A second, independent reading of scheme 1: slow numpy, one row at a time, sorting nothing cleverly."""

import math

import numpy as np

F = np.float32


def philox(counter, key):
    """Philox4x32-10 on Python integers or uint64 arrays."""
    mask = 0xFFFFFFFF
    c = [np.asarray(x, np.uint64) for x in counter]
    k0, k1 = (int(x) for x in key)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        left, right = high_b ^ c[1] ^ np.uint64(k0), high_a ^ c[3] ^ np.uint64(k1)
        c = [left, b & np.uint64(mask), right, a & np.uint64(mask)]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def words(seed, offset, codebook, tag, V):
    """uint32 [V] random words of a row."""
    seed, offset = seed % 2**64, offset % 2**64
    counter = (offset % 2**32, offset >> 32, np.arange((V + 3) // 4), 1 << 24 | tag << 16 | codebook)
    lanes = np.broadcast_arrays(*philox(counter, (seed % 2**32, seed >> 32)))
    return np.stack(lanes, -1).reshape(-1)[:V].astype(np.uint32)


_LOG = [
    "0x1.715474p+0", "-0x1.715528p-1", "0x1.ec7724p-2", "-0x1.70e2a8p-2",
    "0x1.25fd3cp-2", "-0x1.fdb34cp-3", "0x1.df512ep-3", "-0x1.2a9e52p-3",
]  # fmt: skip
_EXP = [
    "0x1.fffffep-1", "0x1.62e4f6p-1", "0x1.ebd5a8p-3", "0x1.c95446p-5", "0x1.269010p-7", "0x1.ec31fep-10",
]  # fmt: skip


def _polynomial(x, hexes):
    result = np.full_like(x, F(float.fromhex(hexes[-1])))
    for c in reversed(hexes[:-1]):
        result = (result * x).astype(F) + F(float.fromhex(c))
    return result


def _log2_parts(y):
    bits = y.view(np.int32)
    e = (bits - np.int32(0x3F3504F3)) >> np.int32(23)
    return e, (bits - (e << np.int32(23))).view(F) - F(1)


def _middle(x):
    return (x >> np.uint32(16)).astype(F) * F(65536) + ((x & np.uint32(0xFFFF)).astype(F) + F(0.5))


def gumbel(x):
    """float32 noise of uint32 words."""
    x = np.asarray(x, np.uint32)
    low = x < 1257966796
    e, s = _log2_parts(_middle(~x))
    e = np.where(low, 0, e - 32).astype(F)
    s = np.where(low, -(_middle(x) * F(2.0**-32)), s)
    e, s = _log2_parts(-(e + s * _polynomial(s, _LOG)))
    return -(e.astype(F) + s * _polynomial(s, _LOG))


def exact_gumbel(x):
    """The noise in float64: -log2(-log2(1 - u)), u = (x + 1/2) / 2**32."""
    u = (np.asarray(x, np.float64) + 0.5) / 2.0**32
    return -np.log2(-np.log1p(-u) / math.log(2.0))


def mass(t):
    d = np.maximum(np.asarray(t, F), F(-64))
    n = np.floor(d)
    scaled = _polynomial(d - n, _EXP) * F(2.0**30)
    return [int(s) >> min(int(-m), 31) for s, m in zip(scaled, n, strict=True)]


def draw(logits, seed, offset, codebook, temperature, top_k, top_p, tag=0):
    """(code, status) of one row of float32 logits."""
    x = np.asarray(logits, F)
    V = len(x)
    temperature, top_p = F(temperature), F(top_p)
    status = int(np.isnan(x).any()) | int((x == np.inf).any()) << 1
    bad = not (0 <= temperature < np.inf and 0 <= top_p <= 1)
    status |= bad << 3
    live = [i for i in range(V) if not np.isnan(x[i]) and x[i] != -np.inf]
    if not live:
        return 0, status | 4
    v = np.minimum(x, np.finfo(F).max)
    if bad or temperature < F(1e-5):
        return min(live, key=lambda i: (-v[i], i)), status
    kept = live
    if 0 < top_k < V and top_k < len(live):
        bar = sorted((v[i] for i in live), reverse=True)[top_k - 1]
        kept = [i for i in live if v[i] >= bar]
    with np.errstate(over="ignore"):
        scale = F(float.fromhex("0x1.715476p+0")) / temperature
        t = np.maximum((v - max(v[i] for i in live)) * scale, -np.finfo(F).max)
    if top_p < 1:
        w = dict(zip(kept, mass(t[kept]), strict=True))
        bar = max(int(float(sum(w.values())) * float(top_p)), 1)
        by_value: dict[float, int] = {}
        for i in kept:
            by_value[float(v[i])] = by_value.get(float(v[i]), 0) + w[i]
        above, stays = 0, set()
        for value in sorted(by_value, reverse=True):
            if above < bar:
                stays.add(value)
            above += by_value[value]
        kept = [i for i in kept if float(v[i]) in stays]
    score = t + gumbel(words(seed, offset, codebook, tag, V))
    return min(kept, key=lambda i: (-score[i], i)), status
