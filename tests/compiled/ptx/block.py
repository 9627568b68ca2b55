"""Steps threads, warps and blocks: who runs next, barriers, and what instructions need of the machine."""

from collections.abc import Sequence

import numpy as np

from . import traffic, warp
from .counts import Counts
from .decode import Barrier, Branch, decode, smallest_access
from .errors import Fault
from .formats import UNSIGNED, size
from .memory import GlobalMemory, SharedMemory, Threads
from .parse import Program, Register

BATCH = 64
"""Blocks that run side by side."""
POISON = 0xDEADBEEFDEADBEEF


def run(
    program: "Program | Code",
    grid: Sequence[int],
    arguments: Sequence[int | float],
    memory: GlobalMemory,
    shared_bytes: int = 0,
    order: int | None = None,
    measure: bool = True,
    batch: int = BATCH,
) -> tuple[Counts, list[np.ndarray]]:
    """Executes a launch; memory's arrays hold what it wrote. `Code(program)` decodes once for several
    launches.

    arguments: one number a parameter, addresses included; those of the compiler's own at the end may be
    left out.
    order: None runs all warps in lockstep, the lowest instruction first; a seed draws the order of the
    blocks, and
    runs a block's warps one at a time, each up to its next barrier, in an order of its own. measure: False
    leaves passes and sectors out.

    Returns the counts and, for each array in the order it was added, which elements are initialised.
    Raises `Fault` and `UnknownInstruction`; races are in the counts.
    """
    x, y, z = (*grid, 1, 1)[:3]
    if min(x, y, z) < 1:
        raise ValueError(f"grid must have sizes of at least 1, got {tuple(grid)}")
    code = program if isinstance(program, Code) else Code(program)
    program = code.program
    arguments = [*arguments, *[0] * (len(program.parameters) - len(arguments))]
    encoded = [_encoded(value, kind) for value, (kind, _) in zip(arguments, program.parameters, strict=True)]
    space = memory.opened(smallest_access(program, "global"), program.threads)
    blocks = np.arange(x * y * z)
    random = None if order is None else np.random.default_rng(order)
    if random:
        blocks, batch = random.permutation(blocks), min(batch, max(len(blocks) // 3, 1))
    counts = None
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), batch):
            machine = Machine(
                code, blocks[start : start + batch], (x, y, z), encoded, space, shared_bytes, measure
            )
            machine.run(random)
            counts = machine.counts if counts is None else counts + machine.counts
    if random:
        for name in (
            "instructions",
            "barriers",
            "shared_passes",
            "shared_ideal",
            "sectors_read",
            "sectors_written",
        ):
            setattr(counts, name, getattr(counts, name)[np.argsort(blocks)])
    return counts, space.write_back()


def _encoded(value: int | float, kind: str) -> bytes:
    if kind == "f32":
        return np.float32(value).tobytes()
    if kind == "f64":
        return np.float64(value).tobytes()
    return (int(value) & (1 << 64) - 1).to_bytes(8, "little")


class Code:
    """A program's runs, decoded."""

    def __init__(self, program: Program):
        self.program = program
        self.runs, labels = program.runs()
        self.steps = [
            [(i, i.guard, decode(i, program, labels)) for i in run.instructions] for run in self.runs
        ]
        self.lengths = np.array([len(run.instructions) for run in self.runs])
        self.cell = smallest_access(program, "shared")


