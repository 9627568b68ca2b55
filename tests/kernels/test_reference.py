"""Random calls: torch and numba against the independent numpy oracle, and Triton against torch."""

import math

import numpy as np
import oracle
import torch
from backends import Numba, Torch, Triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, LARGEST, -LARGEST, 1e-40, -1e-40, 1.0, 2.0]
VALUES = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(-8, 8).map(float),
    st.floats(-30, 30, width=32),
    st.floats(width=32, allow_subnormal=True),
)
SIXTY_FOUR_BITS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
TEMPERATURES = st.one_of(
    st.sampled_from([0.0, 9.9e-6, 1e-5, 1.0, 3e38, math.nan, math.inf, -0.5]), st.floats(0.0625, 5, width=32)
)
TOP_PS = st.one_of(
    st.sampled_from([0.0, 1e-9, 0.5, 0.99999994, 1.0, 1.5, -0.1, math.nan]), st.floats(0, 1, width=32)
)


@st.composite
def calls(draw, largest_vocabulary=40, largest_batch=5):
    V = draw(st.integers(1, largest_vocabulary))
    B = draw(st.integers(1, largest_batch))
    rows = st.lists(VALUES, min_size=V, max_size=V)
    if draw(st.booleans()):
        rows = st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0]), min_size=V, max_size=V)
    logits = np.array(draw(st.lists(rows, min_size=B, max_size=B)), np.float32)
    return dict(
        logits=logits,
        seeds=draw(st.lists(st.none() | SIXTY_FOUR_BITS, min_size=B, max_size=B)),
        offsets=draw(st.lists(SIXTY_FOUR_BITS, min_size=B, max_size=B)),
        header=draw(st.tuples(SIXTY_FOUR_BITS, SIXTY_FOUR_BITS)),
        codebook=draw(st.integers(0, 65535)),
        temperature=draw(st.lists(TEMPERATURES, min_size=B, max_size=B)),
        top_k=draw(st.lists(st.integers(-1, V + 2), min_size=B, max_size=B)),
        top_p=draw(st.lists(TOP_PS, min_size=B, max_size=B)),
    )


def by_oracle(call):
    codes, status = [], []
    for row, logits in enumerate(call["logits"]):
        seed, offset = call["seeds"][row], call["offsets"][row]
        if seed is None:
            seed, offset = call["header"][0], call["header"][1] + row
        parameters = [call[name][row] for name in ("temperature", "top_k", "top_p")]
        tag = int(call["seeds"][row] is None)
        code, flags = oracle.draw(logits, seed, offset, call["codebook"], *parameters, tag=tag)
        codes.append(code)
        status.append(flags)
    return codes, status


def by_backend(backend, call):
    B = len(call["logits"])
    streams = torch.zeros(B + 1, 3, dtype=torch.int64)
    streams[0] = torch.tensor([*call["header"], B])
    for row, (seed, offset) in enumerate(zip(call["seeds"], call["offsets"], strict=True)):
        streams[row + 1] = torch.tensor([seed or 0, offset, int(seed is not None)])
    status = torch.full((B,), -77, dtype=torch.int32)
    codes = backend.sample(
        torch.from_numpy(call["logits"]),
        streams,
        temperature=torch.tensor(call["temperature"], dtype=torch.float32),
        top_k=torch.tensor(call["top_k"], dtype=torch.int64),
        top_p=torch.tensor(call["top_p"], dtype=torch.float32),
        codebook=call["codebook"],
        status=status,
    )
    return codes.tolist(), status.tolist()


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(calls())
def test_torch_and_numba_equal_the_oracle(call):
    expected = by_oracle(call)
    assert by_backend(Torch, call) == expected
    assert by_backend(Numba, call) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(calls(largest_vocabulary=70, largest_batch=2))
def test_triton_equals_torch(call):
    assert by_backend(Triton, call) == by_backend(Torch, call)


def test_the_oracle_equals_torch_at_full_size():
    """2048 tokens with ties, where the filters have something to do."""
    generator = torch.Generator().manual_seed(9)
    logits = ((torch.randn(6, 2048, generator=generator) * 48).round() / 16).numpy()
    call = dict(
        logits=logits, seeds=[7, None, -1, 0, 2**40, 3], offsets=[0, 1, 2, 2**33, 4, 5], header=(5, -2),
        temperature=[0.9, 1.0, 0.5, 1.3, 0.9, 0.7], top_k=[50, 0, 200, 50, 1, 2047],
        top_p=[1.0, 0.9, 0.8, 0.3, 1.0, 0.999], codebook=15,
    )  # fmt: skip
    assert by_backend(Torch, call) == by_backend(Numba, call) == by_oracle(call)
