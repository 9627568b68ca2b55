"""Row streams: the (seed, offset) of every row of a batch, in one device tensor of a fixed address."""

import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowseed.kernels.noise import FLOAT32_MAX
from rowseed.kernels.philox import SCHEME, TAG_GLOBAL_SEED, TAG_ITEM_SEED, philox4x32

SEEDED, INACTIVE = 1, 2
"""Flag bits of a line: the row has a seed of its own; the row is not sampled."""

_RING = 4
_INT32_MAX = 2**31 - 1
_made = itertools.count()


def check_seed(value: object, name: str = "seed") -> int:
    """A seed as the int64 of the same 64 bits.

    value: an int in [-2**63, 2**64); -1 and 2**64 - 1 are one seed. Raises TypeError for anything
    that is no integer (bool, float and str included) and ValueError outside the range.
    """
    if type(value) is int and -(2**63) <= value < 2**63:
        return value  # first, since it runs for every seeded row of every step
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int in [-2**63, 2**64), got {value!r}")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must be an int in [-2**63, 2**64), got {value!r}")
    return _wrap(int(value))


def item_seed(seed: int, index: int) -> int:
    """The seed of item ``index`` (from 0) of a batch that has one seed: 63 bits, so a non-negative int64.

    Philox of the seed and the index, in a part of the counter space that no row draws from. Raises what
    `check_seed` raises.
    """
    counter = (index & 0xFFFFFFFF, index >> 32, 0)
    return _two_words(check_seed(seed), counter, TAG_ITEM_SEED) & (2**63 - 1)