class Machine:
    """A batch of blocks. Threads are numbered through it: block, warp, lane."""

    def __init__(self, code: Code, blocks, grid, arguments, space, shared_bytes: int, measure: bool):
        n = code.program.threads
        self.code, self.blocks, self.block_threads, self.measure = code, len(blocks), n, measure
        self.threads = n * len(blocks)
        index = np.arange(self.threads)
        self.index, self.lane, self.first_lane, self.block = index, index % 32, index // 32 * 32, index // n
        self.warp = index % n // 32
        self.global_ids = np.repeat(blocks, n) * n + index % n
        self._arguments = arguments
        self._grid, self._position = grid, np.repeat(blocks, n)
        self._specials: dict[str, np.ndarray] = {}
        self._values: list = [None] * len(code.program.registers)
        self._written: list = [False] * len(code.program.registers)  # True, False or bool [threads]
        self.shared = SharedMemory(len(blocks), shared_bytes, code.cell, n)
        self.memory = space
        self._warp_epochs = np.zeros(self.threads, np.int32)
        self._block_epochs = np.zeros(self.threads, np.int32)
        self.counts = Counts.of(len(blocks), n)
        self.instruction = None
        self.doubt: np.ndarray | None = None
        self._doubtful = ""

    # Scheduling

    def run(self, random: np.random.Generator | None) -> None:
        steps = self.code.steps
        end = len(steps)
        self._pc = np.zeros(self.threads, np.int64)
        self._waiting = np.zeros(self.threads, bool)
        issued = np.zeros((end, self.threads // 32), np.int64)
        turn = np.zeros(self.blocks, np.int64)
        while True:
            ready = (self._pc < end) & ~self._waiting
            if random is not None:
                self._take_turns(ready, turn, random)
                ready &= self.warp == turn[self.block]
            if not ready.any():
                break
            at = int(self._pc[ready].min())
            here = ready & (self._pc == at)
            self._note_issue(issued[at], here, end)
            self._pc[here] = at + 1
            self._execute(steps[at], here, end)
        if self._waiting.any():
            raise Fault(f"{self._where_of(self._waiting)}: threads wait at a barrier that others never reach")
        self.counts.instructions = (
            (issued * self.code.lengths[:, None]).sum(0).reshape(self.blocks, -1).sum(1)
        )
        self.issued = issued
        for run, times in zip(self.code.runs, issued.sum(1).tolist(), strict=True):
            if times:
                for instruction in run.instructions:
                    self.counts.opcodes[instruction.opcode] += times

    def _take_turns(self, ready, turn, random) -> None:
        """A block's warp runs on until it waits or ends; then another is drawn."""
        can = ready.reshape(self.blocks, -1, 32).any(2)
        for block in np.nonzero(can.any(1) & ~can[np.arange(self.blocks), turn])[0]:
            turn[block] = random.choice(np.nonzero(can[block])[0])

    def _note_issue(self, issued, here, end: int) -> None:
        of_warp = here.reshape(-1, 32)
        some = of_warp.any(1)
        issued += some
        alive = (self._pc < end).reshape(-1, 32)
        self.counts.diverged += int((some & (of_warp != alive).any(1)).sum())

    def _execute(self, steps, here, end: int) -> None:
        everywhere = None if here.all() else here
        for self.instruction, guard, step in steps:
            lanes, active = everywhere, here
            self.doubt = None
            if guard is not None:
                condition = self.read(guard, lanes)
                self.require_known("the condition")
                active = here & (~condition if guard.negated else condition)
                if not active.any():
                    continue
                lanes = None if active.all() else active
            if callable(step):
                step(self, lanes)
            elif isinstance(step, Branch):
                self._pc[active] = step.target
            elif isinstance(step, Barrier):
                self._wait(active, end)
            else:
                self._pc[active] = end
        if not isinstance(steps[-1][2], Barrier) and self._waiting.any():
            self._refuse_absent(end)

    def _wait(self, active, end: int) -> None:
        self._waiting |= active
        waiting = self._waiting.reshape(self.blocks, -1)
        complete = waiting.all(1)
        if complete.any():
            places = self._pc.reshape(self.blocks, -1)[complete]
            if (places != places[:, :1]).any():
                raise Fault(f"{self.instruction}: threads of one block are at different barriers")
            waiting[complete] = False
            self.counts.barriers[complete] += 1
            self.shared.synchronised(complete)
            self._block_epochs.reshape(self.blocks, -1)[complete] += 1
        self._refuse_absent(end)

    def _refuse_absent(self, end: int) -> None:
        gone = (self._pc >= end).reshape(self.blocks, -1).any(1)
        waiting = self._waiting & gone[self.block]
        if waiting.any():
            raise Fault(
                f"{self._where_of(waiting)}: threads wait at a barrier after others of the block have ended"
            )

    def _where_of(self, threads) -> str:
        return str(self.code.runs[int(self._pc[np.argmax(threads)]) - 1].instructions[-1])

    # Registers. Some lanes may hold nothing: a reduction over warps shuffles such values, and only the
    # lanes that
    # hold something go on. What is computed from nothing is nothing; to branch on it or to let it reach
    # memory is
    # a fault. `doubt` says in which threads the instruction has read nothing, None for nowhere.

    def read(self, register: Register, lanes):
        written = self._written[register.index]
        if written is not True:
            missing = np.ones(self.threads, bool) if written is False else ~written
            if lanes is not None:
                missing &= lanes
            if missing.any():
                self._doubtful = register.name
                self.doubt = missing if self.doubt is None else self.doubt | missing
        if self._values[register.index] is None:
            self._values[register.index] = self._poison(register)
        return self._values[register.index]

    def _poison(self, register: Register):
        if register.kind == "pred":
            return np.zeros(self.threads, bool)
        n = size(register.kind)
        return np.full(self.threads, POISON & ((1 << 8 * n) - 1), UNSIGNED[n])

    def write(self, register: Register, bits, lanes) -> None:
        bits = np.broadcast_to(bits, self.threads)
        i = register.index
        if lanes is None and self.doubt is None:
            self._values[i], self._written[i] = bits, True
            return
        if lanes is None:
            self._values[i], self._written[i] = bits, ~self.doubt
            return
        before, written = self._values[i], self._written[i]
        self._values[i] = np.where(lanes, bits, self._poison(register) if before is None else before)
        if written is not True or self.doubt is not None:
            written = lanes | written
            if self.doubt is not None:
                written &= ~(lanes & self.doubt)
            self._written[i] = True if written.all() else written

    def require_known(self, what: str) -> None:
        if self.doubt is not None:
            raise Fault(
                f"{self.instruction}: {what} comes from {self._doubtful}, which is read before it is written"
            )

    def doubt_warps(self) -> None:
        """Nothing in one lane is nothing for its warp."""
        if self.doubt is not None:
            self.doubt = np.repeat(self.doubt.reshape(-1, 32).any(1), 32)

    def argument(self, index: int, n: int):
        return np.frombuffer(self._arguments[index], UNSIGNED[n], 1)

    def special(self, name: str):
        if name not in self._specials:
            self._specials[name] = np.asarray(self._special(name), np.uint32)
        return self._specials[name]

    def _special(self, name: str):
        root, _, axis = name.partition(".")
        x, y, _ = self._grid
        one, lane = np.uint64(1), self.lane.astype(np.uint64)
        values = {
            "%laneid": lambda: self.lane,
            "%warpid": lambda: self.warp,
            "%lanemask_eq": lambda: one << lane,
            "%lanemask_lt": lambda: (one << lane) - one,
            "%lanemask_le": lambda: (one << lane) * np.uint64(2) - one,
            "%tid": lambda: self.index % self.block_threads if axis == "x" else np.zeros(self.threads),
            "%ntid": lambda: np.full(self.threads, self.block_threads if axis == "x" else 1),
            "%nctaid": lambda: np.full(self.threads, self._grid["xyz".index(axis)]),
            "%ctaid": lambda: {
                "x": self._position % x,
                "y": self._position // x % y,
                "z": self._position // (x * y),
            }[axis],
        }
        if root not in values:
            raise Fault(f"{self.instruction}: {name} is not modelled")
        return values[root]()

    # What instructions ask for

    def mask(self, lanes):
        return np.ones(self.threads, bool) if lanes is None else lanes

    def gathered(self, values, lanes):
        """[threads] -> one for each thread that executes."""
        values = np.broadcast_to(values, self.threads)
        return values if lanes is None else values[lanes]

    def scattered(self, values, lanes):
        if lanes is None:
            return values
        everywhere = np.zeros(self.threads, values.dtype)
        everywhere[lanes] = values
        return everywhere

    def require_whole_warps(self, lanes) -> None:
        if lanes is not None:
            of_warp = lanes.reshape(-1, 32)
            if (of_warp.any(1) != of_warp.all(1)).any():
                raise Fault(f"{self.instruction}: not all threads of the warp are here")

    def require_members(self, wanted, lanes) -> None:
        self.require_known("the mask")
        here = np.repeat(warp.ballot(self.mask(lanes)), 32)
        wrong = self.gathered(np.broadcast_to(wanted, self.threads) != here, lanes)
        if wrong.any():
            first = int(self.gathered(self.index, lanes)[np.argmax(wrong)])
            mask = int(np.broadcast_to(wanted, self.threads)[first])
            raise Fault(
                f"{self.instruction}: the mask says {mask:#x}, but {int(here[first]):#x} of the warp are here"
            )

    def require_lanes(self, threads, lanes) -> None:
        """threads: whom each thread reads from."""
        if lanes is not None and not lanes[threads[lanes]].all():
            raise Fault(f"{self.instruction}: reads from a lane that is not here")

    def warps_met(self, lanes) -> None:
        self._warp_epochs += self.mask(lanes)

    def matrix_rows(self, addresses, count: int, lanes):
        """int64 [count, warps, 8]: where the rows of each 8 x 8 matrix lie, by lanes 0-7, 8-15..."""
        self.require_known("an address")
        table = addresses.reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)
        here = self.mask(lanes).reshape(-1, 32).any(1)
        rows = table[here].reshape(-1)
        if (rows % 16).any():
            raise Fault(
                f"{self.instruction}: a matrix row at {int(rows[rows % 16 != 0][0]):#x}, no multiple of 16"
            )
        if self.measure:
            threads = np.repeat(np.nonzero(here)[0], 8 * count) * 32 + np.tile(
                np.arange(8 * count), int(here.sum())
            )
            self._count_passes(threads, rows, 16)
        return table.transpose(1, 0, 2)

    def load(self, space: str, addresses, n: int, lanes, traffic: bool = True):
        """uint8 [executing threads, n]"""
        self.require_known("an address or a value for memory")
        addresses, threads = self.gathered(addresses, lanes), self.gathered(self.index, lanes)
        if space == "shared":
            who = Threads(threads, self._warp_epochs[threads])
            data = self.shared.load(addresses, n, who, str(self.instruction), self.counts)
        else:
            who = Threads(self.global_ids[threads], self._block_epochs[threads])
            data = self.memory.load(addresses, n, who, str(self.instruction), self.counts)
        if self.measure and traffic:
            self._count(space, threads, addresses, n, self.counts.sectors_read)
        return data

    def store(self, space: str, addresses, data, lanes, traffic: bool = True) -> None:
        """data: uint8 [executing threads, n]"""
        self.require_known("an address or a value for memory")
        addresses, threads = self.gathered(addresses, lanes), self.gathered(self.index, lanes)
        if space == "shared":
            who = Threads(threads, self._warp_epochs[threads])
            self.shared.store(addresses, data, who, str(self.instruction), self.counts)
        else:
            who = Threads(self.global_ids[threads], self._block_epochs[threads])
            self.memory.store(addresses, data, who, str(self.instruction), self.counts)
        if self.measure and traffic:
            self._count(space, threads, addresses, data.shape[1], self.counts.sectors_written)

    def _count(self, space: str, threads, addresses, n: int, sectors) -> None:
        if space == "shared":
            self._count_passes(threads, addresses, n)
        else:
            warps_a_block = self.block_threads // 32
            sectors += traffic.sectors(threads // 32, addresses, n, warps_a_block, self.blocks)

    def _count_passes(self, threads, addresses, n: int) -> None:
        taken, ideal = traffic.passes(threads, addresses, n, self.block_threads, self.blocks)
        self.counts.shared_passes += taken
        self.counts.shared_ideal += ideal
