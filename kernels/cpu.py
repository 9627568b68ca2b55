"""The CPU's way, compiled by numba as it is imported: the kernel's codes, bit for bit, a row at a time.

The same arithmetic as ``noise.py`` and ``philox.py`` on numbers instead of tensors: for a few rows, a
tensor operation's overhead is many times its work.
"""

import math

import numba
import numpy as np
import torch

from rowseed.kernels import noise, philox

if numba.config.DISABLE_JIT:
    raise ImportError("numba's compiler is off (NUMBA_DISABLE_JIT)")

_F32, _I32, _I64, _U64 = np.float32, np.int32, np.int64, np.uint64
_ZERO, _HALF, _ONE, _INF = _F32(0), _F32(0.5), _F32(1), _F32(math.inf)
_LARGEST, _LOG2E, _LN2 = _F32(noise.FLOAT32_MAX), _F32(noise.LOG2E), _F32(noise.LN2)
_GREEDY_BELOW, _SMALLEST_MIN_P = _F32(noise.GREEDY_BELOW), _F32(noise.SMALLEST_MIN_P)
_2_16, _2_30, _2_M32, _MASS_FLOOR = _F32(2.0**16), _F32(2.0**30), _F32(2.0**-32), _F32(-64)
_LOG, _EXP = np.array(noise.LOG, _F32), np.array(noise.EXP, _F32)
_SQRT_HALF_BITS, _SMALL_WORDS = _I32(noise.SQRT_HALF_BITS), _U64(noise.SMALL_WORDS)
_M0, _M1 = map(_U64, philox.MULTIPLIERS)
_W0, _W1 = map(_U64, philox.WEYL)
_MASK, _32, _16, _LOW_16 = _U64(0xFFFFFFFF), _U64(32), _U64(16), _U64(0xFFFF)
_DOMAIN = _U64(philox.SCHEME << 24)
_TAG_SEEDED, _TAG_GLOBAL = _U64(philox.TAG_SEEDED << 16), _U64(philox.TAG_GLOBAL << 16)

# Strict IEEE arithmetic: without `fastmath` LLVM may not fuse, reorder or approximate.
_jit = numba.njit(nogil=True, error_model="numpy")