def _wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _int64(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Integers as int64 of the same 64 bits; refused one by one where they are not."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return values.astype(np.int64)
    if {*map(type, values)} <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    return np.array([check_seed(value, f"{name}[{i}]") for i, value in enumerate(values)], np.int64)


class _Mirror:
    """A device tensor of fixed address, and the host buffers that its lines are copied from.

    A host buffer is written again only when the copy from it is known to have finished.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._asynchronous = device.type != "cpu"
        slots = _RING if self._asynchronous else 1
        # vLLM builds models with the accelerator as torch's default device: the host must be named.
        self._hosts = [
            torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=self._asynchronous) for _ in range(slots)
        ]
        self._views = [host.numpy() for host in self._hosts]
        self._copied: list[torch.cuda.Event | None] = [None] * slots
        self._slot = 0

    def next_buffer(self) -> np.ndarray:
        """The host buffer to fill before `push`."""
        self._slot = (self._slot + 1) % len(self._hosts)
        copied = self._copied[self._slot]
        if copied is not None:
            copied.synchronize()
        return self._views[self._slot]

    def push(self, lines: int) -> None:
        """Copies the first `lines` lines of the buffer to the device, on the current stream."""
        self.tensor[:lines].copy_(self._hosts[self._slot][:lines], non_blocking=True)
        if self._asynchronous:
            event = self._copied[self._slot]
            if event is None:
                event = self._copied[self._slot] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.tensor.device))


class RowStreams:
    """Packs a batch's seeds and offsets into the tensor that ``sample`` and captured graphs read.

    Parameters
    ----------
    max_rows : The largest batch, padding included.
    device : Where ``tensor`` lives.
    global_seed : Key of the rows without a seed; an int in [-2**63, 2**64). None derives one from
        ``torch.initial_seed()``, `rank` and the number of RowStreams made before in this process.
    global_offset : Where the global stream starts, for continuing it elsewhere.
    rank : Data-parallel rank: replicas with one torch seed get different global seeds.

    ``tensor``, int64 [max_rows + 1, 3] on the device, never moves. Line 0: global seed, global
    offset, number of rows in use. Line 1 + r: seed, offset, flags of row r.

    A copy (copy, deepcopy, pickle) has a tensor of its own and draws what the original would. A forked
    child's unseeded rows leave the parent's stream: its `global_seed` is another.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device | str,
        *,
        global_seed: int | None = None,
        global_offset: int = 0,
        rank: int = 0,
    ):
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be an int of at least 1, got {max_rows!r}")
        made_before = next(_made)
        if global_seed is None:
            global_seed = _derived_global_seed(rank, made_before)
        self.max_rows = max_rows
        self.device = torch.device(device)
        self.global_seed = check_seed(global_seed, "global_seed")
        self.global_offset = check_seed(global_offset, "global_offset")
        self._mirror = _Mirror((max_rows + 1, 3), torch.int64, self.device)
        self.tensor: Tensor = self._mirror.tensor
        self._packed: tuple[list[int | None], np.ndarray, int] | None = None  # for `repack`
        _alive.add(self)

    def __reduce__(self) -> tuple:
        """Copies and pickles have buffers of their own, and go on at this place of this global stream."""
        stream = {"global_seed": self.global_seed, "global_offset": self.global_offset}
        return _restored, (type(self), self.max_rows, self.device, stream, self.tensor.cpu())

    def pack(
        self,
        seeds: Sequence[int | None],
        offsets: Sequence[int] | np.ndarray,
        padded_rows: int | None = None,
    ) -> Tensor:
        """Sends the lines of a batch to the device and returns ``tensor[: padded_rows + 1]``.

        seeds: one a row, None for a row on the global stream. offsets: the row's step counter, any
        64-bit integer. padded_rows: the batch's size with padding, at least len(seeds) (the
        default); rows past len(seeds) are not sampled.

        The copy is asynchronous, on the current stream, and covers the lines in use. The global
        offset advances by padded_rows. Raises TypeError or ValueError and leaves everything as it
        was if an argument is refused.
        """
        for name, values in (("seeds", seeds), ("offsets", offsets)):
            if isinstance(values, Tensor):
                raise TypeError(f"{name} must be integers on the host, got a tensor: give {name}.tolist()")
            if isinstance(values, np.ndarray) and values.ndim != 1:
                raise ValueError(f"{name} must have one dimension, got shape {list(values.shape)}")
        rows = len(seeds)
        padded_rows = rows if padded_rows is None else padded_rows
        if isinstance(padded_rows, bool) or not isinstance(padded_rows, int):
            raise TypeError(f"padded_rows must be an int, got {padded_rows!r}")
        if not rows <= padded_rows <= self.max_rows:
            raise ValueError(
                f"padded_rows must be in [{rows}, {self.max_rows}] for {rows} seeds and max_rows"
                f" {self.max_rows}, got {padded_rows}"
            )
        if len(offsets) != rows:
            raise ValueError(f"offsets must have one value a seed, {rows}, got {len(offsets)}")
        flags: int | list[int] = SEEDED
        numbers: Sequence[int] = seeds  # type: ignore[assignment]
        if None in seeds:
            flags = [0 if seed is None else SEEDED for seed in seeds]
            numbers = [0 if seed is None else seed for seed in seeds]
        seed_column, offset_column = _int64(numbers, "seeds"), _int64(offsets, "offsets")

        lines = self._mirror.next_buffer()
        lines[0] = self.global_seed, self.global_offset, rows
        lines[1 : rows + 1, 0] = seed_column
        lines[1 : rows + 1, 1] = offset_column
        lines[1 : rows + 1, 2] = flags
        self._mirror.push(rows + 1)
        self.global_offset = _wrap(self.global_offset + padded_rows)
        self._packed = list(seeds), offset_column, self.global_seed
        return self.tensor[: padded_rows + 1]

    def repack(
        self,
        seeds: Sequence[int | None],
        offsets: Sequence[int] | np.ndarray,
        padded_rows: int | None = None,
    ) -> Tensor:
        """As `pack`, for codebooks not drawn yet; sends nothing if these are the rows that were packed last.

        Unseeded rows then stay at their place of the global stream, where the codebooks differ. So only one
        call after each `pack` can do without sending.
        """
        packed, self._packed = self._packed, None
        rows = len(seeds)
        padded_rows = rows if padded_rows is None else padded_rows
        if (
            packed is not None
            and packed[0] == seeds
            and {*map(type, seeds)} <= {int, type(None)}  # True is no 1
            and packed[2] == self.global_seed  # not so in a child that was forked between the two
            and type(padded_rows) is int
            and rows <= padded_rows <= self.max_rows
            and np.array_equal(packed[1], offsets)
        ):
            return self.tensor[: padded_rows + 1]
        sent = self.pack(seeds, offsets, padded_rows)
        self._packed = None
        return sent


def _derived_global_seed(rank: int, made_before: int) -> int:
    """Tensor-parallel ranks agree, replicas and runners of one process differ."""
    return _two_words(torch.initial_seed(), (rank, made_before, 0))


def _two_words(key: int, counter: tuple[int, int, int], tag: int = TAG_GLOBAL_SEED) -> int:
    """64 bits of Philox in the part of the counter space that seeds of this kind are taken from."""
    # Plain ints do as well as tensors, and take none of torch's locks in a forked child.
    words = philox4x32((*counter, SCHEME << 24 | tag << 16), (key, key >> 32))  # type: ignore[arg-type]
    return int(words[0]) | int(words[1]) << 32


_alive: weakref.WeakSet[RowStreams] = weakref.WeakSet()
_forks = 0
_forking = threading.Lock()


