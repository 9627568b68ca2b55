"""Global and shared memory: bounds, what is initialised, who touched what since the last synchronisation.

Everything is kept by cells of as many bytes as the program's smallest access; addresses are multiples of
their access's size, or it is a fault.
"""

import numpy as np

from .counts import Counts
from .errors import Fault
from .formats import UNSIGNED

GLOBAL_BASE = 0x7F0000000000
SHARED_BASE = 1024
"""No address of shared memory is near 0: a null pointer is a fault."""
GAP = 4096
"""Bytes between two arrays that nothing may touch."""


class Threads:
    """Which threads an instruction runs in, and what orders their accesses.

    ids: int64 [N], unique in the launch's batch; epochs: int64 [N] or a number, larger after a
    synchronisation.
    """

    def __init__(self, ids, epochs):
        self.ids, self.epochs = ids, epochs


class Accesses:
    """The last thread that touched each cell, and whether others did since their group last met.

    group: threads of a group, whose epochs order accesses among themselves (a warp in shared memory, a
    block in global memory). Between groups nothing does, but `forget`.
    """

    ALONE, GROUP, ANY = 0, 1, 2

    def __init__(self, cells: int, group: int):
        self.group = group
        self.who = np.zeros(cells, np.int32)  # thread + 1; 0: nobody
        self.spread = np.zeros(cells, np.uint8)
        self.epoch = np.zeros(cells, np.int32)

    def forget(self, cells: slice) -> None:
        self.who[cells] = 0

    def unordered(self, at, threads: Threads):
        """bool, of at's shape [N, W]: other threads have touched these cells, and nothing came in between."""
        who, me = self.who[at], (threads.ids + 1)[:, None]
        spread = self.spread[at]
        others = (who != 0) & ((who != me) | (spread != self.ALONE))
        if others.any():
            ours = (who - 1) // self.group == (me - 1) // self.group
            earlier = self.epoch[at] < np.reshape(threads.epochs, (-1, 1))
            others &= ~(ours & earlier & (spread != self.ANY))
        return others

    def note(self, at, threads: Threads, unordered) -> None:
        """These threads touch these cells; unordered: what the method of that name says of them."""
        me = np.broadcast_to((threads.ids + 1)[:, None], at.shape)
        spread = np.zeros(at.shape, np.uint8)
        if unordered.any():
            before = self.who[at]
            mixed = np.where((before - 1) // self.group == (me - 1) // self.group, self.GROUP, self.ANY)
            spread = np.where(unordered, np.maximum(mixed, self.spread[at]), spread).astype(np.uint8)
        self.who[at], self.spread[at] = me, spread
        self.epoch[at] = np.broadcast_to(np.reshape(threads.epochs, (-1, 1)), at.shape)
        last = self.who[at]
        if (shared := last != me).any():  # several threads in this very instruction
            cells, near = at[shared], (last[shared] - 1) // self.group == (me[shared] - 1) // self.group
            self.spread[cells[near]] = np.maximum(self.spread[cells[near]], self.GROUP)
            self.spread[cells[~near]] = self.ANY


class Space:
    """One address space of a batch of blocks. cell: bytes; base: the first cell's address."""

    name = ""

    def __init__(self, cells: int, cell: int, group: int):
        self.cell = cell
        self.data = np.zeros(cells, UNSIGNED[cell])
        self.ready = np.zeros(cells, bool)
        self.writers, self.readers = Accesses(cells, group), Accesses(cells, group)

    def cells(self, addresses, size: int, threads: Threads, where: str):
        """int64 [N, size / cell]; raises `Fault` for an address that is misaligned or out of bounds."""
        raise NotImplementedError

    def load(self, addresses, size: int, threads: Threads, where: str, counts: Counts):
        """Bytes, uint8 [N, size]."""
        at = self.cells(addresses, size, threads, where)
        ready = self.ready[at]
        if not ready.all():
            raise Fault(
                f"{where}: reads {self.name} memory that nothing has written, {_at(addresses, ~ready)}"
            )
        self._race(
            self.writers.unordered(at, threads), "reads what another thread wrote", addresses, where, counts
        )
        self.readers.note(at, threads, self.readers.unordered(at, threads))
        return self.data[at].view(np.uint8)

    def store(self, addresses, data, threads: Threads, where: str, counts: Counts) -> None:
        """data: uint8 [N, size]."""
        at = self.cells(addresses, data.shape[1], threads, where)
        data = np.ascontiguousarray(data).view(self.data.dtype)
        self._race(
            self.readers.unordered(at, threads), "writes what another thread read", addresses, where, counts
        )
        unordered = self.writers.unordered(at, threads)
        other_value = unordered & (self.data[at] != data)
        self.writers.note(at, threads, unordered)
        self.data[at], self.ready[at] = data, True
        other_value |= self.data[at] != data  # by another lane of this very instruction
        self._race(other_value, "writes what another thread wrote", addresses, where, counts)
        if unordered.any() or (self.writers.who[at] != (threads.ids + 1)[:, None]).any():
            counts.same_value[where] += not other_value.any()

    def _race(self, found, what: str, addresses, where: str, counts: Counts) -> None:
        if found.any():
            counts.races.append(f"{where}: {what} in {self.name} memory, {_at(addresses, found)}")

    def _aligned(self, addresses, size: int, where: str) -> None:
        if (addresses & (size - 1)).any():
            wrong = (addresses & (size - 1) != 0)[:, None]
            raise Fault(f"{where}: an address that is no multiple of {size}, {_at(addresses, wrong)}")


def _at(addresses, wrong) -> str:
    wrong = wrong.any(1)
    return f"{int(wrong.sum())} threads, first at {int(addresses[np.argmax(wrong)]):#x}"


class SharedMemory(Space):
    name = "shared"

    def __init__(self, blocks: int, size: int, cell: int, threads: int):
        self.size, self.threads = size, threads
        self.per_block = -(-size // cell)
        super().__init__(blocks * self.per_block, cell, 32)

    def cells(self, addresses, size, threads, where):
        self._aligned(addresses, size, where)
        offsets = addresses - SHARED_BASE
        outside = (offsets < 0) | (offsets + size > self.size)
        if outside.any():
            raise Fault(f"{where}: shared memory out of bounds, {_at(addresses, outside[:, None])}")
        first = threads.ids // self.threads * self.per_block + offsets // self.cell
        return first[:, None] + np.arange(size // self.cell)

    def synchronised(self, blocks) -> None:
        """bool [blocks]: those whose threads have all met."""
        for block in np.nonzero(blocks)[0]:
            cells = slice(block * self.per_block, (block + 1) * self.per_block)
            self.writers.forget(cells)
            self.readers.forget(cells)


class GlobalMemory:
    """The arrays that a launch is given, each at an address of its own with gaps around it.

    Of an array with strides only its elements may be touched, not what lies between them.
    """

    def __init__(self):
        self._arrays: list[tuple[int, np.ndarray, np.ndarray | bool]] = []
        self._end = GAP

    def add(self, array: np.ndarray, ready: np.ndarray | bool = True, alignment: int = 0) -> int:
        """The array's address, `alignment` modulo 256. ready: which elements are initialised."""
        span = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
        start = -(-self._end // 256) * 256 + alignment % 256
        self._end = start + max(span, 0) + GAP
        self._arrays.append((start, array, ready))
        return GLOBAL_BASE + start

    def opened(self, cell: int, block_threads: int) -> "GlobalSpace":
        """cell: bytes of the smallest access."""
        cell = min([cell, *(array.itemsize for _, array, _ in self._arrays)])
        return GlobalSpace(self._arrays, self._end, cell, block_threads)


class GlobalSpace(Space):
    name = "global"

    def __init__(self, arrays, end: int, cell: int, block_threads: int):
        super().__init__(-(-end // cell), cell, block_threads)
        self.allowed = np.zeros(len(self.data), bool)
        self._places = []
        for start, array, ready in arrays:
            if array.size:
                at = self._cells_of(start, array)
                self._places.append((at, array))
                self.data[at] = (
                    np.ascontiguousarray(array).reshape(-1).view(self.data.dtype).reshape(at.shape)
                )
                self.allowed[at] = True
                self.ready[at] = np.broadcast_to(ready, array.shape).reshape(-1, 1)
            else:
                self._places.append((np.zeros((0, 1), np.int64), array))

    def _cells_of(self, start: int, array: np.ndarray):
        at = np.full(array.shape, start, np.int64)
        for axis, stride in enumerate(array.strides):
            shape = [-1 if i == axis else 1 for i in range(array.ndim)]
            at += (np.arange(array.shape[axis]) * stride).reshape(shape)
        return at.reshape(-1, 1) // self.cell + np.arange(array.itemsize // self.cell)

    def cells(self, addresses, size, threads, where):
        self._aligned(addresses, size, where)
        first = (addresses - GLOBAL_BASE) // self.cell
        count = size // self.cell
        outside = (addresses < GLOBAL_BASE) | (first + count > len(self.data))
        at = np.where(outside, 0, first)[:, None] + np.arange(count)
        wrong = ~self.allowed[at]
        if wrong.any():
            raise Fault(f"{where}: global memory out of bounds, {_at(addresses, wrong)}")
        return at

    def write_back(self) -> list[np.ndarray]:
        """Into the arrays; returns which elements of each are initialised."""
        ready = []
        for at, array in self._places:
            if array.size:
                array[...] = self.data[at].reshape(-1).view(array.dtype).reshape(array.shape)
            ready.append(self.ready[at].all(1).reshape(array.shape))
        return ready
