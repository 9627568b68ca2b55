"""vLLM builds and loads a model with its dtype and device as torch's defaults: nothing may follow them."""

import contextlib

import pytest
import torch

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowParameters, RowStreams

DTYPES = [torch.float16, torch.bfloat16, torch.float64]


@contextlib.contextmanager
def defaults(dtype=torch.float32, device="cpu"):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def draw():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, 128, generator=generator, dtype=torch.float32, device="cpu") * 4
    logits[1, 0, 5], logits[2, 1, 7] = torch.nan, torch.inf
    streams = RowStreams(8, "cpu", global_seed=3).pack([1, 2, None, 4, None, 6], range(6), 6)
    parameters = RowParameters(6, "cpu")
    parameters.pack([0.9, 0.0, 1.1, 0.5, 2.0, 0.9], [50, 0, 3, 1, 0, 20], [1.0, 1.0, 0.5, 0.9, 0.8, 0.1])
    status = torch.empty(6, 3, dtype=torch.int32, device="cpu")
    codes = sample(
        logits,
        streams,
        temperature=parameters.temperature,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        status=status,
    )
    return codes, status


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_dtype_changes_nothing(dtype):
    codes, status = draw()
    with defaults(dtype):
        same_codes, same_status = draw()
    assert torch.equal(codes, same_codes)
    assert torch.equal(status, same_status)


def test_the_default_device_changes_nothing():
    """Anything made on the default device, here "meta", would hold no values."""
    codes, status = draw()
    with defaults(device="meta"):
        same_codes, same_status = draw()
    assert torch.equal(codes, same_codes)
    assert torch.equal(status, same_status)


def test_the_global_seed_does_not_follow_the_default_device():
    with defaults(device="meta"):
        assert isinstance(RowStreams(1, "cpu").global_seed, int)