def _after_fork_in_parent() -> None:
    global _forks
    _forks += 1
    _forking.release()


def _after_fork_in_child() -> None:
    """What a child inherits would repeat its parent's and its siblings' unseeded draws: it gets another key.

    The n-th fork of a process gives the n-th key, so that a program started again repeats itself.
    """
    for rows in list(_alive):
        rows.global_seed = _wrap(_two_words(rows.global_seed, (_forks, 0, 1)))
    _forking.release()


if hasattr(os, "register_at_fork"):
    # Two threads that fork at once must not give one number to both children.
    os.register_at_fork(
        before=_forking.acquire,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


def _restored(kind: Any, max_rows: int, device: torch.device, stream: dict[str, int], lines: Tensor) -> Any:
    """A RowStreams or RowParameters with these lines: a copied tensor would not see what `pack` writes."""
    rows = kind(max_rows, device, **stream)
    rows._mirror.tensor.copy_(lines)
    return rows


class RowParameters:
    """Temperature, top_k and top_p of every row, on the device at fixed addresses.

    Parameters
    ----------
    max_rows : The largest batch, padding included.
    device : Where the tensors live.
    temperature, top_k, top_p : What every line starts with.

    ``temperature`` and ``top_p`` are float32 [max_rows], ``top_k`` int32 [max_rows]: columns of one
    buffer, so that one copy a step moves them.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device | str,
        *,
        temperature: float = 0.9,
        top_k: int = 50,
        top_p: float = 1.0,
    ):
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be an int of at least 1, got {max_rows!r}")
        self.max_rows = max_rows
        self.device = torch.device(device)
        self._mirror = _Mirror((max_rows, 3), torch.int32, self.device)
        buffer = self._mirror.tensor
        self.temperature: Tensor = buffer[:, 0].view(torch.float32)
        self.top_k: Tensor = buffer[:, 1]
        self.top_p: Tensor = buffer[:, 2].view(torch.float32)
        self._filled: tuple[float, int, float] | None = None
        self.fill(temperature, top_k, top_p)

    def __reduce__(self) -> tuple:
        """Copies and pickles have buffers of their own, with the same lines."""
        lines = self._mirror.tensor.cpu()
        return _restored, (type(self), self.max_rows, self.device, {}, lines), {"_filled": self._filled}

    def fill(self, temperature: float, top_k: int, top_p: float) -> None:
        """Gives every line the same parameters; sends nothing if they have them already. Raises as `pack`."""
        if self._filled != (temperature, top_k, top_p):
            lines = self.max_rows
            self.pack([temperature] * lines, [top_k] * lines, [top_p] * lines)
            self._filled = temperature, top_k, top_p

    def pack(
        self,
        temperature: Sequence[float] | np.ndarray,
        top_k: Sequence[int] | np.ndarray,
        top_p: Sequence[float] | np.ndarray,
    ) -> None:
        """Sends the parameters of the first len(temperature) rows to the device, asynchronously.

        temperature in [0, inf), top_p in [0, 1], top_k any integers (0 and below: off). Raises
        TypeError or ValueError and leaves everything as it was if one is refused.
        """
        rows = len(temperature)
        if rows > self.max_rows:
            raise ValueError(f"temperature must have at most {self.max_rows} values, got {rows}")
        for name, values in (("top_k", top_k), ("top_p", top_p)):
            if len(values) != rows:
                raise ValueError(f"{name} must have one value a temperature, {rows}, got {len(values)}")
        temperatures = _float32(temperature, "temperature", FLOAT32_MAX)
        top_ps = _float32(top_p, "top_p", 1.0)
        top_ks = _int64(top_k, "top_k").clip(0, _INT32_MAX)

        lines = self._mirror.next_buffer()
        lines[:rows, 0] = temperatures.view(np.int32)
        lines[:rows, 1] = top_ks
        lines[:rows, 2] = top_ps.view(np.int32)
        self._filled = None
        self._mirror.push(rows)


def _float32(values: Sequence[float] | np.ndarray, name: str, largest: float) -> np.ndarray:
    array = np.asarray(values)
    has_bool = not isinstance(values, np.ndarray) and bool in {*map(type, values)}
    if array.size and (has_bool or array.dtype.kind not in "iuf"):
        raise TypeError(f"{name} must be numbers in [0, {largest:.8g}], got {values!r}")
    fine = (array >= 0) & (array <= largest)
    if not fine.all():
        i = int(np.argmin(fine))
        raise ValueError(f"{name}[{i}] must be in [0, {largest:.8g}], got {array[i]!r}")
    return array.astype(np.float32)
