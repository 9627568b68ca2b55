"""Not one read or write outside the tensors' own elements, for odd sizes, strides and offsets.

Every tensor is a strided window of a larger poisoned one. The interpreter's loads and stores are
recorded, address by address, and each must be an element that the contract lets the kernel touch:
rows that are inactive or past the batch's number lend it only their code. On a GPU: `make sanitize`.
"""

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from rowseed.kernels import fused
from rowseed.kernels.sampling import Gather, sample
from rowseed.kernels.streams import INACTIVE, RowStreams

pytestmark = pytest.mark.skipif(not fused.INTERPRETED, reason="records the Triton interpreter's addresses")

SENTINEL = -7
ROOT = Path(__file__).parents[2]


class Window:
    """A strided view in the middle of a larger tensor of poison."""

    def __init__(self, shape, dtype, *, gaps=None, before=3, fill=None):
        """gaps: elements of poison after each row of a dimension but the last (default: an odd one each)."""
        gaps = [1] * (len(shape) - 1) if gaps is None else gaps
        strides = [1]
        for size, gap in zip(reversed(shape[1:]), reversed(gaps), strict=True):
            strides.insert(0, strides[0] * size + gap)
        poison = math.nan if dtype.is_floating_point else SENTINEL
        self.whole = torch.full((before + strides[0] * shape[0] + 5,), poison, dtype=dtype)
        self.view = self.whole.as_strided(shape, strides, before)
        if fill is not None:
            self.view.copy_(fill)
        self._original = self.whole.clone()

    def poison_is_whole(self):
        """Whether everything outside the view is as it was, bit for bit."""
        restored = self.whole.clone()
        restored.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(
            self._original.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        )
        return torch.equal(restored.view(torch.uint8), self._original.view(torch.uint8))


