"""The sampler as Triton compiles it, executed; run by `test_executed`, and by `make test-compiled` among
the rest."""

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parent))

import golden_rows
import sampler_cases
from executed import RaceError, executing
from ptx import Fault
from ptx.parse import Number
from sampler_cases import SHORT, Case, differences

from rowseed.kernels import fused

TARGETS = ("sm_80", "sm_90")


@triton.jit
def _shapes(x, sums, turned, scan, picked, M: tl.constexpr, N: tl.constexpr):
    rows, columns, all_ids = tl.arange(0, M), tl.arange(0, N), tl.arange(0, M * N)
    a = tl.load(x + rows[:, None] * N + columns[None, :])
    tl.store(sums + rows, tl.sum(a, 1))
    tl.store(turned + columns[:, None] * M + rows[None, :], tl.trans(a))
    flat = tl.reshape(a, [M * N])
    tl.store(scan + all_ids, tl.cumsum(flat, 0))
    tl.store(picked + all_ids, tl.gather(flat, (all_ids * 7 + 3) % (M * N), 0))


@pytest.mark.parametrize("target", TARGETS)
def test_layouts(target):
    x = torch.randint(-999, 999, (32, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    sums, turned = torch.zeros(32, dtype=torch.int32), torch.zeros(64, 32, dtype=torch.int32)
    scan, picked = torch.zeros(2, 2048, dtype=torch.int32)
    with executing(target, new={"_shapes": ("sums", "turned", "scan", "picked")}) as runs:
        _shapes[(1,)](x, sums, turned, scan, picked, 32, 64, num_warps=4)
    flat = x.reshape(-1)
    assert torch.equal(sums, x.sum(1).int())
    assert torch.equal(turned, x.T)
    assert torch.equal(scan, flat.cumsum(0).int())
    assert torch.equal(picked, flat[(torch.arange(2048) * 7 + 3) % 2048])
    assert runs[0].counts.barriers.tolist()[0] > 0


@triton.jit
def _softmax(x, y, N, BLOCK: tl.constexpr):
    ids, row = tl.arange(0, BLOCK), tl.program_id(0)
    a = tl.load(x + row * N + ids, mask=ids < N, other=-float("inf"))
    e = tl.exp(a - tl.max(a, 0))
    tl.store(y + row * N + ids, e / tl.sum(e, 0), mask=ids < N)


@pytest.mark.parametrize("target", TARGETS)
def test_approximate_functions_are_reported(target):
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    y = torch.zeros_like(x)
    with executing(target) as runs:
        _softmax[(5,)](x, y, 1000, 1024, num_warps=4)
    torch.testing.assert_close(y, x.softmax(-1), rtol=1e-5, atol=0)
    assert {"ex2.approx.f32", "div.full.f32"} <= set(runs[0].counts.free)


@triton.jit
def _trips(trips, out, N: tl.constexpr):
    row, x, left = tl.program_id(0), tl.arange(0, N) + 1, tl.load(trips + tl.program_id(0))
    while left > 0:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        left -= 1
    tl.store(out + row * N + tl.arange(0, N), x)


@pytest.mark.parametrize("order", [None, 1])
def test_blocks_that_loop_differently(order):
    trips, out = torch.tensor([0, 1, 5, 17, 3]), torch.zeros(5, 64, dtype=torch.int32)
    with executing("sm_90", order=order) as runs:
        _trips[(5,)](trips, out, 64, num_warps=2)
    for row, count in enumerate(trips.tolist()):
        x = torch.arange(1, 65)
        for _ in range(count):
            x = torch.where(x % 2 == 0, x // 2, 3 * x + 1)
        assert torch.equal(out[row], x.int())
    executed = runs[0].counts.instructions
    assert executed.argsort().tolist() == trips.argsort().tolist()


@triton.jit
def _reach(x, y, N: tl.constexpr):
    ids = tl.arange(0, N)
    tl.store(y + ids, tl.load(x + ids))


def test_bounds_and_what_is_new():
    x, y = torch.arange(128), torch.zeros(128, dtype=torch.int64)
    with executing("sm_90"):
        _reach[(1,)](x, y, 128)
    assert torch.equal(x, y)
    with executing("sm_90"), pytest.raises(Fault, match="global memory out of bounds"):
        _reach[(1,)](x[:100], y, 128)
    with executing("sm_90"), pytest.raises(Fault, match="global memory out of bounds"):
        _reach[(1,)](x, torch.zeros(128, 2, dtype=torch.int64)[:, 0], 128)  # between the elements of a column
    with executing("sm_90", new={"_reach": ("x",)}), pytest.raises(Fault, match="nothing has written"):
        _reach[(1,)](x, y, 128)


@triton.jit
def _last_wins(y):
    tl.store(y, tl.program_id(0))


def test_blocks_that_write_one_place_race():
    with executing("sm_90"), pytest.raises(RaceError, match="1 races"):
        _last_wins[(2,)](torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_equals_the_reference(target, case):
    got, runs = case.execute(target)
    assert differences(case.draw("torch"), got) == {}
    assert runs[0].counts.free == {}  # every bit is the target's only choice
    assert len(runs) == 1


def test_counts():
    """Barriers are the same for every ordinary row: none goes the long way."""
    for top_p in (1.0, 0.9):
        case = Case("", rows=sampler_cases.ordinary_rows, top_p=top_p)
        _, (run,) = case.execute("sm_90")
        counts = run.counts
        assert len(set(counts.barriers.tolist())) == 1
        assert np.ptp(counts.instructions_a_warp) == 0
        assert 0 < counts.instructions_a_warp[0] < 2000
        assert (counts.shared_passes >= counts.shared_ideal).all() and counts.shared_ideal.all()
        # A row is 4,096 bytes: 128 sectors, and the candidates' own.
        assert (counts.sectors_read > 128).all() and (counts.sectors_read < 400).all()
        assert sum(counts.kinds().values()) == pytest.approx(counts.instructions_a_warp.mean())


def test_golden_rows():
    with patch.object(fused, "INTERPRETED", True), executing("sm_90", measure=False):
        done, wrong = golden_rows.wrong_rows("triton")
    assert wrong == []
    assert done > 400


def without_barrier(number):
    def change(kernel, program):
        barriers = [i for i, one in enumerate(program.instructions) if one.opcode == "bar.sync"]
        return program.replaced(barriers[number], "")

    return change


def other_lane(kernel, program):
    for i, one in enumerate(program.instructions):
        if one.opcode == "shfl.sync.up.b32" and one.operands[2] == Number(1):  # of a prefix sum
            return program.replaced(i, one.text.replace(", 1, 0", ", 2, 0"))
    raise AssertionError("no shuffle")


@pytest.mark.parametrize("number", [0, 3, 6])
def test_a_barrier_left_out_is_a_race(number):
    with pytest.raises(RaceError, match="what another thread"):
        SHORT[0].execute("sm_90", change=without_barrier(number))


def test_a_wrong_lane_is_another_code():
    try:
        got, _ = SHORT[1].execute("sm_90", change=other_lane)
    except Fault:
        return
    assert differences(SHORT[1].draw("torch"), got)
