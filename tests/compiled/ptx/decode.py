"""Instructions bound to registers: each becomes a function of the machine and of the threads that execute it.

`lanes` is a bool [threads] everywhere, or None for all threads of the batch.
"""

import re
from collections.abc import Callable

import numpy as np

from . import warp
from .arithmetic import complement, operation
from .errors import UnknownInstruction
from .formats import SIGNED, UNSIGNED, bits_of, is_float, is_signed, numbers, size
from .memory import SHARED_BASE
from .parse import (
    DISCARD,
    SHARED,
    Address,
    Group,
    Instruction,
    Name,
    Number,
    Pair,
    Program,
    Register,
    Special,
)

ACCESS = re.compile(
    r"(global|shared(::cta)?|param|nc|volatile|relaxed|weak|cta|gpu|ca|cg|cs|wb|v[248]|[bsuf]\d+"
    r"|L1::evict_\w+|L2::evict_\w+)"
)
MULTIPLY = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(bf16|f16|tf32)\.\2\.f32")


class Branch:
    def __init__(self, target: int):
        self.target = target


class Barrier:
    pass


class Return:
    pass


def decode(
    instruction: Instruction, program: Program, labels: dict[str, int]
) -> Callable | Branch | Barrier | Return:
    """Raises `UnknownInstruction` with the instruction's text."""
    try:
        root = instruction.parts[0]
        if root == "bra":
            return Branch(labels[instruction.operands[0].name])
        if root in ("ret", "exit"):
            return Return()
        if instruction.opcode in ("bar.sync", "barrier.sync") and instruction.operands == (Number(0),):
            return Barrier()
        special = SPECIAL.get(root)
        if special:
            return special(instruction, program)
        if isinstance(instruction.operands[0], Group) or any(
            isinstance(o, Group) for o in instruction.operands[1:]
        ):
            return _move_group(instruction)
        return _own_registers(instruction)
    except (UnknownInstruction, KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise UnknownInstruction(f"{instruction} ({type(error).__name__}: {error})") from error


def smallest_access(program: Program, space: str) -> int:
    """Bytes of the smallest access to a space, at most 4."""
    sizes = [4]
    for instruction in program.instructions:
        parts = instruction.parts
        if parts[0] in ("ld", "st") and any(p.split("::")[0] == space for p in parts):
            sizes.append(size(parts[-1]))
        elif parts[0] in ("ldmatrix", "stmatrix") and space == "shared":
            sizes.append(2)
    return min(sizes)


# Operands: functions of (machine, lanes) -> unsigned bits, [threads] or a scalar.


def reader(operand, n: int) -> Callable:
    """The low n bytes of an operand; n = 0: a predicate."""
    if isinstance(operand, Register):
        if n == 0:
            if operand.negated:
                return lambda machine, lanes: ~machine.read(operand, lanes)
            return lambda machine, lanes: machine.read(operand, lanes)

        def read(machine, lanes):
            bits = machine.read(operand, lanes)
            return bits if bits.itemsize == n else bits.astype(UNSIGNED[n])

        return read
    if isinstance(operand, Special):
        return lambda machine, lanes: machine.special(operand.name).astype(UNSIGNED[n])
    if isinstance(operand, Name):
        if operand.name != SHARED:
            raise UnknownInstruction(operand.name)
        value = SHARED_BASE + operand.offset
    elif isinstance(operand, Number):
        value = operand.bits
    else:
        raise UnknownInstruction(str(operand))
    constant = np.bool_(value != 0) if n == 0 else UNSIGNED[n](value & ((1 << 8 * n) - 1))
    return lambda machine, lanes: constant


def source(operand, kind: str) -> Callable:
    if kind == "pred":
        return reader(operand, 0)
    read = reader(operand, size(kind))
    return lambda machine, lanes: numbers(read(machine, lanes), kind)


def writer(operand, signed: bool = False) -> Callable:
    """Writes unsigned bits (a predicate: booleans) to a register, widened to it."""
    if operand == DISCARD:
        return lambda machine, bits, lanes: None
    if not isinstance(operand, Register):
        raise UnknownInstruction(str(operand))
    if operand.kind == "pred":
        return lambda machine, bits, lanes: machine.write(operand, bits, lanes)
    n = size(operand.kind)

    def write(machine, bits, lanes):
        if bits.itemsize != n:
            if signed:
                bits = bits.view(SIGNED[bits.itemsize]).astype(SIGNED[n]).view(UNSIGNED[n])
            bits = bits.astype(UNSIGNED[n], copy=False)
        machine.write(operand, bits, lanes)

    return write


def address(operand: Address) -> Callable:
    n = 8 if isinstance(operand.base, Register) and operand.base.kind.endswith("64") else 4
    read, offset = reader(operand.base, n), operand.offset
    return lambda machine, lanes: np.broadcast_to(
        read(machine, lanes).astype(np.int64) + offset, machine.threads
    )


def _items(operand) -> tuple:
    return operand.items if isinstance(operand, Group) else (operand,)


# Instructions


def _own_registers(instruction: Instruction) -> Callable:
    result, *operands = instruction.operands
    found = operation(instruction.opcode, len(operands))
    sources = [source(o, kind) for o, kind in zip(operands, found.sources, strict=True)]
    pair = isinstance(result, Pair)
    write = writer(result.first if pair else result, signed=is_signed(found.result))
    if pair:
        second, write_second = complement(instruction.opcode, len(operands)), writer(result.second)

    def execute(machine, lanes):
        values = [read(machine, lanes) for read in sources]
        if found.free:
            machine.counts.free[instruction.opcode] += 1
        write(machine, bits_of(found.function(*values), found.result), lanes)
        if pair:
            write_second(machine, second.function(*values), lanes)

    return execute


def _select(instruction: Instruction, program: Program) -> Callable:
    """selp: what is not chosen need not hold anything."""
    found = operation(instruction.opcode, 3)
    write, *sources = writer(instruction.operands[0]), *map(source, instruction.operands[1:], found.sources)

    def execute(machine, lanes):
        values, doubts = [], []
        for read in sources:
            machine.doubt = None
            values.append(read(machine, lanes))
            doubts.append(machine.doubt)
        machine.doubt = None
        if any(doubt is not None for doubt in doubts):
            of_first, of_second, of_choice = (False if doubt is None else doubt for doubt in doubts)
            machine.doubt = of_choice | np.where(values[2], of_first, of_second)
        write(machine, found.function(*values), lanes)

    return execute


def _move_group(instruction: Instruction) -> Callable:
    """mov between a register and the registers of its parts."""
    root, kind = instruction.parts
    if root != "mov":
        raise UnknownInstruction(instruction.opcode)
    result, operand = instruction.operands
    n = size(kind)
    if isinstance(result, Group):
        read, each = reader(operand, n), n // len(result.items)
        writes = [writer(item) for item in result.items]

        def unpack(machine, lanes):
            bits = read(machine, lanes)
            for i, write in enumerate(writes):
                write(machine, (bits >> UNSIGNED[n](8 * each * i)).astype(UNSIGNED[each]), lanes)

        return unpack
    each = n // len(operand.items)
    reads, write = [reader(item, each) for item in operand.items], writer(result)

    def pack(machine, lanes):
        parts = (read(machine, lanes).astype(UNSIGNED[n]) for read in reads)
        write(machine, sum(part << UNSIGNED[n](8 * each * i) for i, part in enumerate(parts)), lanes)

    return pack


def _access(instruction: Instruction) -> tuple[str, int]:
    parts = instruction.parts[1:]
    if not all(ACCESS.fullmatch(part) for part in parts):
        raise UnknownInstruction(instruction.opcode)
    spaces = [part.split("::")[0] for part in parts if part.split("::")[0] in ("global", "shared", "param")]
    (space,) = spaces
    return space, size(parts[-1])


def _load(instruction: Instruction, program: Program) -> Callable:
    space, n = _access(instruction)
    result, place = instruction.operands
    writes = [writer(item, signed=is_signed(instruction.parts[-1])) for item in _items(result)]
    if space == "param":
        index = [name for _, name in program.parameters].index(place.base.name)
        if place.offset or place.base.offset or len(writes) > 1:
            raise UnknownInstruction(instruction.opcode)
        return lambda machine, lanes: writes[0](machine, machine.argument(index, n), lanes)
    where = address(place)

    def execute(machine, lanes):
        data = machine.load(space, where(machine, lanes), n * len(writes), lanes).view(UNSIGNED[n])
        for i, write in enumerate(writes):
            write(machine, machine.scattered(np.ascontiguousarray(data[:, i]), lanes), lanes)

    return execute


def _store(instruction: Instruction, program: Program) -> Callable:
    space, n = _access(instruction)
    if space == "param":
        raise UnknownInstruction(instruction.opcode)
    where = address(instruction.operands[0])
    reads = [reader(item, n) for item in _items(instruction.operands[1])]

    def execute(machine, lanes):
        values = [machine.gathered(read(machine, lanes), lanes) for read in reads]
        data = np.stack(values, 1).view(np.uint8)
        machine.store(space, where(machine, lanes), data, lanes)

    return execute


def _matrix_access(instruction: Instruction) -> tuple[int, bool]:
    match = re.fullmatch(
        r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", instruction.opcode
    )
    return int(match[1]), bool(match[2])


def _load_matrix(instruction: Instruction, program: Program) -> Callable:
    count, trans = _matrix_access(instruction)
    where, writes = (
        address(instruction.operands[1]),
        [writer(item) for item in _items(instruction.operands[0])],
    )
    if len(writes) != count:
        raise UnknownInstruction(instruction.opcode)

    def execute(machine, lanes):
        machine.require_whole_warps(lanes)
        rows = machine.matrix_rows(where(machine, lanes), count, lanes)
        for i, write in enumerate(writes):
            bits = np.zeros(machine.threads, np.uint32)
            for half, (row, column) in enumerate(warp.matrix_rows(machine.lane, trans)):
                places = rows[i][machine.first_lane // 32, row] + 2 * column
                data = machine.load("shared", places, 2, lanes, traffic=False).view(np.uint16)[:, 0]
                bits |= machine.scattered(data, lanes).astype(np.uint32) << np.uint32(16 * half)
            write(machine, bits, lanes)

    return execute


def _store_matrix(instruction: Instruction, program: Program) -> Callable:
    count, trans = _matrix_access(instruction)
    where, reads = (
        address(instruction.operands[0]),
        [reader(item, 4) for item in _items(instruction.operands[1])],
    )
    if len(reads) != count:
        raise UnknownInstruction(instruction.opcode)

    def execute(machine, lanes):
        machine.require_whole_warps(lanes)
        rows = machine.matrix_rows(where(machine, lanes), count, lanes)
        for i, read in enumerate(reads):
            bits = machine.gathered(read(machine, lanes), lanes)
            for half, (row, column) in enumerate(warp.matrix_rows(machine.lane, trans)):
                places = rows[i][machine.first_lane // 32, row] + 2 * column
                data = (bits >> np.uint32(16 * half)).astype(np.uint16)[:, None].view(np.uint8)
                machine.store("shared", places, data, lanes, traffic=False)

    return execute


def _members(operand) -> Callable:
    """Checks that the threads of the mask, and no others of the warp, are here."""
    read = reader(operand, 4)
    return lambda machine, lanes: machine.require_members(read(machine, lanes), lanes)


def _shuffle(instruction: Instruction, program: Program) -> Callable:
    _, sync, mode, kind = instruction.parts
    result, value, amount, clamp, members = instruction.operands
    if (sync, kind) != ("sync", "b32") or mode not in ("up", "down", "bfly", "idx"):
        raise UnknownInstruction(instruction.opcode)
    pair = isinstance(result, Pair)
    write, write_inside = writer(result.first if pair else result), writer(result.second if pair else DISCARD)
    value, amount, clamp, check = reader(value, 4), reader(amount, 4), reader(clamp, 4), _members(members)

    def execute(machine, lanes):
        check(machine, lanes)
        steps, limits = (read(machine, lanes).astype(np.int64) for read in (amount, clamp))
        machine.require_known("the lane")
        lane, inside = warp.partner(mode, machine.lane, steps, limits)
        threads = machine.first_lane + lane
        machine.require_lanes(threads, lanes)
        values = np.broadcast_to(value(machine, lanes), machine.threads)
        if machine.doubt is not None:
            machine.doubt = machine.doubt[threads]
        write(machine, values[threads], lanes)
        machine.doubt = None
        write_inside(machine, np.broadcast_to(inside, machine.threads), lanes)

    return execute


def _reduce(instruction: Instruction, program: Program) -> Callable:
    _, sync, how, *modes, kind = instruction.parts
    result, value, members = instruction.operands
    if (
        sync != "sync"
        or how not in warp.REDUCTIONS
        or modes not in ([], ["NaN"])
        or (modes and not is_float(kind))
    ):
        raise UnknownInstruction(instruction.opcode)
    read, write, check = source(value, kind), writer(result), _members(members)

    def execute(machine, lanes):
        check(machine, lanes)
        values = np.broadcast_to(read(machine, lanes), machine.threads)
        machine.doubt_warps()
        totals = warp.reduced(how, values, machine.mask(lanes), bool(modes))
        write(machine, np.repeat(bits_of(totals, kind), 32), lanes)

    return execute


def _vote(instruction: Instruction, program: Program) -> Callable:
    _, sync, how, kind = instruction.parts
    result, value, members = instruction.operands
    if sync != "sync" or (how, kind) not in [
        ("ballot", "b32"),
        *((h, "pred") for h in ("any", "all", "uni")),
    ]:
        raise UnknownInstruction(instruction.opcode)
    read, write, check = reader(value, 0), writer(result), _members(members)

    def execute(machine, lanes):
        check(machine, lanes)
        here = machine.mask(lanes)
        values = np.broadcast_to(read(machine, lanes), machine.threads)
        machine.doubt_warps()
        true, false = warp.ballot(values & here), warp.ballot(~values & here)
        answers = {
            "ballot": true,
            "any": true != 0,
            "all": false == 0,
            "uni": (true == 0) | (false == 0),
        }
        write(machine, np.repeat(answers[how], 32), lanes)

    return execute


def _match(instruction: Instruction, program: Program) -> Callable:
    if instruction.parts[1:3] != ["any", "sync"]:
        raise UnknownInstruction(instruction.opcode)
    result, value, members = instruction.operands
    read, write, check = reader(value, size(instruction.parts[-1])), writer(result), _members(members)

    def execute(machine, lanes):
        check(machine, lanes)
        values = np.broadcast_to(read(machine, lanes), machine.threads)
        machine.doubt_warps()
        write(machine, warp.equal_lanes(values, machine.mask(lanes)), lanes)

    return execute


def _multiply(instruction: Instruction, program: Program) -> Callable:
    match = MULTIPLY.fullmatch(instruction.opcode)
    results, *operands = (_items(operand) for operand in instruction.operands)
    depth, kind = int(match[1]), match[2]
    halves = kind != "tf32"
    wanted = {(8, True): (2, 1), (16, True): (4, 2), (4, False): (2, 1), (8, False): (4, 2)}[depth, halves]
    if tuple(map(len, operands)) != (*wanted, 4):
        raise UnknownInstruction(instruction.opcode)
    writes, reads = [writer(r) for r in results], [[reader(o, 4) for o in group] for group in operands]

    def execute(machine, lanes):
        machine.require_whole_warps(lanes)
        machine.counts.free[instruction.opcode] += 1
        a, b, c = (
            [np.broadcast_to(read(machine, lanes), machine.threads) for read in group] for group in reads
        )
        machine.doubt_warps()
        for write, values in zip(writes, warp.multiply(a, b, c, kind, depth), strict=True):
            write(machine, bits_of(values, "f32"), lanes)

    return execute


def _warp_barrier(instruction: Instruction, program: Program) -> Callable:
    if instruction.opcode != "bar.warp.sync":
        raise UnknownInstruction(instruction.opcode)
    check = _members(instruction.operands[0])

    def execute(machine, lanes):
        check(machine, lanes)
        machine.warps_met(lanes)

    return execute


def _active(instruction: Instruction, program: Program) -> Callable:
    write = writer(instruction.operands[0])
    return lambda machine, lanes: write(machine, np.repeat(warp.ballot(machine.mask(lanes)), 32), lanes)


def _nothing(instruction: Instruction, program: Program) -> Callable:
    return lambda machine, lanes: None


SPECIAL = {
    "ld": _load,
    "st": _store,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
    "selp": _select,
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "match": _match,
    "mma": _multiply,
    "bar": _warp_barrier,
    "activemask": _active,
    "griddepcontrol": _nothing,  # launches run one after the other here
    "nop": _nothing,
}