def addresses(tensor):
    """The address of every element, int64 [numel]."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dimension] = size
        offsets += (torch.arange(size) * stride).view(shape)
    return (offsets.flatten() * tensor.element_size() + tensor.data_ptr()).numpy()


@contextmanager
def recorded(monkeypatch):
    """Yields two sets that fill with the addresses the interpreter loads and stores."""
    loads, stores = set(), set()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(into, pointers, mask):
        at, on = np.broadcast_arrays(pointers.data, mask.data)
        into.update(at[on.astype(bool)].astype(np.int64).tolist())

    def masked_load(self, ptrs, mask, *args, **kwargs):
        note(loads, ptrs, mask)
        return load(self, ptrs, mask, *args, **kwargs)

    def masked_store(self, ptrs, value, mask, *args, **kwargs):
        note(stores, ptrs, mask)
        return store(self, ptrs, value, mask, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
        yield loads, stores


CASES = (
    # B, C, V, dtype, top_k, top_p, gather
    (1, 1, 1, torch.float32, 0, 1.0, True),
    (2, 1, 3, torch.bfloat16, 2, 0.9, True),
    (3, 1, 65, torch.float16, 50, 0.9, True),
    (3, 2, 63, torch.bfloat16, 5, 1.0, False),
    (1, 3, 1025, torch.float32, 50, 0.8, False),
    (5, 1, 257, torch.bfloat16, 0, 1.0, True),
    (1, 1, fused.ONE_BLOCK + 1, torch.bfloat16, fused.SLOTS + 1, 0.9, True),
    (2, 1, fused.ONE_BLOCK + 1, torch.float16, fused.SLOTS - 1, 0.9, True),  # in parts, with scratch memory
)


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(("B", "C", "V", "dtype", "top_k", "top_p", "gather"), CASES)
def test_no_access_outside(B, C, V, dtype, top_k, top_p, gather, tensors, monkeypatch):
    generator = torch.Generator().manual_seed(V)
    D, E = 7, 5
    shape = (B, C, V) if C > 1 else (B, V)
    logits = Window(shape, dtype, fill=torch.randn(shape, generator=generator))
    out = Window(shape[:-1], torch.int64, gaps=[3] * (len(shape) - 2))
    status = Window(shape[:-1], torch.int32, gaps=[2] * (len(shape) - 2))
    temperature = Window((B,), torch.float32, fill=torch.full((B,), 0.9))
    top_ks = Window((B,), torch.int32, fill=torch.full((B,), top_k))
    top_ps = Window((B,), torch.float32, fill=torch.full((B,), top_p))
    min_ps = Window((B,), torch.float32, fill=torch.full((B,), 0.001))
    logprob = Window(shape[:-1], torch.float32, gaps=[4] * (len(shape) - 2))
    table = Window((V, D), dtype, fill=torch.randn(V, D, generator=generator))
    next_table = Window((V + 2, E), dtype, fill=torch.randn(V + 2, E, generator=generator))
    total = Window((B, D), torch.float32, fill=torch.randn(B, D, generator=generator))
    next_input = Window((B, E), dtype, gaps=[11], fill=torch.zeros(B, E))
    streams = Window((B + 1, 3), torch.int64, gaps=[0])
    streams.view.copy_(RowStreams(B, "cpu", global_seed=1).pack([None] + [2] * (B - 1), [3] * B))
    idle = []
    if B > 1:
        streams.view[2, 2] |= INACTIVE
        idle.append(1)
    if B > 2:
        streams.view[0, 2] = B - 1  # the last row is past the number of rows in use
        idle.append(B - 1)
    active = [row for row in range(B) if row not in idle]
    windows = [logits, out, status, logprob, temperature, top_ks, top_ps, min_ps, streams]
    windows += [table, next_table, total, next_input]

    arguments = {"temperature": 0.9, "top_k": top_k, "top_p": top_p, "min_p": 0.001, "codebook": 2}
    if tensors:
        arguments |= {"temperature": temperature.view, "top_k": top_ks.view}
        arguments |= {"top_p": top_ps.view, "min_p": min_ps.view}
    clean_total = total.view.clone()
    epilogue = clean_epilogue = None
    if gather:
        epilogue = Gather(table.view, total.view, next_table.view, next_input.view)
        clean_epilogue = Gather(
            table.view.clone(), clean_total, next_table.view.clone(), next_input.view.clone()
        )
    expected = sample(
        logits.view.clone(), streams.view.clone(), gather=clean_epilogue, backend="torch", **arguments
    )

    scratch = []  # what a split vocabulary writes in one launch and reads in the next

    def poisoned_scratch(parts, device):
        sizes = (parts * fused.SLOTS, torch.float32), (parts * fused.SLOTS, torch.int32), (parts, torch.int32)
        scratch.extend(Window((size,), dtype) for size, dtype in sizes)
        return tuple(window.view for window in scratch)

    monkeypatch.setattr(fused, "_scratch", poisoned_scratch)
    with recorded(monkeypatch) as (loads, stores):
        sample(
            logits.view,
            streams.view,
            out=out.view,
            status=status.view,
            logprob=logprob.view,
            gather=epilogue,
            backend="triton",
            **arguments,
        )

    readable = [addresses(tensor) for tensor in (streams.view, table.view, next_table.view)]
    written = [addresses(out.view)]
    for row in active:
        here = slice(row, row + 1)
        read = logits, temperature, top_ks, top_ps, min_ps, total
        readable += [addresses(window.view[here]) for window in read]
        written += [addresses(window.view[here]) for window in (status, logprob, total, next_input)]
    for window in scratch:
        share = len(window.view) // B
        used = [addresses(window.view[row * share : (row + 1) * share]) for row in active]
        readable += used
        written += used
    windows += scratch
    assert bool(scratch) == (V > fused.ONE_BLOCK and (tensors or top_k <= fused.SLOTS))
    assert loads <= set(np.concatenate(readable).tolist())
    assert stores <= set(np.concatenate(written).tolist())
    assert loads >= {address for row in active for address in addresses(logits.view[row]).tolist()}
    assert all(window.poison_is_whole() for window in windows)
    assert torch.equal(out.view, expected)
    assert out.view[idle].eq(0).all() and status.view[idle].eq(SENTINEL).all()
    if gather:
        assert torch.equal(total.view, clean_total)


@triton.jit
def _copies_one_too_many(source_ptr, target_ptr, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at <= N), mask=at <= N)


def test_the_recorder_catches_a_kernel_that_goes_one_too_far(monkeypatch):
    source = Window((6,), torch.float32, fill=torch.ones(6))
    target = Window((6,), torch.float32)
    with recorded(monkeypatch) as (loads, stores):
        _copies_one_too_many[(1,)](source.view, target.view, 6, BLOCK=16)
    assert loads - set(addresses(source.view).tolist()) == {source.view.data_ptr() + 24}
    assert stores - set(addresses(target.view).tolist()) == {target.view.data_ptr() + 24}


def test_numba_stays_inside_its_arrays():
    """The sampler's tests once more, compiled with every index checked."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "numba"]
    files = [
        "tests/kernels/test_sampling.py",
        "tests/kernels/test_min_p_logprob.py",
        "tests/kernels/test_reference.py",
    ]
    done = subprocess.run(
        [*command, *files],
        cwd=ROOT,
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
