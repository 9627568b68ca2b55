"""What an instruction computes, as a function of arrays: no register, no thread, no memory.

`operation` gives it for every opcode that works on each thread's own registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from .errors import UnknownInstruction
from .formats import HALVES, SIGNED, UNSIGNED, bits_of, is_float, is_signed, numbers, size


@dataclass(frozen=True)
class Operation:
    """function: numbers of the types `sources` (predicates as booleans) -> numbers of the type `result`."""

    sources: tuple[str, ...]
    result: str
    function: Callable
    free: bool = False  # hardware may give other bits: approximate functions, and what may be contracted


@cache
def operation(opcode: str, count: int) -> Operation:
    """count: operands besides the result. Raises `UnknownInstruction`."""
    root, *rest = opcode.split(".")
    build = BUILDERS.get(root)
    found = build(root, rest, count) if build and rest else None
    if found is None or len(found.sources) != count:
        raise UnknownInstruction(opcode)
    return found


def _pairs(inner: Operation, kind: str) -> Operation:
    """The operation on both halves of each register."""
    half = size(kind) // 2
    shifts = UNSIGNED[2 * half](0), UNSIGNED[2 * half](8 * half)

    def function(*values):
        results = []
        for shift in shifts:
            halves = ((v >> shift).astype(UNSIGNED[half]) for v in values)
            result = inner.function(*(numbers(h, s) for h, s in zip(halves, inner.sources, strict=True)))
            results.append(bits_of(result, inner.result).astype(UNSIGNED[2 * half]) << shift)
        return results[0] | results[1]

    wide = f"b{16 * half}"
    return Operation((wide,) * len(inner.sources), wide, function, inner.free)


def fused(a, b, c):
    """a * b + c as float64, rounded to odd: to be rounded once more, to fewer bits.

    Of 24-bit (or shorter) significands the product is exact.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64)


FLOAT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fused,
}
SHORT_FLOAT = {  # of 16-bit operands, rounded once
    "add": lambda a, b: fused(a, np.ones_like(a), b),
    "sub": lambda a, b: fused(a, np.ones_like(a), -b),
    "mul": lambda a, b: a * b,
    "fma": fused,
}


def _sum(root, rest, count):
    *modes, kind = rest
    if kind.endswith("x2"):
        inner = _sum(root, [*modes, kind[:-2]], count)
        return inner and _pairs(inner, kind)
    if root == "mul" and not is_float(kind):
        return _product(root, rest, count)
    if len(modes) == 2 and modes[0] == "rn" and modes[1] == "f32" and kind in HALVES:
        # Mixed: what is short is widened first, and the last operand is float32.
        return Operation((kind,) * (count - 1) + ("f32",), "f32", FLOAT[root])
    if not is_float(kind):
        return Operation((kind,) * count, kind, FLOAT[root]) if not modes and root != "fma" else None
    if modes not in ([], ["rn"]) or (root == "fma" and (kind == "f64" or not modes)):
        return None
    functions = SHORT_FLOAT if kind in HALVES else FLOAT
    # Without .rn a product and a sum may become one instruction.
    return Operation((kind,) * count, kind, functions[root], free=modes == [])


def _product(root, rest, count):
    if len(rest) != 2 or rest[0] not in ("lo", "hi", "wide"):
        return None
    mode, kind = rest
    n = size(kind)
    result = f"{kind[0]}{16 * n}" if mode == "wide" else kind
    wide = (SIGNED if is_signed(kind) else UNSIGNED).get(2 * n)
    if mode == "wide" and wide is None:
        return None

    def function(a, b, *c):
        if mode == "lo":
            product = a * b
        elif mode == "wide":
            product = a.astype(wide) * b.astype(wide)
        elif wide:
            product = ((a.astype(wide) * b.astype(wide)) >> wide(8 * n)).astype(a.dtype)
        else:
            product = _high_64(a, b)
        return product + c[0] if c else product

    return Operation((kind, kind, result)[:count], result, function)


