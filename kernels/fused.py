"""The Triton sampler: one program a row and codebook, from logits to the code and the frame's sums.

``sampling.sample`` is the public way in; it has checked every argument. Launch parameters depend on
the vocabulary and on which filters are on, never on the batch, and nothing is autotuned: bits are
promised.
"""

import torch
import triton
import triton.language as tl

from rowseed.kernels import narrow, noise, philox
from rowseed.kernels.device import gumbel, log2, log_share, mass, order_key, words

PART = 4096
"""Tokens of a program where a vocabulary is split."""

SPLIT_BLOCK = 64 * PART
"""The largest vocabulary that is split over programs for top-k; wider ones are read in chunks by one."""

SLOTS = 128
"""Candidates that a program holds: larger top_k go the path for any row."""

ONE_BLOCK = 8192
"""The largest vocabulary that a program holds in registers to find the candidates of top-k."""

PLANE = 32768
"""Codebooks along the grid's second axis, which holds 65535 programs at most: one fewer than C may be."""

_PLANE = tl.constexpr(PLANE)
_LOG2E = tl.constexpr(noise.LOG2E)
_MAX = tl.constexpr(noise.FLOAT32_MAX)
_INF = tl.constexpr(float("inf"))
_SMALLEST_MIN_P = tl.constexpr(noise.SMALLEST_MIN_P)
_GREEDY_BELOW = tl.constexpr(noise.GREEDY_BELOW)
_SEEDED_DOMAIN = tl.constexpr(philox.SCHEME << 24 | philox.TAG_SEEDED << 16)
_GLOBAL_DOMAIN = tl.constexpr(philox.SCHEME << 24 | philox.TAG_GLOBAL << 16)


@triton.jit
def _is_active(streams_ptr, row):
    rows_in_use = tl.load(streams_ptr + 2)
    return (row < rows_in_use) & ((tl.load(streams_ptr + 3 * row + 5) & 2) == 0)


@triton.jit
def _stream(streams_ptr, row, codebook):
    """Seed, offset and last counter word of a row, from its own line or the global one."""
    seeded = (tl.load(streams_ptr + 3 * row + 5) & 1) != 0
    line = tl.where(seeded, 3 * row + 3, 0)
    seed = tl.load(streams_ptr + line)
    offset = tl.load(streams_ptr + line + 1) + tl.where(seeded, 0, row)
    domain = tl.where(seeded, _SEEDED_DOMAIN, _GLOBAL_DOMAIN) + codebook
    return seed, offset, domain.to(tl.uint32)


@triton.jit
def _parameters(
    row, temperatures_ptr, temperature_stride, temperature, top_ks_ptr, top_k_stride, top_k,
    top_ps_ptr, top_p_stride, top_p, min_ps_ptr, min_p_stride, min_p,
):  # fmt: skip
    """A row's parameters, from the [B] tensor where there is one; and whether they are out of range."""
    if temperatures_ptr is not None:
        t = tl.load(temperatures_ptr + row * temperature_stride)
    else:
        t = tl.full([], temperature, tl.float32)
    if top_ks_ptr is not None:
        k = tl.load(top_ks_ptr + row * top_k_stride).to(tl.int64)
    else:
        k = tl.full([], top_k, tl.int64)
    if top_ps_ptr is not None:
        p = tl.load(top_ps_ptr + row * top_p_stride)
    else:
        p = tl.full([], top_p, tl.float32)
    if min_ps_ptr is not None:
        m = tl.load(min_ps_ptr + row * min_p_stride)
    else:
        m = tl.full([], min_p, tl.float32)
    bad = ((t >= 0.0) & (t < _INF) & (p >= 0.0) & (p <= 1.0) & (m >= 0.0) & (m <= 1.0)) == 0
    return t, k, p, m, bad


@triton.jit
def _raw(logits_ptr, ids, V):
    return tl.load(logits_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)


