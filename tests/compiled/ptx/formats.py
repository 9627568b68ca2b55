"""PTX's types: registers hold bits as unsigned integers, arithmetic sees numbers."""

import re
from functools import cache

import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOATS = {4: np.float32, 8: np.float64}
HALVES = ("f16", "bf16")
CANONICAL_NAN = {"f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}


@cache
def size(kind: str) -> int:
    """Bytes of a type, a pair's (x2) included."""
    bits, pair = re.fullmatch(r"[a-z]+(\d+)(x2)?", kind).groups()
    return int(bits) // 8 * (2 if pair else 1)


@cache
def is_float(kind: str) -> bool:
    return kind in CANONICAL_NAN


@cache
def is_signed(kind: str) -> bool:
    return kind.startswith("s")


def numbers(bits, kind: str):
    """Unsigned bits as numbers of a type; 16-bit floats as float64, in which they are exact."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    if is_float(kind):
        return bits.view(FLOATS[size(kind)])
    return bits.view(SIGNED[size(kind)]) if is_signed(kind) else bits


def bits_of(values, kind: str):
    """Numbers as unsigned bits of a type: integers modulo 2^n, floats to nearest even, NaN the canonical
    one."""
    values = np.asarray(values)
    if kind == "pred":
        return values
    if not is_float(kind):
        return values.astype((SIGNED if is_signed(kind) else UNSIGNED)[size(kind)]).view(UNSIGNED[size(kind)])
    if kind == "bf16":
        narrow = to_odd(values, np.float32).view(np.uint32)
        narrow = narrow + (np.uint32(0x7FFF) + ((narrow >> np.uint32(16)) & np.uint32(1)))
        bits = (narrow >> np.uint32(16)).astype(np.uint16)
    elif kind == "f16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        bits = values.astype(FLOATS[size(kind)], copy=False).view(UNSIGNED[size(kind)])
    nan = values != values
    return np.where(nan, bits.dtype.type(CANONICAL_NAN[kind]), bits) if nan.any() else bits


def to_odd(values, dtype):
    """Floats narrowed by rounding to odd: another rounding, to fewer bits yet, then gives what one alone
    would."""
    near = values.astype(dtype)
    if near.dtype == values.dtype:
        return near
    bits = near.view({4: np.int32, 8: np.int64}[near.itemsize])
    back = near.astype(values.dtype)
    too_far = (np.abs(back) > np.abs(values)).astype(bits.dtype)
    inexact = (back != values) & np.isfinite(values)
    return np.where(inexact, (bits - too_far) | 1, bits).astype(bits.dtype).view(near.dtype)
