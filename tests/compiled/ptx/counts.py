"""What a launch executed."""

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

KINDS = (
    ("barrier", ("bar", "barrier")),
    ("shuffle", ("shfl", "redux", "vote", "match")),
    ("shared", ("ld.shared", "st.shared", "ldmatrix", "stmatrix", "cp")),
    ("global", ("ld.global", "st.global", "atom", "red")),
    ("matrix", ("mma",)),
    ("branch", ("bra", "ret", "exit")),
    ("move", ("mov", "ld.param")),
    ("compare and select", ("setp", "selp")),
    ("convert", ("cvt",)),
)
ARITHMETIC = "arithmetic"


def kind_of(opcode: str) -> str:
    for kind, starts in KINDS:
        if any(opcode == start or opcode.startswith(start + ".") for start in starts):
            return kind
    if ".pred" in opcode:
        return "compare and select"
    return ARITHMETIC


@dataclass
class Counts:
    """Arrays hold one number a block, in the order x, y, z of the grid; a block's is the sum over its
    warps."""

    threads: int  # of a block
    instructions: np.ndarray  # that warps issued, those whose guard was false for all included
    barriers: np.ndarray  # block-wide ones passed
    shared_passes: np.ndarray  # over the 32 banks, loads and stores
    shared_ideal: np.ndarray  # the same without bank conflicts
    sectors_read: np.ndarray  # 32-byte sectors of global memory, access by access
    sectors_written: np.ndarray
    opcodes: Counter = field(default_factory=Counter)  # warps' instructions of the whole launch
    races: list[str] = field(default_factory=list)
    same_value: Counter = field(default_factory=Counter)  # by instruction: unordered writes of one value
    free: Counter = field(default_factory=Counter)  # opcodes met whose bits hardware may choose
    diverged: int = 0  # runs of instructions that a warp made without all its living threads

    @classmethod
    def of(cls, blocks: int, threads: int) -> "Counts":
        return cls(threads, *(np.zeros(blocks, np.int64) for _ in range(6)))

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def instructions_a_warp(self) -> np.ndarray:
        """float64 [blocks]: the mean over a block's warps."""
        return self.instructions / self.warps

    @property
    def slots(self) -> np.ndarray:
        """float64 [blocks]: instructions a warp on the busiest of a multiprocessor's four schedulers."""
        return self.instructions_a_warp * -(-self.warps // 4)

    def kinds(self) -> dict[str, float]:
        """Instructions a warp by kind, the mean over all warps of the launch."""
        total: Counter = Counter()
        for opcode, count in self.opcodes.items():
            total[kind_of(opcode)] += count
        return {kind: count / (len(self.instructions) * self.warps) for kind, count in total.items()}

    def __add__(self, other: "Counts") -> "Counts":
        """Of more blocks of the same launch."""
        joined = {"threads": self.threads}
        for f in fields(self)[1:]:
            mine, its = getattr(self, f.name), getattr(other, f.name)
            joined[f.name] = np.concatenate([mine, its]) if isinstance(mine, np.ndarray) else mine + its
        return Counts(**joined)
