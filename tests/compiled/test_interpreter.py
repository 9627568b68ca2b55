"""The PTX interpreter against Python's integers and fractions, and programs that it must refuse."""

import random
import struct
from fractions import Fraction

import numpy as np
import pytest
from ptx import Fault, GlobalMemory, Program, UnknownInstruction, run

KINDS = {16: np.uint16, 32: np.uint32, 64: np.uint64}
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 31, 32, 33, 255, 0x7F800000, 0x7FC00000, 0xFF800000, 0x80000001]
EDGES += [0x3F800000, 0x7F7FFFFF, 0x00800000, 0xBF000000]


def words(count: int, seed: int, edges: bool = True, bits: int = 32) -> list[int]:
    draw = random.Random(seed)
    edge = EDGES if edges else []
    return [
        draw.choice(edge) if edge and draw.random() < 0.4 else draw.getrandbits(bits) for _ in range(count)
    ]


def floats(count: int, seed: int, low: int = -60, high: int = 60) -> list[int]:
    """Bits of finite float32."""
    draw = random.Random(seed)
    return [bits(float(np.float32(draw.gauss(0, 1) * 2.0 ** draw.randint(low, high)))) for _ in range(count)]


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def value(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def is_nan(word: int) -> bool:
    return value(word) != value(word)


def signed(word: int, n: int = 32) -> int:
    return word - (1 << n) if word >> (n - 1) else word


def execute(
    body: str, *inputs: list[int], out_bits: int = 32, in_bits: int = 32, shared: int = 0, order=None
):
    """Runs `body` in one thread an element, inputs in %a, %b, %c; returns %d of each and the counts."""
    names = "abc"[: len(inputs)]
    count = len(inputs[0])
    parameters = ",\n".join(f".param .u64 p{i}" for i in range(len(inputs) + 1))
    text = f".visible .entry k({parameters})\n.reqntid {count}\n{{\n"
    text += (
        ".reg .pred %p<5>; .reg .b16 %h<5>; .reg .b32 %x<9>; .reg .b64 %y<9>; .reg .b32 %t; .reg .b64 %ad;\n"
    )
    text += f".reg .b{out_bits} %d;\n" + "".join(f".reg .b{in_bits} %{name};\n" for name in names)
    text += "mov.u32 %t, %tid.x;\n"
    for i, name in enumerate(names):
        text += f"ld.param.b64 %y0, [p{i}];\nmad.wide.u32 %ad, %t, {in_bits // 8}, %y0;\n"
        text += f"ld.global.b{in_bits} %{name}, [%ad];\n"
    text += f"{body}\nld.param.b64 %y0, [p{len(inputs)}];\nmad.wide.u32 %ad, %t, {out_bits // 8}, %y0;\n"
    text += f"st.global.b{out_bits} [%ad], %d;\nret;\n}}\n"
    memory, result = GlobalMemory(), np.zeros(count, KINDS[out_bits])
    arguments = [memory.add(np.array(column, KINDS[in_bits])) for column in inputs]
    arguments.append(memory.add(result, False))
    counts, _ = run(Program(text), (1,), arguments, memory, shared, order)
    return result.tolist(), counts


def agree(body, function, *inputs, out_bits=32, in_bits=32):
    got, _ = execute(body, *inputs, out_bits=out_bits, in_bits=in_bits)
    wanted = [int(function(*row)) & ((1 << out_bits) - 1) for row in zip(*inputs, strict=True)]
    wrong = [(row, g, w) for row, g, w in zip(zip(*inputs, strict=True), got, wanted, strict=True) if g != w]
    assert not wrong, (body, len(wrong), wrong[0])


N = 256
A, B, C = words(N, 1), words(N, 2), words(N, 3)
SMALL = [w % 40 for w in words(N, 4, edges=False)]


def funnel(low, high, amount, left):
    both = high << 32 | low
    return both << amount >> 32 if left else both >> amount


def extract(x, start, length, sign):
    start, length = start & 255, length & 255
    top = (x >> min(start + length - 1, 31)) & 1 if sign and length else 0
    return sum((((x >> (start + i)) & 1) if i < length and start + i < 32 else top) << i for i in range(32))


def insert(x, into, start, length):
    for i in range(length & 255):
        if (start & 255) + i < 32:
            into = into & ~(1 << (start + i)) | ((x >> i) & 1) << (start + i)
    return into


def permute(x, y, selector):
    both, result = y << 32 | x, 0
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = both >> 8 * (choice & 7) & 255
        result |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * i
    return result


INTEGERS = {
    "mul.hi.u32 %d, %a, %b;": lambda x, y, z: x * y >> 32,
    "mul.hi.s32 %d, %a, %b;": lambda x, y, z: signed(x) * signed(y) >> 32,
    "mul.lo.s32 %d, %a, %b;": lambda x, y, z: x * y,
    "mad.lo.s32 %d, %a, %b, %c;": lambda x, y, z: x * y + z,
    "sub.s32 %d, %a, %b;": lambda x, y, z: x - y,
    "neg.s32 %d, %a;": lambda x, y, z: -x,
    "min.s32 %d, %a, %b;": lambda x, y, z: min(signed(x), signed(y)),
    "max.u32 %d, %a, %b;": lambda x, y, z: max(x, y),
    "not.b32 %d, %a;": lambda x, y, z: ~x,
    "popc.b32 %d, %a;": lambda x, y, z: x.bit_count(),
    "clz.b32 %d, %a;": lambda x, y, z: 32 - x.bit_length(),
    "bfind.u32 %d, %a;": lambda x, y, z: x.bit_length() - 1,
    "brev.b32 %d, %a;": lambda x, y, z: int(f"{x:032b}"[::-1], 2),
    "shl.b32 %d, %a, %b;": lambda x, y, z: x << y if y < 32 else 0,
    "shr.s32 %d, %a, %b;": lambda x, y, z: signed(x) >> min(y, 31),
    "shr.u32 %d, %a, %b;": lambda x, y, z: x >> y if y < 32 else 0,
    "shf.l.wrap.b32 %d, %a, %b, %c;": lambda x, y, z: funnel(x, y, z & 31, True),
    "shf.r.clamp.b32 %d, %a, %b, %c;": lambda x, y, z: funnel(x, y, min(z, 32), False),
    "prmt.b32 %d, %a, %b, %c;": permute,
    "lop3.b32 %d, %a, %b, %c, 0xCA;": lambda x, y, z: x & y | ~x & z,
    "add.s16x2 %d, %a, %b;": lambda x, y, z: (x + y & 0xFFFF) | ((x >> 16) + (y >> 16) & 0xFFFF) << 16,
    "cvt.u16.u32 %h1, %a; cvt.s32.s8 %d, %h1;": lambda x, y, z: signed(x & 255, 8),
    "cvt.u16.u32 %h1, %a; cvt.s16.s8 %h2, %h1; cvt.s32.s16 %d, %h2;": lambda x, y, z: signed(x & 255, 8),
    "mov.b64 %y1, {%a, %b}; shr.u64 %y1, %y1, 16; cvt.u32.u64 %d, %y1;": lambda x, y, z: (y << 32 | x) >> 16,
    "setp.lt.s32 %p1, %a, %b; selp.b32 %d, %a, %c, %p1;": lambda x, y, z: x if signed(x) < signed(y) else z,
    "setp.ge.u32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;": lambda x, y, z: x >= y,
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    agree(body, INTEGERS[body], A, B, C)


def test_integers_of_several_widths():
    agree("mul.wide.s32 %d, %a, %b;", lambda x, y: signed(x) * signed(y), A, B, out_bits=64)
    wide = words(N, 5, False, 64), words(N, 6, False, 64)
    agree("mul.hi.u64 %d, %a, %b;", lambda x, y: x * y >> 64, *wide, out_bits=64, in_bits=64)
    agree(
        "max.s64 %d, %a, %b;", lambda x, y: max(signed(x, 64), signed(y, 64)), *wide, out_bits=64, in_bits=64
    )
    shifts = SMALL, SMALL[::-1]
    agree("bfe.u32 %d, %a, %b, %c;", lambda x, s, n: extract(x, s, n, False), A, *shifts)
    agree("bfe.s32 %d, %a, %b, %c;", lambda x, s, n: extract(x, s, n, True), A, *shifts)
    agree("bfi.b32 %d, %a, 0xA5A5A5A5, %b, %c;", lambda x, s, n: insert(x, 0xA5A5A5A5, s, n), A, *shifts)
    divisors = [b or 7 for b in B]
    agree("div.s32 %d, %a, %b;", lambda x, y: int(Fraction(signed(x), signed(y))), A, divisors)
    agree("rem.u32 %d, %a, %b;", lambda x, y: x % y, A, divisors)
    both = "setp.eq.b32 %p3, %c, 0; setp.lt.and.s32 %p1|%p2, %a, %b, %p3; selp.b32 %x1, 1, 0, %p1;"
    agree(
        f"{both} selp.b32 %x2, 2, 0, %p2; or.b32 %d, %x1, %x2;",
        lambda x, y, z: (1 if signed(x) < signed(y) else 2) if z == 0 else 0,
        A, B, [c if c & 1 else 0 for c in C],
    )  # fmt: skip


def rounded(x: Fraction, digits: int = 24, smallest: int = -126) -> Fraction:
    """To nearest even, of a significand with so many digits."""
    if x == 0:
        return x
    exponent = smallest
    while Fraction(2) ** (exponent + 1) <= abs(x):
        exponent += 1
    unit = Fraction(2) ** (exponent - digits + 1)
    return round(x / unit) * unit  # Python rounds a half to even


def to_float32(x: Fraction) -> int:
    return bits(float(rounded(x)))


def fraction(word: int) -> Fraction:
    return Fraction(value(word))


FA, FB, FC = floats(N, 7), floats(N, 8), floats(N, 9)
CANCELLING = [
    bits(-value(a) * value(b)) if i % 2 else c for i, (a, b, c) in enumerate(zip(FA, FB, FC, strict=True))
]
TINY = floats(N, 10, -145, -100)
FLOATS = {
    "add.rn.f32 %d, %a, %b;": lambda x, y, z: x + y,
    "sub.rn.f32 %d, %a, %b;": lambda x, y, z: x - y,
    "mul.rn.f32 %d, %a, %b;": lambda x, y, z: x * y,
    "div.rn.f32 %d, %a, %b;": lambda x, y, z: x / y,
    "fma.rn.f32 %d, %a, %b, %c;": lambda x, y, z: x * y + z,
}


@pytest.mark.parametrize("body", FLOATS)
@pytest.mark.parametrize("inputs", [(FA, FB, CANCELLING), (TINY, floats(N, 11, -30, 0), TINY[::-1])])
def test_floats_round_once(body, inputs):
    unsigned_zero = " add.rn.f32 %d, %d, 0f00000000;"  # fractions have no -0
    agree(body + unsigned_zero, lambda *xs: to_float32(FLOATS[body](*map(fraction, xs))), *inputs)


def test_fused_is_not_two_roundings():
    """The counterexample to the test above: rounding the product first gives other words."""
    two, _ = execute("mul.rn.f32 %x1, %a, %b; add.rn.f32 %d, %x1, %c;", FA, FB, CANCELLING)
    one, _ = execute("fma.rn.f32 %d, %a, %b, %c;", FA, FB, CANCELLING)
    assert sum(a != b for a, b in zip(one, two, strict=True)) > N // 8


def test_short_floats():
    def to_bf16(x):
        return bits(float(rounded(x, 8))) >> 16

    agree("cvt.rn.bf16.f32 %h1, %a; cvt.u32.u16 %d, %h1;", lambda x: to_bf16(fraction(x)), FA)
    agree("mov.b32 {%h1, %h2}, %a; cvt.f32.bf16 %d, %h2;", lambda x: x & 0xFFFF0000, FA)
    packed = "cvt.rn.bf16x2.f32 %d, %a, %b;"
    agree(packed, lambda x, y: to_bf16(fraction(x)) << 16 | to_bf16(fraction(y)), FA, FB)
    cut = [x & 0xFFFF0000 for x in FA], [x & 0xFFFF0000 for x in FB]
    unpack = "mov.b32 {_, %h1}, %a; mov.b32 {_, %h2}, %b;"
    for name in ("add", "sub", "mul"):
        function = FLOATS[f"{name}.rn.f32 %d, %a, %b;"]
        agree(
            f"{unpack} {name}.rn.bf16 %h3, %h1, %h2; cvt.u32.u16 %d, %h3;",
            lambda x, y, function=function: to_bf16(function(fraction(x), fraction(y), None)), *cut,
        )  # fmt: skip
    agree(
        f"{unpack} add.rn.f32.bf16 %d, %h1, %b;",
        lambda x, y: to_float32(fraction(x) + fraction(y)),
        cut[0],
        FB,
    )


def test_pairs_of_float32():
    for name in ("add", "sub", "mul"):
        function = FLOATS[f"{name}.rn.f32 %d, %a, %b;"]
        body = f"mov.b64 %y1, {{%a, %b}}; mov.b64 %y2, {{%b, %c}}; {name}.rn.f32x2 %d, %y1, %y2;"

        def pair(x, y, z, function=function):
            low, high = (function(fraction(a), fraction(b), None) for a, b in ((x, y), (y, z)))
            return to_float32(low) | to_float32(high) << 32

        agree(body, pair, floats(N, 7, -30, 30), floats(N, 8, -30, 30), floats(N, 9, -30, 30), out_bits=64)


def largest(x, y, sign, propagate):
    if is_nan(x) or is_nan(y):
        return 0x7FFFFFFF if propagate or (is_nan(x) and is_nan(y)) else y if is_nan(x) else x
    return max((x, y), key=lambda w: sign * (-(w & 0x7FFFFFFF) - 1 if w >> 31 else w))


@pytest.mark.parametrize(("name", "sign"), [("max", 1), ("min", -1)])
def test_extremes(name, sign):
    agree(f"{name}.f32 %d, %a, %b;", lambda x, y: largest(x, y, sign, False), A, B)
    agree(f"{name}.NaN.f32 %d, %a, %b;", lambda x, y: largest(x, y, sign, True), A, B)


def test_comparisons():
    same = [a if i % 3 == 0 else b for i, (a, b) in enumerate(zip(A, B, strict=True))]
    orders = {"eq": "__eq__", "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}
    for how, name in orders.items():
        body = "setp.{}.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;"

        def ordered(x, y, name=name):
            return not (is_nan(x) or is_nan(y)) and getattr(value(x), name)(value(y))

        agree(body.format(how), ordered, A, same)
        agree(body.format(how + "u"), lambda x, y, f=ordered: is_nan(x) or is_nan(y) or f(x, y), A, same)
    agree("setp.nan.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", lambda x, y: is_nan(x) or is_nan(y), A, same)


def test_conversions():
    def to_integer(x, low, high):
        if is_nan(x):
            return 0
        if abs(value(x)) == float("inf"):
            return high if value(x) > 0 else low
        return max(low, min(high, int(fraction(x))))

    mixed = [a if i % 3 else f for i, (a, f) in enumerate(zip(A, floats(N, 12, -3, 40), strict=True))]
    agree("cvt.rzi.s32.f32 %d, %a;", lambda x: to_integer(x, -(2**31), 2**31 - 1), mixed)
    agree("cvt.rzi.u32.f32 %d, %a;", lambda x: to_integer(x, 0, 2**32 - 1), mixed)
    agree("cvt.rn.f32.s32 %d, %a;", lambda x: to_float32(Fraction(signed(x))), A)
    agree("cvt.rn.f32.u32 %d, %a;", lambda x: to_float32(Fraction(x)), A)
    agree("cvt.f64.f32 %d, %a;", lambda x: np.float64(value(x)).view(np.uint64), FA, out_bits=64)
    agree("cvt.rzi.f32.f32 %d, %a;", lambda x: bits(np.trunc(np.float32(value(x)))), FA)


LANES = list(range(128))
WARP = {
    "shfl.sync.bfly.b32 %d, %a, 5, 31, -1;": lambda x: x ^ 5,
    "shfl.sync.up.b32 %d, %a, 3, 0, -1;": lambda x: x - 3 if x % 32 >= 3 else x,
    "shfl.sync.down.b32 %x1|%p1, %a, 3, 31, -1; selp.b32 %d, %x1, 999, %p1;": lambda x: (
        x + 3 if x % 32 < 29 else 999
    ),
    "shfl.sync.idx.b32 %d, %a, 10, 0x181F, -1;": lambda x: x // 8 * 8 + 2,
    "redux.sync.add.s32 %d, %a, -1;": lambda x: sum(range(x // 32 * 32, x // 32 * 32 + 32)),
    "redux.sync.max.u32 %d, %a, -1;": lambda x: x // 32 * 32 + 31,
    "setp.lt.u32 %p1, %a, 40; vote.sync.ballot.b32 %d, %p1, -1;": lambda x: [2**32 - 1, 255, 0, 0][x // 32],
    "setp.lt.u32 %p1, %a, 40; vote.sync.any.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;": lambda x: x < 64,
    "and.b32 %x1, %a, 3; match.any.sync.b32 %d, %x1, -1;": lambda x: 0x11111111 << (x & 3),
}
LOOP = """and.b32 %x1, %a, 3; mov.b32 %x2, 0;
$L0: setp.eq.b32 %p1, %x1, 0;
@%p1 bra $L1;
add.s32 %x2, %x2, 10; sub.s32 %x1, %x1, 1;
bra.uni $L0;
$L1: shfl.sync.bfly.b32 %d, %x2, 1, 31, -1;"""


@pytest.mark.parametrize("body", WARP)
def test_lanes_meet(body):
    agree(body, WARP[body], LANES)


def test_threads_part_and_meet_again():
    for order in (None, 3):
        got, counts = execute(LOOP, LANES, order=order)
        assert got == [10 * ((x ^ 1) & 3) for x in LANES]
        assert counts.diverged > 0


PLACE = "mov.b32 %x1, global_smem; mad.lo.s32 %x2, %t, 4, %x1;"
FAULTS = {
    "shuffle without some lanes": (
        "setp.lt.u32 %p1, %a, 7; mov.b32 %d, 0; @%p1 bra $L1; shfl.sync.bfly.b32 %d, %a, 1, 31, -1; $L1:",
        "of the warp are here",
    ),
    "barrier that half the block skips": (
        "setp.lt.u32 %p1, %a, 64; mov.b32 %d, 0; @%p1 bra $L1; bar.sync 0; $L1:",
        "barrier",
    ),
    "two barriers, each met by half": (
        "setp.lt.u32 %p1, %a, 64; mov.b32 %d, 0; @%p1 bra $L1; bar.sync 0; bra $L2; $L1: bar.sync 0; $L2:",
        "different barriers",
    ),
    "shared memory with nothing in it": (f"{PLACE} ld.shared.b32 %d, [%x2];", "nothing has written"),
    "shared memory past its end": (f"{PLACE} st.shared.b32 [%x2+4], %a; mov.b32 %d, 0;", "out of bounds"),
    "a null address of shared memory": ("ld.shared.b32 %d, [0];", "out of bounds"),
    "an address that is misaligned": (
        f"{PLACE} st.shared.v4.b32 [%x2], {{%a, %a, %a, %a}}; mov.b32 %d, 0;",
        "no multiple of 16",
    ),
    "global memory past an array": ("add.s64 %ad, %ad, 4; ld.global.b32 %d, [%ad];", "out of bounds"),
    "storing a register with nothing in it": ("add.s32 %d, %x3, 1;", "read before it is written"),
    "branching on one": (
        "setp.eq.b32 %p1, %x3, 0; mov.b32 %d, 0; @%p1 bra $L1; mov.b32 %d, 1; $L1:",
        "read before it is written",
    ),
    "loading where one says": (f"{PLACE} ld.shared.b32 %d, [%x4];", "read before it is written"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    body, message = FAULTS[name]
    with pytest.raises(Fault, match=message):
        execute(body, LANES, shared=512)


def test_what_nothing_uses_may_come_from_nothing():
    """As in a reduction over warps: lanes past the last warp shuffle what they never loaded."""
    body = """setp.lt.u32 %p1, %a, 4; mov.b32 %d, 0;
    @%p1 mov.b32 %x3, %a;
    shfl.sync.bfly.b32 %x4, %x3, 2, 31, -1;
    @%p1 add.s32 %d, %x3, %x4;"""
    got, _ = execute(body, LANES)
    assert got == [2, 4, 2, 4] + [0] * 124


@pytest.mark.parametrize("text", ["sad.u32 %d, %a, %a, %a;", "add.sat.s32 %d, %a, %a;", "bar.sync 1;"])
def test_an_unknown_instruction_is_named(text):
    with pytest.raises(UnknownInstruction, match=text.split()[0]):
        execute(text, LANES)


def in_shared(body: str, size: int = 512, blocks: int = 2):
    """Counts of 128 threads a block; %r1 is the thread, %r2 the address of its word."""
    text = ".visible .entry k()\n.reqntid 128\n{\n.reg .b32 %r<9>; .reg .b16 %h;\nmov.u32 %r1, %tid.x;\n"
    text += f"mad.lo.s32 %r2, %r1, 4, global_smem;\n{body}\nret;\n}}\n"
    return run(Program(text), (blocks,), [], GlobalMemory(), size)[0]


WRITE, FAR = "st.shared.b32 [%r2], %r1;", "xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3];"
NEAR = "xor.b32 %r3, %r2, 4; ld.shared.b32 %r4, [%r3];"
RACES = {
    "a barrier between": (f"{WRITE} bar.sync 0; {FAR}", False),
    "no barrier": (f"{WRITE} {FAR}", True),
    "one's own word": (f"{WRITE} ld.shared.b32 %r4, [%r2];", False),
    "written after it was read": (f"{WRITE} bar.sync 0; {FAR} {WRITE}", True),
    "written after it was read, a barrier between": (f"{WRITE} bar.sync 0; {FAR} bar.sync 0; {WRITE}", False),
    "two values for one word": ("mov.b32 %r3, global_smem; st.shared.b32 [%r3], %r1;", True),
    "one value for one word": ("mov.b32 %r3, global_smem; st.shared.b32 [%r3], 7;", False),
    "inside a warp": (f"{WRITE} {NEAR}", True),
    "inside a warp that has met": (f"{WRITE} bar.warp.sync -1; {NEAR}", False),
    "another warp's, each met": (f"{WRITE} bar.warp.sync -1; {FAR}", True),
    "read by two warps, then written by one of them": (
        f"{WRITE} bar.sync 0; mov.b32 %r3, global_smem; ld.shared.b32 %r4, [%r3]; bar.warp.sync -1;"
        " setp.eq.b32 %q, %r1, 0; @%q st.shared.b32 [%r3], 9;",
        True,
    ),
    "half a word": (
        "cvt.u16.u32 %h, %r1; mad.lo.s32 %r3, %r1, 2, global_smem; st.shared.b16 [%r3], %h; bar.sync 0; "
        "ld.shared.b32 %r4, [global_smem]; bar.sync 0; st.shared.b16 [%r3], %h;",
        False,
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_races_in_shared_memory(name):
    body, raced = RACES[name]
    counts = in_shared(".reg .pred %q; " + body)
    assert bool(counts.races) == raced, counts.races


def test_races_between_blocks():
    def counts_of(value, offset="0"):
        text = ".visible .entry k(.param .u64 p0)\n.reqntid 32\n{\n.reg .b64 %y<3>; .reg .b32 %r<3>; "
        text += ".reg .pred %q;\n"
        text += (
            "ld.param.b64 %y0, [p0]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; setp.eq.b32 %q, %r1, 0;\n"
        )
        text += f"mad.wide.u32 %y1, %r0, {offset}, %y0; @%q st.global.b32 [%y1], {value};\nret;\n}}\n"
        memory = GlobalMemory()
        address = memory.add(np.zeros(2, np.uint32))
        return run(Program(text), (2,), [address], memory)[0]

    assert counts_of("%r0").races
    assert not counts_of("%r0", "4").races
    assert not counts_of("5").races
    assert counts_of("5").same_value


def test_traffic():
    spread = in_shared("mad.lo.s32 %r3, %r1, 8, global_smem; st.shared.b32 [%r3], %r1;", 1024)
    assert spread.shared_passes.tolist() == [8, 8] and spread.shared_ideal.tolist() == [4, 4]
    wide = "mad.lo.s32 %r3, %r1, 16, global_smem; st.shared.v4.b32 [%r3], {%r1, %r1, %r1, %r1};"
    assert in_shared(wide, 2048).shared_passes.tolist() == [16, 16]
    one = in_shared("st.shared.b32 [global_smem], 1; bar.sync 0; ld.shared.b32 %r4, [global_smem];")
    assert one.shared_passes.tolist() == [8, 8] and one.barriers.tolist() == [1, 1]
    _, counts = execute("mov.b32 %d, %a;", LANES)
    assert counts.sectors_read.tolist() == [16] and counts.sectors_written.tolist() == [16]
    # mov %tid; ld.param, mad, ld.global; mov; ld.param, mad, st.global; ret
    assert counts.instructions_a_warp.tolist() == [9.0]


def test_a_program_may_have_one_instruction_replaced():
    text = ".visible .entry k()\n.reqntid 32\n{\n.reg .b32 %r<2>;\nmov.b32 %r0, 1;\nbar.sync 0;\nret;\n}\n"
    program = Program(text)
    other = program.replaced(1, "")
    assert run(program, (1,), [], GlobalMemory())[0].barriers.tolist() == [1]
    assert run(other, (1,), [], GlobalMemory())[0].barriers.tolist() == [0]
    assert program.instructions[1].opcode == "bar.sync"