def _high_64(a, b):
    a, b = np.broadcast_arrays(a, b)
    high = [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(a.ravel(), b.ravel(), strict=True)]
    return np.array(high, np.uint64).view(a.dtype).reshape(a.shape)


def _quotient(root, rest, count):
    kind = rest[-1]
    if is_float(kind):
        if root == "div" and rest[:-1] in (["rn"], ["full"], ["approx"], ["full", "ftz"]) and kind == "f32":
            return Operation((kind, kind), kind, lambda a, b: a / b, free=rest[0] != "rn")
        return None
    if len(rest) != 1:
        return None

    def function(a, b):
        zero = b == 0
        divisor = np.where(zero, b.dtype.type(1), b)
        quotient = a // divisor
        remainder = a - quotient * divisor
        if is_signed(kind):  # towards zero
            up = ((remainder != 0) & ((a < 0) != (divisor < 0))).astype(a.dtype)
            quotient, remainder = quotient + up, remainder - up * divisor
        all_ones = np.invert(b.dtype.type(0))
        return np.where(zero, all_ones, quotient if root == "div" else remainder)

    return Operation((kind, kind), kind, function)


def _sign(root, rest, count):
    if len(rest) != 1 or (rest[0][0] == "b" and rest[0] not in HALVES):
        return None
    return Operation((rest[0],), rest[0], np.abs if root == "abs" else np.negative)


def _extreme(root, rest, count):
    *modes, kind = rest
    if kind.endswith("x2"):
        inner = _extreme(root, [*modes, kind[:-2]], count)
        return inner and _pairs(inner, kind)
    if not is_float(kind):
        pick = np.maximum if root == "max" else np.minimum
        return None if modes else Operation((kind,) * count, kind, pick)
    if modes not in ([], ["NaN"]):
        return None

    def two(a, b):
        a, b = np.broadcast_arrays(a, b)
        # +0 is larger than -0.
        smaller = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
        best = np.where(smaller == (root == "max"), b, a)
        nan_a, nan_b = a != a, b != b
        if modes:
            return np.where(nan_a | nan_b, a.dtype.type(np.nan), best)
        return np.where(nan_a, b, np.where(nan_b, a, best))

    function = two if count == 2 else lambda a, b, c: two(two(a, b), c)
    return Operation((kind,) * count, kind, function)


APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _function(root, rest, count):
    kind = rest[-1]
    if kind != "f32":
        return None
    exact = root in ("rcp", "sqrt") and rest[:-1] == ["rn"]
    return Operation((kind,), kind, lambda x: APPROXIMATE[root](x.astype(np.float64)), free=not exact)


LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}


def _logic(root, rest, count):
    return Operation((rest[0],) * count, rest[0], LOGIC[root]) if len(rest) == 1 else None


def shifted(a, amount, left: bool):
    """Amounts at or past the width shift everything out; a's type says what comes in from the left."""
    bits = 8 * a.dtype.itemsize
    amount = np.asarray(amount)
    past = amount >= bits
    amount = np.minimum(amount, bits - 1).astype(a.dtype)
    if left:
        return np.where(past, a.dtype.type(0), a << amount)
    rest = a >> a.dtype.type(bits - 1) if a.dtype.kind == "i" else a.dtype.type(0)
    return np.where(past, rest, a >> amount)


def _shift(root, rest, count):
    if len(rest) != 1:
        return None
    return Operation((rest[0], "u32"), rest[0], lambda a, n: shifted(a, n, root == "shl"))


def _funnel(root, rest, count):
    if rest not in (["l", "wrap", "b32"], ["r", "wrap", "b32"], ["l", "clamp", "b32"], ["r", "clamp", "b32"]):
        return None

    def function(low, high, amount):
        amount = np.minimum(amount, np.uint32(32)) if rest[1] == "clamp" else amount & np.uint32(31)
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        amount = amount.astype(np.uint64)
        return (both << amount) >> np.uint64(32) if rest[0] == "l" else both >> amount

    return Operation(("b32",) * 3, "b32", function)


def _ones(n):
    """n low bits set, as uint64."""
    return shifted(np.ones_like(n, np.uint64), n, True) - np.uint64(1)