@_jit
def _philox(offset, block, domain, seed):
    """Four words, uint64 values below 2**32, of a counter block."""
    c0, c1, c2, c3 = offset & _MASK, offset >> _32, block, domain
    k0, k1 = seed & _MASK, seed >> _32
    for _ in range(philox.ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@_jit
def _horner(s, coefficients):
    p = coefficients[len(coefficients) - 1]
    for i in range(len(coefficients) - 2, -1, -1):
        p = p * s + coefficients[i]
    return p


@_jit
def _centred(word):
    return _F32(word >> _16) * _2_16 + (_F32(word & _LOW_16) + _HALF)


@_jit
def _split(y):
    bits = _F32(y).view(_I32)
    e = _I32((bits - _SQRT_HALF_BITS) >> 23)
    return e, _I32(bits - (e << 23)).view(_F32) - _ONE


@_jit
def _gumbel(word):
    if word < _SMALL_WORDS:
        e, s = _I32(0), -(_centred(word) * _2_M32)
    else:
        e, s = _split(_centred(word ^ _MASK))
        e = _I32(e - 32)
    e, s = _split(-(_F32(e) + s * _horner(s, _LOG)))
    return -(_F32(e) + s * _horner(s, _LOG))


@_jit
def _mass(t):
    d = max(t, _MASS_FLOOR)
    n = _F32(math.floor(d))
    return _I64(_horner(d - n, _EXP) * _2_30) >> min(_I64(-n), 31)


@_jit
def _log2(y):
    e, s = _split(y)
    return _F32(e) + s * _horner(s, _LOG)


@_jit
def _log_share(t, total):
    shift = 0
    while total >> shift >= 1 << 24:
        shift += 1
    e, s = _split(_F32(total >> shift))
    log2_total = _F32(e + shift - 30) + s * _horner(s, _LOG)
    return min((t - log2_total) * _LN2, _ZERO)


@_jit
def _tempered(x, largest, scale):
    return max((x - largest) * scale, -_LARGEST)


@_jit
def _sift(heap, size, hole, x):
    """Fill a hole of a heap, smallest first, with x or what is smaller below."""
    child = 2 * hole + 1
    while child < size:
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= x:
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = x


@_jit
def _heapify(heap, size):
    for i in range(size // 2 - 1, -1, -1):
        _sift(heap, size, i, heap[i])


@_jit
def _kth_largest(value, k, heap):
    """With duplicates counted; 0 < k < len(value)."""
    for i in range(k):
        heap[i] = value[i]
    _heapify(heap, k)
    for i in range(k, len(value)):
        if value[i] > heap[0]:
            _sift(heap, k, 0, value[i])
    return heap[0]


@_jit
def _min_p_threshold(value, largest, scale, min_p):
    """The smallest value that min-p keeps; -inf if it keeps none."""
    lowest, smallest = _log2(min_p), _INF
    for x in value:
        if x > -_INF and x < smallest and _tempered(x, largest, scale) >= lowest:
            smallest = x
    return smallest if smallest < _INF else -_INF


@_jit
def _top_p_threshold(value, threshold, largest, scale, top_p, heap):
    """The smallest value that top-p keeps of those at or above the threshold."""
    size, total = 0, 0
    for x in value:
        if x >= threshold and x > -_INF:
            heap[size] = -x
            size += 1
            total += _mass(_tempered(x, largest, scale))
    bar = max(_I64(np.float64(total) * np.float64(top_p)), 1)
    _heapify(heap, size)
    above = 0
    while size and above < bar:
        threshold = -heap[0]
        above += _mass(_tempered(threshold, largest, scale))
        size -= 1
        _sift(heap, size, 0, heap[size])
    return threshold


def _array(dtype: type, dimensions: int) -> numba.types.Array:
    # Any layout: otherwise each mix of strides would be compiled on its own, while requests wait.
    return numba.types.Array(numba.from_dtype(np.dtype(dtype)), dimensions, "A")


@numba.njit(
    (
        _array(_F32, 3), _array(_I64, 2), _array(_F32, 1), _array(_I64, 1), _array(_F32, 1), _array(_F32, 1),
        numba.int64, _array(_I64, 2), _array(_I32, 2), _array(_F32, 2),
    ),
    nogil=True,
    error_model="numpy",
)  # fmt: skip
def _sample(
    logits,  # float32 [B, C, V]
    streams,  # int64 [N, 3]
    temperatures,  # float32 [B], or [1] for all rows; so the next three
    top_ks,  # int64
    top_ps,  # float32
    min_ps,  # float32
    codebook,
    out,  # int64 [B, C]
    status,  # int32 [B, C], or [0, 0]
    logprob,  # float32 [B, C], or [0, 0]
):
    """Number of rows sampled; the others get code 0 and nothing else."""
    B, C, V = logits.shape
    value, heap = np.empty(V, _F32), np.empty(V, _F32)
    sampled = 0
    for row in range(B):
        if row >= streams[0, 2] or streams[row + 1, 2] & 2:
            out[row] = 0
            continue
        sampled += 1
        if streams[row + 1, 2] & 1:
            seed, offset, tag = _U64(streams[row + 1, 0]), _U64(streams[row + 1, 1]), _TAG_SEEDED
        else:
            seed, offset, tag = _U64(streams[0, 0]), _U64(streams[0, 1] + row), _TAG_GLOBAL
        t = temperatures[row % len(temperatures)]
        k = top_ks[row % len(top_ks)]
        p = top_ps[row % len(top_ps)]
        m = min_ps[row % len(min_ps)]
        bad = not (t >= 0 and t < _INF and p >= 0 and p <= 1 and m >= 0 and m <= 1)
        greedy = bad or t < _GREEDY_BELOW
        scale = _LOG2E if greedy else _LOG2E / t
        for c in range(C):
            flags = 8 if bad else 0
            largest = -_INF
            for i in range(V):
                x = logits[row, c, i]
                if x != x:
                    flags |= 1
                    x = -_INF
                elif x == _INF:
                    flags |= 2
                    x = _LARGEST
                x = x + _ZERO  # -0 becomes +0
                value[i] = x
                largest = max(largest, x)
            if largest == -_INF:
                flags |= 4

            threshold = -_INF
            if greedy:
                threshold = largest
            else:
                if 0 < k < V:
                    threshold = _kth_largest(value, k, heap)
                if m >= _SMALLEST_MIN_P:
                    threshold = max(threshold, _min_p_threshold(value, largest, scale, m))
                if p < 1:
                    threshold = _top_p_threshold(value, threshold, largest, scale, p, heap)

            code, best, kept_mass, last_block = 0, -_INF, 0, -1
            w0 = w1 = w2 = w3 = _U64(0)
            domain = _DOMAIN | tag | _U64(codebook + c)
            for i in range(V):
                x = value[i]
                if x < threshold or x == -_INF:
                    continue
                if greedy:
                    code = i
                    break
                if i >> 2 != last_block:
                    last_block = i >> 2
                    w0, w1, w2, w3 = _philox(offset, _U64(last_block), domain, seed)
                word = (w0 if i & 1 == 0 else w1) if i & 2 == 0 else (w2 if i & 1 == 0 else w3)
                tempered = _tempered(x, largest, scale)
                score = tempered + _gumbel(word)
                if score > best:
                    code, best = i, score
                if len(logprob):
                    kept_mass += _mass(tempered)
            out[row, c] = code
            if len(logprob):
                drawn = _ZERO
                if kept_mass > 0:
                    drawn = _log_share(_tempered(value[code], largest, scale), kept_mass)
                logprob[row, c] = drawn
            if len(status):
                status[row, c] = flags
    return sampled


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
    B = len(out)
    sampled = _sample(
        logits.detach().to(torch.float32).numpy(),
        streams.numpy(),
        _numbers(temperature, temperatures, _F32),
        _numbers(top_k, top_ks, _I64),
        _numbers(top_p, top_ps, _F32),
        _numbers(min_p, min_ps, _F32),
        codebook,
        out.numpy(),
        _NO_STATUS if status is None else status.numpy(),
        _NO_LOGPROB if logprob is None else logprob.detach().numpy(),
    )
    if table is None or total is None:
        return
    codes = out[:, 0]
    with torch.no_grad():
        if sampled == B:
            total += table[codes]
            if next_table is not None and next_input is not None:
                next_input.copy_(next_table[codes])
            return
        rows = torch.arange(B, device="cpu")  # where vLLM builds models, another device is the default
        rows = rows[(rows < streams[0, 2]) & (streams[1 : B + 1, 2] & 2 == 0)]
        total[rows] += table[codes[rows]]
        if next_table is not None and next_input is not None:
            next_input[rows] = next_table[codes[rows]]


_NO_STATUS, _NO_LOGPROB = np.empty((0, 0), _I32), np.empty((0, 0), _F32)


def _numbers(number: float, tensor: torch.Tensor | None, dtype: type) -> np.ndarray:
    if tensor is None:
        return np.array([number], dtype)
    return tensor.detach().numpy().astype(dtype, copy=False)
