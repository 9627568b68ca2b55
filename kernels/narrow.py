"""The draw of a row that keeps few tokens: find the candidates, compact them, work on those alone.

The row lies in the registers of 128 threads, GROUPS groups of 32 (a warp, or half of an AMD one):

1. each thread takes the largest of its own logits, each group the k / GROUPS largest of its 32. The smallest
   of what the groups found is a bound that at least k tokens reach (``_first_bound``);
2. the tokens at or above the bound are the candidates. There are k to 128 of them, or the bound is moved by
   bisection until there are (``_find``; no trip for ordinary logits);
3. each thread finds one candidate in the bitmap of candidates (``_pull``), so no memory is written;
4. a candidate is kept by top-k if fewer than k candidates are larger (``_rank``), and by top-p if the mass of
   the larger ones is below the bar (``_nucleus``); it then draws its noise.

The codes do not rest on the bound being a good one: with NaN, +inf, nothing alive or too many equal values
``draw`` says so, and the caller takes the path for any row. Nor do they rest on the layout: tensors are
[GROUPS, 32] because Triton then gives each group a row, and what is summed along it needs no barrier.
"""

import triton
import triton.language as tl

from rowseed.kernels import noise
from rowseed.kernels.device import gumbel, mass, word_of

_MAX = tl.constexpr(noise.FLOAT32_MAX)
_INF = tl.constexpr(float("inf"))
_LOWEST_KEY = tl.constexpr(-2139095040)  # -FLOAT32_MAX
_INF_KEY = tl.constexpr(2139095040)
_NAN_KEY = tl.constexpr(2147483647)