def _extract(root, rest, count):
    kind = rest[-1]
    if len(rest) != 1:
        return None
    bits = 8 * size(kind)

    def function(a, start, length):
        start, length = start & np.uint32(255), length & np.uint32(255)
        value = shifted(a.view(UNSIGNED[size(kind)]).astype(np.uint64), start, False) & _ones(length)
        if not is_signed(kind):
            return value
        last = np.minimum(start + length - np.uint32(1), np.uint32(bits - 1))
        raw = a.view(UNSIGNED[size(kind)]).astype(np.uint64)
        negative = (length > 0) & (shifted(raw, last, False) & np.uint64(1) == 1)
        held = np.minimum(length, np.maximum(np.int64(bits) - start, 0).astype(np.uint32))
        return np.where(negative, value | ~_ones(held), value)

    return Operation((kind, "u32", "u32"), f"b{bits}", function)


def _insert(root, rest, count):
    if len(rest) != 1:
        return None

    def function(a, into, start, length):
        start, length = start & np.uint32(255), length & np.uint32(255)
        mask = shifted(_ones(length), start, True)
        return (into.astype(np.uint64) & ~mask) | (shifted(a.astype(np.uint64), start, True) & mask)

    return Operation((rest[0], rest[0], "u32", "u32"), rest[0], function)


def _permute(root, rest, count):
    if rest != ["b32"]:
        return None

    def function(a, b, selector):
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        result = np.uint32(0)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = (both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7) == 1, np.uint64(255), np.uint64(0))
            byte = np.where(choice & np.uint32(8) != 0, sign, byte)
            result = result | (byte.astype(np.uint32) << np.uint32(8 * i))
        return result

    return Operation(("b32",) * 3, "b32", function)


def _lookup(root, rest, count):
    """lop3: the table is the last operand."""
    if rest != ["b32"]:
        return None

    def function(a, b, c, table):
        table = int(np.asarray(table).ravel()[0])
        result = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                terms = (x if row >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c)))
                result = result | np.bitwise_and.reduce(np.broadcast_arrays(*terms))
        return result

    return Operation(("b32", "b32", "b32", "u32"), "b32", function)


def _highest(x):
    """Index of the highest bit set, -1 for none."""
    result = np.full(np.shape(x), -1, np.int64)
    for bit in range(8 * x.dtype.itemsize):
        result = np.where((x >> x.dtype.type(bit)) & x.dtype.type(1) == 1, bit, result)
    return result


def _bit_count(root, rest, count):
    kind = rest[-1]
    if len(rest) != 1 or kind[0] == "s":
        return None
    bits = 8 * size(kind)
    if root == "brev":

        def reverse(x):
            one = x.dtype.type(1)
            return sum(((x >> x.dtype.type(i)) & one) << x.dtype.type(bits - 1 - i) for i in range(bits))

        return Operation((kind,), kind, reverse)
    functions = {"popc": np.bitwise_count, "clz": lambda x: bits - 1 - _highest(x), "bfind": _highest}
    return Operation((kind,), "u32", functions[root])


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(how: str, kind: str) -> Callable | None:
    if not is_float(kind):
        how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
        return COMPARISONS.get(how)
    if how in ("nan", "num"):
        return lambda a, b: ((a != a) | (b != b)) == (how == "nan")
    compare = COMPARISONS.get(how[:2])
    if compare is None or how[2:] not in ("", "u"):
        return None
    if how[2:]:
        return lambda a, b: compare(a, b) | (a != a) | (b != b)
    return lambda a, b: compare(a, b) & (a == a) & (b == b)


def _set_predicate(root, rest, count):
    """The first result; the second (p|q) joins the contrary, see `complement`."""
    how, *join, kind = rest
    compare = comparison(how, kind) if not kind.endswith("x2") else None
    if compare is None or len(join) > 1 or (join and join[0] not in JOINS):
        return None
    if not join:
        return Operation((kind, kind), "pred", compare)
    return Operation((kind, kind, "pred"), "pred", lambda a, b, p: JOINS[join[0]](compare(a, b), p))


