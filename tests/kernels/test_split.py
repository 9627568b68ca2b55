"""Vocabularies split over programs: the codes are the reference's, whatever the parts."""

import pytest
import torch

from rowseed.kernels import fused
from rowseed.kernels.sampling import sample

V = 9001
ROWS = [  # top_k, top_p: rows that are split, and some that are not
    (50, 1.0),
    (128, 0.9),
    (1, 1.0),
    (0, 1.0),
]


@pytest.fixture(scope="module")
def logits():
    """Ties across parts, a part with nothing alive, the largest logit in the last part."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(ROWS), V, generator=generator) * 8).round() / 4
    logits[:, 4096:8192] = -torch.inf
    logits[:, V - 1] = logits.amax(-1)
    return logits.to(torch.bfloat16)


def draw(logits, lines, backend):
    B = len(ROWS)
    status, logprob = torch.full((B,), -1, dtype=torch.int32), torch.full((B,), 9.0)
    k, p = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    streams = lines(*((seed, 5) for seed in range(B)))
    codes = sample(
        logits, streams, top_k=k, top_p=p, status=status, logprob=logprob, codebook=2, backend=backend
    )
    return codes, status, logprob.view(torch.int32)


@pytest.mark.skipif(not fused.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("part", [2048, 4096])
def test_only_parts_that_must_take_the_long_way(logits, lines, monkeypatch, part):
    """Otherwise the tests here would see nothing of the split: the long way gives the same codes."""
    monkeypatch.setattr(fused, "PART", part)
    scratch = []
    make = fused._scratch
    monkeypatch.setattr(fused, "_scratch", lambda *args: scratch.append(make(*args)) or scratch[-1])
    draw(logits, lines, "triton")
    failed = scratch[0][2].view(len(ROWS), 8)
    # Not the row of top_k 128: more than 128 logits are equal at its bound.
    assert failed[[0, 2]].tolist() == [[0] * 8] * 2


@pytest.mark.skipif(not fused.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("part", [2048, 4096])
def test_any_parts_give_the_reference(logits, lines, monkeypatch, part):
    monkeypatch.setattr(fused, "PART", part)
    assert fused.parts_of(V) == 8
    reference = draw(logits, lines, "torch")
    for backend in ("triton", "numba"):
        assert all(map(torch.equal, draw(logits, lines, backend), reference))


@pytest.mark.skipif(not fused.INTERPRETED, reason="needs Triton's interpreter")
def test_a_part_that_fails_sends_the_row_the_long_way(logits, lines):
    """More equal logits than a program has slots, a NaN, and +inf: each in one part alone."""
    logits = logits[:1].repeat(3, 1)
    logits[0, 8192:8500] = 30.0
    logits[1, 10] = torch.nan
    logits[2, 11] = torch.inf
    streams = lines((1, 0), (2, 0), (3, 0))
    results = {}
    for backend in ("triton", "torch"):
        status = torch.zeros(3, dtype=torch.int32)
        codes = sample(logits, streams, top_k=50, status=status, backend=backend)
        results[backend] = codes.tolist(), status.tolist()
    assert results["triton"] == results["torch"]
    assert results["torch"][1] == [0, 1, 2]


def test_which_vocabularies_are_split():
    assert [fused.parts_of(v) for v in (2048, 8192, 8193, 32768, 32769, 262144, 262145)] == [
        0,
        0,
        8,
        8,
        16,
        64,
        0,
    ]