@triton.jit
def _load(logits_ptr, ids, V):
    raw = _raw(logits_ptr, ids, V)
    value, live = _comparable(raw)
    return raw, value, live


@triton.jit
def _comparable(raw):
    """What the comparisons see of the logits, and which are live."""
    live = (raw == raw) & (raw != -_INF)
    value = tl.where(raw == _INF, _MAX, raw)
    return tl.where(live & (value != 0.0), value, 0.0), live


@triton.jit
def _tempered(value, live, largest, scale):
    return tl.where(live, tl.maximum((value - largest) * scale, -_MAX), -_MAX)


@triton.jit
def _threshold(keys, weights, target):
    """The largest key such that the weights at or above it reach the target; 0 where none do."""
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        bit >>= 1
        reached = tl.sum(tl.where(keys >= candidate, weights, 0), 0) >= target
        threshold = tl.where(reached, candidate, threshold)
    return threshold


@triton.jit
def _nucleus_bar(total, p):
    # The only float64 of the kernel: one scalar a row.
    return tl.maximum((total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _select(value, live, t, k, p, V, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """Which tokens top-k, then top-p keep; equal values stay or go together."""
    keys = tl.where(live, order_key(value), 0)
    keep = live
    if TOP_K:
        if (k > 0) & (k < V):
            keep = keep & (keys >= _threshold(keys, live.to(tl.int32), k.to(tl.int32)))
    if TOP_P:
        if p < 1.0:
            masses = tl.where(keep, mass(t), 0).to(tl.int64)
            bar = _nucleus_bar(tl.sum(masses, 0), p)
            keep = keep & (keys >= _threshold(keys, masses, bar))
    return keep


@triton.jit
def _noise(start, seed, offset, domain, BLOCK: tl.constexpr):
    """Noise of BLOCK tokens from `start`, a multiple of four."""
    blocks = (start >> 2) + tl.arange(0, BLOCK // 4)
    return gumbel(words(blocks.to(tl.uint32), seed, offset, domain))


@triton.jit
def _argmax(score, ids, V):
    """The largest score and the lowest id that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, ids, V), 0)


@triton.jit
def _flags(raw):
    """Status bits 1 (NaN) and 2 (+inf) of the tokens."""
    return tl.max((raw != raw).to(tl.int32), 0) | (tl.max((raw == _INF).to(tl.int32), 0) << 1)


@triton.jit
def _finish(
    row, code, table_ptr, table_stride, D, total_ptr, total_stride,
    next_table_ptr, next_table_stride, E, next_input_ptr, next_input_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The frame's epilogue: add the code's embedding to the sum, gather the next step's input."""
    lanes = tl.arange(0, BLOCK)
    if table_ptr is not None:
        for start in range(0, D, BLOCK):
            at = start + lanes
            total_ptrs = total_ptr + row * total_stride + at
            embedding = tl.load(table_ptr + code * table_stride + at, mask=at < D, other=0.0)
            total = tl.load(total_ptrs, mask=at < D, other=0.0)
            tl.store(total_ptrs, total + embedding.to(tl.float32), mask=at < D)
        if next_table_ptr is not None:
            for start in range(0, E, BLOCK):
                at = start + lanes
                embedding = tl.load(next_table_ptr + code * next_table_stride + at, mask=at < E, other=0.0)
                tl.store(next_input_ptr + row * next_input_stride + at, embedding, mask=at < E)


@triton.jit(
    # A number that is 1 or a multiple of 16 must not compile another kernel, nor an `out` that is
    # now an even column, now an odd one.
    do_not_specialize=[
        "codebook",
        "temperature",
        "temperature_stride",
        "top_k",
        "top_k_stride",
        "top_p",
        "top_p_stride",
        "min_p",
        "min_p_stride",
        "out_row_stride",
        "out_codebook_stride",
        "status_row_stride",
        "status_codebook_stride",
        "logprob_row_stride",
        "logprob_codebook_stride",
    ],
    do_not_specialize_on_alignment=[
        "out_ptr",
        "status_ptr",
        "streams_ptr",
        "temperatures_ptr",
        "top_ks_ptr",
        "top_ps_ptr",
        "min_ps_ptr",
        "logprob_ptr",
    ],
)
def _sample_kernel(
    logits_ptr, row_stride, codebook_stride, V, C,
    streams_ptr, codebook,
    temperatures_ptr, temperature_stride, temperature,
    top_ks_ptr, top_k_stride, top_k,
    top_ps_ptr, top_p_stride, top_p,
    min_ps_ptr, min_p_stride, min_p,
    out_ptr, out_row_stride, out_codebook_stride,
    status_ptr, status_row_stride, status_codebook_stride,
    logprob_ptr, logprob_row_stride, logprob_codebook_stride,
    table_ptr, table_stride, D, total_ptr, total_stride,
    next_table_ptr, next_table_stride, E, next_input_ptr, next_input_stride,
    values_ptr, ids_ptr, failed_ptr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, VEC: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, GATHER_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) + tl.program_id(2) * _PLANE
    if c >= C:
        return
    c = c.to(tl.int64)
    out_ptr += row * out_row_stride + c * out_codebook_stride
    if _is_active(streams_ptr, row) == 0:
        tl.store(out_ptr, tl.full([], 0, tl.int64))
        return
    logits_ptr += row * row_stride + c * codebook_stride
    temperature, k, p, min_p, bad = _parameters(
        row, temperatures_ptr, temperature_stride, temperature, top_ks_ptr, top_k_stride, top_k,
        top_ps_ptr, top_p_stride, top_p, min_ps_ptr, min_p_stride, min_p,
    )  # fmt: skip
    greedy = bad | (temperature < _GREEDY_BELOW)
    scale = tl.div_rn(tl.full([], _LOG2E, tl.float32), tl.where(greedy, 1.0, temperature))
    lowest = -_INF
    if MIN_P:
        lowest = tl.where(min_p < _SMALLEST_MIN_P, -_INF, log2(tl.maximum(min_p, _SMALLEST_MIN_P)))
    MASS: tl.constexpr = logprob_ptr is not None
    code, largest, flags, drawn = 0, 0.0, 0, False
    total = tl.full([], 0, tl.int64)
    if TOP_K and BLOCK > 0:
        if (greedy == 0) & (k > 0) & (k <= 32 * GROUPS):
            seed, offset, domain = _stream(streams_ptr, row, codebook + c)
            raw = _raw(logits_ptr, tl.arange(0, BLOCK), V)
            code, largest, total, drawn = narrow.draw(
                logits_ptr, None, raw, k.to(tl.int32), p, lowest, scale, seed, offset, domain,
                TOP_P, MIN_P, MASS, GROUPS, VEC,
            )  # fmt: skip
    if TOP_K and PARTS > 0:
        first = (row * C + c) * PARTS
        failed = tl.full([], 1, tl.int32)
        if (greedy == 0) & (k > 0) & (k <= 32 * GROUPS):
            failed = tl.max(tl.load(failed_ptr + first + tl.arange(0, PARTS)), 0)
        if failed == 0:
            seed, offset, domain = _stream(streams_ptr, row, codebook + c)
            values_ptr += first * (32 * GROUPS)
            raw = tl.load(values_ptr + tl.arange(0, PARTS * 32 * GROUPS))
            code, largest, total, drawn = narrow.draw(
                values_ptr, ids_ptr + first * (32 * GROUPS), raw, k.to(tl.int32), p, lowest, scale,
                seed, offset, domain, TOP_P, MIN_P, MASS, GROUPS, 4,
            )  # fmt: skip
    if drawn == 0:
        # Read again, here and in there, rather than kept in registers past the usual way.
        seed, offset, domain = _stream(streams_ptr, row, codebook + c)
        code, largest, total, flags = _any_row(
            logits_ptr, greedy, scale, k, p, lowest, seed, offset, domain, V,
            TOP_K, TOP_P, MIN_P, MASS, CHUNK, ONE_CHUNK,
        )  # fmt: skip

    tl.store(out_ptr, code.to(tl.int64))
    if status_ptr is not None:
        flags |= tl.where(largest == -_INF, 4, 0) | tl.where(bad, 8, 0)
        tl.store(status_ptr + row * status_row_stride + c * status_codebook_stride, flags)
    if logprob_ptr is not None:
        # A greedy row has no mass: its code was certain.
        logprob = 0.0
        if total > 0:
            value = tl.minimum(tl.load(logits_ptr + code).to(tl.float32), _MAX)
            t = tl.maximum((value - largest) * scale, -_MAX)
            logprob = log_share(t, total)
        tl.store(logprob_ptr + row * logprob_row_stride + c * logprob_codebook_stride, logprob)
    _finish(
        row, code.to(tl.int64), table_ptr, table_stride, D, total_ptr, total_stride,
        next_table_ptr, next_table_stride, E, next_input_ptr, next_input_stride, GATHER_BLOCK,
    )  # fmt: skip


@triton.jit
def _any_row(
    logits_ptr, greedy, scale, k, p, lowest, seed, offset, domain, V,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, MASS: tl.constexpr,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """Any row at all: thresholds over every token, then the noise of every token.

    Returns the code, the largest logit, the mass of what was kept (0 where greedy) and status bits 1 and 2.
    """
    total = tl.full([], 0, tl.int64)
    if ONE_CHUNK:
        ids = tl.arange(0, CHUNK)
        raw, value, live = _load(logits_ptr, ids, V)
        flags = _flags(raw)
        largest, code = _argmax(tl.where(live, value, -_INF), ids, V)
        if greedy == 0:
            t = _tempered(value, live, largest, scale)
            if MIN_P:
                live = live & (t >= lowest)
            keep = _select(value, live, t, k, p, V, TOP_K, TOP_P)
            if MASS:
                total = tl.sum(tl.where(keep, mass(t), 0).to(tl.int64), 0)
            score = tl.where(keep, t + _noise(0, seed, offset, domain, CHUNK), -_INF)
            _, code = _argmax(score, ids, V)
    else:
        largest, code, flags = _wide_greedy(logits_ptr, V, CHUNK)
        if greedy == 0:
            code, total = _wide_draw(
                logits_ptr, largest, scale, k, p, lowest, seed, offset, domain, V,
                TOP_K, TOP_P, MIN_P, MASS, CHUNK,
            )  # fmt: skip
    return code, largest, total, flags


@triton.jit
def _wide_greedy(logits_ptr, V, BLOCK: tl.constexpr):
    largest = tl.full([], -_INF, tl.float32)
    code = tl.full([], 0, tl.int32)
    flags = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        raw, value, live = _load(logits_ptr, ids, V)
        flags |= _flags(raw)
        best, at = _argmax(tl.where(live, value, -_INF), ids, V)
        code = tl.where(best > largest, at, code)
        largest = tl.maximum(largest, best)
    return largest, code, flags


@triton.jit
def _wide_weight(
    logits_ptr, start, at_least, above, largest, scale, lowest, V,
    MASSES: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over a chunk's tokens at or above both keys: of masses, or of ones."""
    ids = start + tl.arange(0, BLOCK)
    _, value, live = _load(logits_ptr, ids, V)
    keys = tl.where(live, order_key(value), 0)
    counted = live & (keys >= at_least) & (keys >= above)
    t = _tempered(value, live, largest, scale)
    if MIN_P:
        counted = counted & (t >= lowest)
    if MASSES:
        weights = mass(t).to(tl.int64)
    else:
        weights = live.to(tl.int64)
    return tl.sum(tl.where(counted, weights, 0), 0)


@triton.jit
def _wide_threshold(
    logits_ptr, target, at_least, largest, scale, lowest, V,
    MASSES: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        bit >>= 1
        total = tl.full([], 0, tl.int64)
        for start in range(0, V, BLOCK):
            total += _wide_weight(
                logits_ptr, start, at_least, candidate, largest, scale, lowest, V, MASSES, MIN_P, BLOCK
            )  # fmt: skip
        threshold = tl.where(total >= target, candidate, threshold)
    return threshold


@triton.jit
def _wide_draw(
    logits_ptr, largest, scale, k, p, lowest, seed, offset, domain, V,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_least = tl.full([], 0, tl.uint32)
    if TOP_K:
        if (k > 0) & (k < V):
            at_least = _wide_threshold(
                logits_ptr, k, at_least, largest, scale, lowest, V, False, MIN_P, BLOCK
            )  # fmt: skip
    if TOP_P:
        if p < 1.0:
            kept = _wide_mass(logits_ptr, at_least, largest, scale, lowest, V, MIN_P, BLOCK)
            bar = _nucleus_bar(kept, p)
            nucleus = _wide_threshold(
                logits_ptr, bar, at_least, largest, scale, lowest, V, True, MIN_P, BLOCK
            )  # fmt: skip
            at_least = tl.maximum(at_least, nucleus)
    total = tl.full([], 0, tl.int64)
    if MASS:
        total = _wide_mass(logits_ptr, at_least, largest, scale, lowest, V, MIN_P, BLOCK)
    best = tl.full([], -_INF, tl.float32)
    code = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, value, live = _load(logits_ptr, ids, V)
        t = _tempered(value, live, largest, scale)
        keep = live & (tl.where(live, order_key(value), 0) >= at_least)
        if MIN_P:
            keep = keep & (t >= lowest)
        score = tl.where(keep, t + _noise(start, seed, offset, domain, BLOCK), -_INF)
        chunk_best, at = _argmax(score, ids, V)
        code = tl.where(chunk_best > best, at, code)
        best = tl.maximum(best, chunk_best)
    return code, total


@triton.jit
def _wide_mass(logits_ptr, at_least, largest, scale, lowest, V, MIN_P: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.full([], 0, tl.int64)
    for start in range(0, V, BLOCK):
        total += _wide_weight(
            logits_ptr, start, at_least, at_least, largest, scale, lowest, V, True, MIN_P, BLOCK
        )  # fmt: skip
    return total


@triton.jit(
    do_not_specialize=["top_k", "top_k_stride"],
    do_not_specialize_on_alignment=["streams_ptr", "top_ks_ptr"],
)
def _split_kernel(
    logits_ptr, row_stride, codebook_stride, V, C, streams_ptr, top_ks_ptr, top_k_stride, top_k,
    values_ptr, ids_ptr, failed_ptr,
    PARTS: tl.constexpr, PART: tl.constexpr, VEC: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The candidates of one part of a row whose vocabulary is too wide for one program."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = tl.program_id(2).to(tl.int64)
    if _is_active(streams_ptr, row) == 0:
        return
    if top_ks_ptr is not None:
        k = tl.load(top_ks_ptr + row * top_k_stride).to(tl.int64)
    else:
        k = tl.full([], top_k, tl.int64)
    if (k <= 0) | (k > 32 * GROUPS):
        return
    start = part * PART
    logits_ptr += row * row_stride + c * codebook_stride + start
    raw = _raw(logits_ptr, tl.arange(0, PART), V - start)
    place = (row * C + c) * PARTS + part
    narrow.store_candidates(
        logits_ptr, start, raw, k.to(tl.int32), values_ptr + place * (32 * GROUPS),
        ids_ptr + place * (32 * GROUPS), failed_ptr + place, GROUPS, VEC,
    )  # fmt: skip


INTERPRETED = not isinstance(_sample_kernel, triton.runtime.JITFunction)
"""TRITON_INTERPRET=1 was set when this module was imported: the kernel then runs on CPU tensors."""


def launch_parameters(vocabulary: int, itemsize: int, hip: bool = False) -> dict[str, int | bool]:
    """How a vocabulary of logits with so many bytes each is laid out; the same for every batch.

    128 threads a row: each of a multiprocessor's four schedulers has one warp of it, and each thread has one
    candidate. ``bench/NOTES.md`` has the counts of other choices.
    """
    block = triton.next_power_of_2(vocabulary)
    chunk = min(max(block, 64), 2048)
    return {
        "BLOCK": max(block, 1024) if vocabulary <= ONE_BLOCK else 0,
        "VEC": 16 // itemsize,
        "GROUPS": SLOTS // 32,
        "CHUNK": chunk,
        "ONE_CHUNK": block <= chunk,
        "GATHER_BLOCK": 1024,
        "num_warps": 2 if hip else 4,
        "enable_fp_fusion": False,
    }


def parts_of(vocabulary: int) -> int:
    """Over how many programs a row is split to find top-k's candidates; 0: it is not."""
    if not ONE_BLOCK < vocabulary <= SPLIT_BLOCK:
        return 0
    return max(triton.next_power_of_2(triton.cdiv(vocabulary, PART)), 8)


def _scratch(parts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts' candidates, logits and token ids, and which parts have failed."""
    values = torch.empty(parts * SLOTS, dtype=torch.float32, device=device)
    ids = torch.empty(parts * SLOTS, dtype=torch.int32, device=device)
    return values, ids, torch.empty(parts, dtype=torch.int32, device=device)


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
    """Launches the kernel on the logits' device; see ``sampling.sample``. Two launches where V is split."""
    B, C, V = logits.shape
    parameters = launch_parameters(V, logits.element_size(), torch.version.hip is not None)
    parts = parts_of(V) if C <= PLANE and (top_ks is not None or 0 < top_k <= SLOTS) else 0
    values = ids = failed = None
    if parts:
        values, ids, failed = _scratch(B * C * parts, logits.device)
        _split_kernel[(B, parts, C)](
            logits, logits.stride(0), logits.stride(1), V, C,
            streams, top_ks, 0 if top_ks is None else top_ks.stride(0), top_k,
            values, ids, failed, PARTS=parts, PART=PART,
            **{name: parameters[name] for name in ("VEC", "GROUPS", "num_warps", "enable_fp_fusion")},
        )  # fmt: skip
    _sample_kernel[(B, min(C, PLANE), triton.cdiv(C, PLANE))](
        logits, logits.stride(0), logits.stride(1), V, C,
        streams, codebook,
        temperatures, 0 if temperatures is None else temperatures.stride(0), temperature,
        top_ks, 0 if top_ks is None else top_ks.stride(0), top_k,
        top_ps, 0 if top_ps is None else top_ps.stride(0), top_p,
        min_ps, 0 if min_ps is None else min_ps.stride(0), min_p,
        out, out.stride(0), out.stride(1),
        status, 0 if status is None else status.stride(0), 0 if status is None else status.stride(1),
        logprob, 0 if logprob is None else logprob.stride(0), 0 if logprob is None else logprob.stride(1),
        table, 0 if table is None else table.stride(0), 0 if table is None else table.shape[1],
        total, 0 if total is None else total.stride(0),
        next_table, 0 if next_table is None else next_table.stride(0),
        0 if next_table is None else next_table.shape[1],
        next_input, 0 if next_input is None else next_input.stride(0),
        values, ids, failed,
        TOP_K=top_ks is not None or 0 < top_k < V, TOP_P=top_ps is not None or top_p < 1.0,
        MIN_P=min_ps is not None or min_p > 0.0,
        PARTS=parts,
        **parameters,
    )  # fmt: skip