def complement(opcode: str, count: int) -> Operation:
    """What setp writes to q in p|q."""
    _, how, *join, kind = opcode.split(".")
    compare = comparison(how, kind)
    if not join:
        return Operation((kind, kind), "pred", lambda a, b: ~compare(a, b))
    return Operation((kind, kind, "pred"), "pred", lambda a, b, p: JOINS[join[0]](~compare(a, b), p))


def _select(root, rest, count):
    if len(rest) != 1:
        return None
    kind = f"b{8 * size(rest[0])}"  # bits are moved, not numbers
    return Operation((kind, kind, "pred"), kind, lambda a, b, p: np.where(p, a, b))


def _move(root, rest, count):
    if len(rest) != 1:
        return None
    kind = "pred" if rest[0] == "pred" else f"b{8 * size(rest[0])}"
    return Operation((kind,), kind, lambda x: x)


ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _convert(root, rest, count):
    if len(rest) < 2:
        return None
    *modes, to, of = rest
    if count == 2:
        if modes != ["rn"] or of != "f32" or to not in ("bf16x2", "f16x2"):
            return None

        def pack(high, low):
            high, low = (bits_of(x, to[:-2]).astype(np.uint32) for x in (high, low))
            return (high << np.uint32(16)) | low

        return Operation((of, of), "b32", pack)
    if (to[0] == "b" and to not in HALVES) or to.endswith("x2"):
        return None
    if is_float(to) and is_float(of):
        if to == of and len(modes) == 1 and modes[0] in ROUND:
            return Operation((of,), to, ROUND[modes[0]])
        widens = size(to) > size(of) and not modes
        narrows = size(to) < size(of) and modes == ["rn"]
        return Operation((of,), to, lambda x: x) if widens or narrows else None
    if is_float(of):
        return (
            Operation((of,), to, _to_integer(to, of, modes[0]))
            if len(modes) == 1 and modes[0] in ROUND
            else None
        )
    if is_float(to):
        if modes != ["rn"] or to in HALVES:
            return None
        return Operation((of,), to, lambda x: x.astype({4: np.float32, 8: np.float64}[size(to)]))
    return Operation((of,), to, lambda x: x) if not modes else None


def _to_integer(to, of, mode):
    """Saturates; NaN is 0, or the top bit alone where either side has 64 bits."""
    limits = np.iinfo((SIGNED if is_signed(to) else UNSIGNED)[size(to)])
    wide = 8 in (size(to), size(of))
    of_nan = limits.dtype.type(0)
    if wide:
        of_nan = np.array(1 << (8 * size(to) - 1), UNSIGNED[size(to)]).view(limits.dtype)[()]

    def function(x):
        x = ROUND[mode](x.astype(np.float64))
        low, high, nan = x <= float(limits.min), x >= float(limits.max), x != x
        inside = np.where(low | high | nan, 0, x).astype(limits.dtype)
        result = np.where(
            low, limits.dtype.type(limits.min), np.where(high, limits.dtype.type(limits.max), inside)
        )
        return np.where(nan, of_nan, result)

    return function


BUILDERS = (
    dict.fromkeys(("add", "sub", "mul", "fma"), _sum)
    | dict.fromkeys(("mad",), _product)
    | dict.fromkeys(("div", "rem"), _quotient)
    | dict.fromkeys(("abs", "neg"), _sign)
    | dict.fromkeys(("min", "max"), _extreme)
    | dict.fromkeys(APPROXIMATE, _function)
    | dict.fromkeys(LOGIC, _logic)
    | dict.fromkeys(("shl", "shr"), _shift)
    | dict.fromkeys(("popc", "clz", "bfind", "brev"), _bit_count)
    | {
        "shf": _funnel,
        "bfe": _extract,
        "bfi": _insert,
        "prmt": _permute,
        "lop3": _lookup,
        "setp": _set_predicate,
        "selp": _select,
        "mov": _move,
        "cvt": _convert,
    }
)
