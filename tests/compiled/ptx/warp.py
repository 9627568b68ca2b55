"""Instructions in which the lanes of a warp meet, as functions of arrays [threads], a multiple of 32."""

import numpy as np

from .formats import HALVES, numbers

LANES = 32


def ballot(mask):
    """bool [T] -> uint32 [T / 32]"""
    powers = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
    return (mask.reshape(-1, LANES) * powers).sum(1).astype(np.uint32)


def partner(mode: str, lane, amount, clamp):
    """shfl: the lane that each reads (its own where that is outside), and whether it is inside."""
    segment = (clamp >> 8) & 31
    limit = (lane & segment) | (clamp & 31 & ~segment)
    amount = amount & 31
    source = {
        "up": lane - amount,
        "down": lane + amount,
        "bfly": lane ^ amount,
        "idx": (lane & segment) | (amount & ~segment),
    }[mode]
    inside = source >= limit if mode == "up" else source <= limit
    return np.where(inside, source, lane), inside


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduced(how: str, values, here, propagate_nan: bool = False):
    """[T] numbers -> [T / 32]: over the lanes that are here, at least one a warp that matters."""
    table = values.reshape(-1, LANES)
    if values.dtype.kind == "f":
        nan = np.isnan(table) & here.reshape(-1, LANES)
        rest = np.inf if how == "min" else -np.inf
        used = here.reshape(-1, LANES) & ~np.isnan(table)
        result = REDUCTIONS[how].reduce(np.where(used, table, values.dtype.type(rest)), axis=1)
        wrong = nan.any(1) if propagate_nan else ~used.any(1)
        return np.where(wrong, values.dtype.type(np.nan), result)
    if how in ("min", "max"):
        limits = np.iinfo(values.dtype)
        rest = limits.max if how == "min" else limits.min
    else:
        rest = ~values.dtype.type(0) if how == "and" else 0
    table = np.where(here.reshape(-1, LANES), table, values.dtype.type(rest))
    return REDUCTIONS[how].reduce(table, axis=1, dtype=values.dtype)


def equal_lanes(values, here):
    """match.any: uint32 [T], the lanes that are here and hold the same value."""
    table = values.reshape(-1, LANES)
    same = (table[:, :, None] == table[:, None, :]) & here.reshape(-1, 1, LANES)
    return ballot(same.reshape(-1))


def matrix_rows(lane, trans: bool):
    """ldmatrix: row and column of the two elements of each lane's register, [T] each."""
    major, minor = lane // 4, lane % 4 * 2
    return ((minor, major), (minor + 1, major)) if trans else ((major, minor), (major, minor + 1))


def multiply(a, b, c, kind: str, depth: int):
    """mma.sync m16n8: lists of uint32 [T] registers -> four float32 [T]. The order of the sums is
    hardware's own.

    kind: f16, bf16 (depth 8 or 16) or tf32 (depth 4 or 8).
    """
    lane = np.arange(LANES)
    row, column = lane // 4, lane % 4
    warps = len(c[0]) // LANES
    left, right, sums = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8)), np.zeros((warps, 16, 8))
    packed = 2 if kind in HALVES else 1
    for r, register in enumerate(a):
        for half in range(packed):
            at = row + 8 * (r % 2), packed * column + half + depth // 2 * (r // 2)
            if len(a) == 2:
                at = row + 8 * r, packed * column + half
            left[:, at[0], at[1]] = _element(register, half, kind)
    for r, register in enumerate(b):
        for half in range(packed):
            at = packed * column + half + depth // len(b) * r, row
            right[:, at[0], at[1]] = _element(register, half, kind)
    for r, register in enumerate(c):
        sums[:, row + 8 * (r // 2), 2 * column + r % 2] = numbers(register, "f32").reshape(-1, LANES)
    result = (left @ right + sums).astype(np.float32)
    return [result[:, row + 8 * (r // 2), 2 * column + r % 2].reshape(-1) for r in range(4)]


def _element(register, half: int, kind: str):
    if kind == "tf32":  # 10 bits of the significand count
        return numbers(register & np.uint32(0xFFFFE000), "f32").reshape(-1, LANES)
    return numbers((register >> np.uint32(16 * half)).astype(np.uint16), kind).reshape(-1, LANES)