@triton.jit
def _key(value):
    """int32 keys in the order of the float32 values; NaN on top, whatever its sign."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value != value, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _popcount(word):
    """Set bits of a uint32: LLVM makes one instruction of it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _to_every_group(values, GROUPS: tl.constexpr):
    """[N] -> [N / 32, GROUPS, 32]: every group holds all the values, 32 a register."""
    ROWS: tl.constexpr = values.shape[0] // 32
    i = tl.arange(0, ROWS * GROUPS * 32)
    return tl.reshape(tl.gather(values, i // (GROUPS * 32) * 32 + i % 32, 0), [ROWS, GROUPS, 32])


@triton.jit
def _row_maxima(x):
    """[N, M] -> [N]: largest of each row, NaN if one of it is. A tree, as ``tl.max`` passes over NaN."""
    if x.shape[1] == 1:
        return tl.reshape(x, [x.shape[0]])
    else:
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        return _row_maxima(tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _first_bound(x, k, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """Keys of a bound that at least k of the live tokens reach, and of the largest token.

    The k / GROUPS largest maxima of each group are k tokens together.
    """
    THREADS: tl.constexpr = 32 * GROUPS
    REPEATS: tl.constexpr = x.shape[0] // (THREADS * VEC)
    maxima = _row_maxima(tl.reshape(x, [REPEATS * THREADS, VEC]))
    maxima = _row_maxima(tl.trans(tl.reshape(maxima, [REPEATS, THREADS])))
    i = tl.arange(0, 32 * THREADS)
    neighbours = tl.gather(maxima, (i // 32) % GROUPS * 32 + i // THREADS, 0)  # of a thread's group
    mine = tl.reshape(maxima, [GROUPS, 32])
    # Sums of float32 ones: a comparison gives them in one instruction, integers take two.
    larger = tl.sum(tl.where(tl.reshape(neighbours, [32, GROUPS, 32]) > mine[None, :, :], 1.0, 0.0), 0)
    keys = _key(mine)
    enough = larger < ((k + GROUPS - 1) // GROUPS).to(tl.float32)
    bounds = tl.min(tl.where(enough, keys, _NAN_KEY), 1)
    return tl.maximum(tl.min(bounds, 0), _LOWEST_KEY), tl.max(tl.max(keys, 1), 0)


@triton.jit
def _bitmap(x, bound, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """Candidates as bits, in every group (uint32 [WORDS, GROUPS, 32]); their number up to each lane, and all.

    A thread's tokens are neighbouring bits (``_token`` is the way back). Lane l sees words l, l + 32...
    """
    THREADS: tl.constexpr = 32 * GROUPS
    MINE: tl.constexpr = x.shape[0] // THREADS
    SHARERS: tl.constexpr = max(32 // MINE, 1)  # threads in a word
    PARTS: tl.constexpr = max(MINE // 32, 1)  # words of a thread
    REPEATS: tl.constexpr = MINE // VEC // PARTS
    candidate = tl.reshape(x, [PARTS, REPEATS, THREADS, VEC]) >= _value(bound)
    repeat = tl.arange(0, REPEATS)[None, :, None, None]
    bit = repeat * VEC + tl.arange(0, VEC)[None, None, None, :]
    bits = tl.sum(tl.sum(tl.where(candidate, 1 << bit, 0), 3), 1)  # [PARTS, THREADS]
    bits = bits << (tl.arange(0, THREADS)[None, :] % SHARERS * MINE)
    words = tl.sum(tl.reshape(bits, [PARTS * THREADS // SHARERS, SHARERS]), 1).to(tl.uint32, bitcast=True)
    words = _to_every_group(words, GROUPS)
    of_lane = tl.sum(_popcount(words), 0)
    upto = tl.cumsum(of_lane, 1)
    return words, upto, tl.max(tl.max(upto, 1), 0)


@triton.jit
def _find(x, bound, top, k, GROUPS: tl.constexpr, VEC: tl.constexpr):
    """Moves the bound until k to THREADS tokens reach it; returns their ``_bitmap``.

    The first bound is right for nearly every row; otherwise this bisects between one that too many tokens
    reach and one that fewer than k reach. Fewer than k live tokens are all candidates. A number above THREADS
    says that there is no such bound: too many tokens are equal.
    """
    THREADS: tl.constexpr = 32 * GROUPS
    words, upto, n = _bitmap(x, bound, GROUPS, VEC)
    low, high = bound, top + 1
    while ((n > THREADS) | ((n < k) & (bound != _LOWEST_KEY))) & (bound != high):
        low = tl.where(n > THREADS, bound, low)
        high = tl.where(n > THREADS, high, bound)
        middle = (low & high) + ((low ^ high) >> 1)
        bound = tl.where(middle == low, high, middle)
        words, upto, n = _bitmap(x, bound, GROUPS, VEC)
    return words, upto, tl.where(bound == high, THREADS + 1, n)


@triton.jit
def _pull(words, upto, GROUPS: tl.constexpr):
    """[THREADS] bits of the bitmap, one a slot: the n-th slot's is the n-th set one, lanes first, then words.

    Binary searches, first over the lanes, then inside a word. Slots past the last set bit get any.
    """
    WORDS: tl.constexpr = words.shape[0]
    nth = tl.reshape(tl.arange(0, 32 * GROUPS), [GROUPS, 32])
    lane = tl.zeros_like(nth)
    for i in tl.static_range(5):
        half = 16 >> i
        lane = tl.where(tl.gather(upto, lane + (half - 1), 1) <= nth, lane + half, lane)
    nth -= tl.gather(upto - tl.sum(_popcount(words), 0), lane, 1)
    words = tl.gather(words, tl.broadcast_to(lane[None, :, :], [WORDS, GROUPS, 32]), 2)
    inside = _popcount(words)
    before = tl.cumsum(inside, 0) - inside
    which = tl.sum((before <= nth[None, :, :]).to(tl.int32), 0) - 1
    here = tl.arange(0, WORDS)[:, None, None] == which[None, :, :]
    nth -= tl.sum(tl.where(here, before, 0), 0)
    word = tl.sum(tl.where(here, words, 0), 0)
    bit = tl.zeros_like(nth)
    for i in tl.static_range(5):
        half = 16 >> i
        below = _popcount(word & ((1 << half) - 1))
        up = nth >= below
        nth = tl.where(up, nth - below, nth)
        bit = tl.where(up, bit + half, bit)
        word = tl.where(up, word >> half, word)
    return tl.reshape((which * 32 + lane) * 32 + bit, [32 * GROUPS])


@triton.jit
def _token(bit, THREADS: tl.constexpr, MINE: tl.constexpr, VEC: tl.constexpr):
    """Token ids of the bitmap's bits: threads hold VEC neighbours every THREADS * VEC tokens."""
    SHARERS: tl.constexpr = max(32 // MINE, 1)
    PARTS: tl.constexpr = max(MINE // 32, 1)
    REPEATS: tl.constexpr = MINE // VEC // PARTS
    word = bit // 32
    part = word // (THREADS // SHARERS)
    thread = word % (THREADS // SHARERS) * SHARERS + bit % 32 // (32 // SHARERS)
    own = bit % (32 // SHARERS)
    repeat = part * REPEATS + own // VEC
    return repeat * (THREADS * VEC) + thread * VEC + own % VEC


@triton.jit
def _rank(value):
    """How many slots hold a larger value, as float32."""
    return tl.sum(tl.where(value[:, None] > value[None, :], 1.0, 0.0), 0)


@triton.jit
def _group_sum(values):
    """[ROWS, GROUPS, 32] -> [GROUPS, 32]: each group's own sum, in all its lanes."""
    of_lane = tl.sum(values, 0)
    return tl.broadcast_to(tl.sum(of_lane, 1, keep_dims=True), of_lane.shape)


@triton.jit
def _nucleus(keep, rank, t, p, GROUPS: tl.constexpr):
    """Top-p among the kept slots: the largest rank that less than the bar lies above of.

    int64 masses are summed as two int32 halves, which one instruction adds up over a warp.
    """
    masses = tl.where(keep, mass(t), 0)
    ranks = _to_every_group(rank, GROUPS)
    high = _to_every_group(masses >> 15, GROUPS)
    low = _to_every_group(masses & 0x7FFF, GROUPS)
    total = (_group_sum(high).to(tl.int64) << 15) + _group_sum(low)
    # The only float64 of the kernel: one scalar a row.
    bar = tl.maximum((total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)
    last = tl.zeros([GROUPS, 32], tl.float32)
    step = 16.0 * GROUPS
    while step >= 1.0:
        above = ranks < (last + step)[None, :, :]
        mass_above = (_group_sum(tl.where(above, high, 0)).to(tl.int64) << 15) + _group_sum(
            tl.where(above, low, 0)
        )
        last = tl.where(mass_above < bar, last + step, last)
        step *= 0.5
    return keep & (rank <= tl.reshape(last, [32 * GROUPS]))


@triton.jit
def _draw_of(
    value, token, used, largest, k, p, lowest, scale, seed, offset, domain,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, MASS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The draw among candidates: their logits and ids, one a slot, and which slots are used."""
    # Zeros are added so that -0 counts as +0, here and in the score.
    value += 0.0
    rank = _rank(value)
    keep = used & (rank < k.to(tl.float32))
    t = tl.maximum((value - largest) * scale, -_MAX)
    if MIN_P:
        keep = keep & (t >= lowest)
    if TOP_P:  # noqa: SIM102  the first is known when compiling, the second on the device
        if p < 1.0:
            keep = _nucleus(keep, rank, t, p, GROUPS)
    score = t + gumbel(word_of(token, seed, offset, domain)) + 0.0
    # (score, lowest id) as one integer: a single reduction.
    packed = (_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    best = tl.max(tl.where(keep, packed, -(2**63)), 0)
    total = tl.full([], 0, tl.int64)
    if MASS:
        total = tl.sum(tl.where(keep, mass(t), 0).to(tl.int64), 0)
    return (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), total


@triton.jit
def draw(
    logits_ptr, ids_ptr, x, k, p, lowest, scale, seed, offset, domain,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, MASS: tl.constexpr, GROUPS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """A row's code and largest logit, the mass of what was kept (if asked for), whether it was drawn here.

    If it was not, the rest means nothing.

    x: the row as float32 [BLOCK], -inf past its end, and logits_ptr where it came from; ids_ptr: its token
    ids, None where they are 0, 1, ...; 0 < k <= THREADS; lowest: log2(min_p); scale: log2(e) / temperature;
    seed, offset, domain: see ``device.words``. A row drawn here has status 0.
    """
    THREADS: tl.constexpr = 32 * GROUPS
    code = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int64)
    drawn = False
    bound, top = _first_bound(x, k, GROUPS, VEC)
    if (top >= _LOWEST_KEY) & (top < _INF_KEY):
        words, upto, n = _find(x, bound, top, k, GROUPS, VEC)
        if n <= THREADS:
            token = _token(_pull(words, upto, GROUPS), THREADS, x.shape[0] // THREADS, VEC)
            used = tl.arange(0, THREADS) < n
            value = tl.load(logits_ptr + token, mask=used, other=-_INF).to(tl.float32)
            if ids_ptr is not None:
                token = tl.load(ids_ptr + token, mask=used, other=0)
            code, total = _draw_of(
                value, token, used, _value(top), k, p, lowest, scale, seed, offset, domain,
                TOP_P, MIN_P, MASS, GROUPS,
            )  # fmt: skip
            drawn = True
    return code, _value(top), total, drawn


@triton.jit
def store_candidates(
    logits_ptr, start, x, k, values_ptr, ids_ptr, failed_ptr, GROUPS: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Writes the candidates of a part of a row: THREADS logits (-inf for none) and token ids.

    Every token that top-k keeps in the whole row is among its part's candidates, as k tokens of the part
    reach the part's bound. failed: the part needs the path for any row. logits_ptr is
    the part's; start: its first id.
    """
    THREADS: tl.constexpr = 32 * GROUPS
    slot = tl.arange(0, THREADS)
    failed = 1
    bound, top = _first_bound(x, k, GROUPS, VEC)
    if top < _INF_KEY:
        # A part may hold nothing live, or lie past the row's end: no candidates, but no failure.
        words, upto, n = _find(x, bound, tl.maximum(top, _LOWEST_KEY), k, GROUPS, VEC)
        if n <= THREADS:
            position = _token(_pull(words, upto, GROUPS), THREADS, x.shape[0] // THREADS, VEC)
            value = tl.load(logits_ptr + position, mask=slot < n, other=-_INF).to(tl.float32)
            tl.store(values_ptr + slot, value)
            tl.store(ids_ptr + slot, start + position)
            failed = 0
    tl.store(failed_ptr, failed)
