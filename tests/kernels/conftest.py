"""The backends behind one call, and the batches that the sampler's tests share."""

import backends
import pytest
import torch


@pytest.fixture
def triton_backend():
    return backends.Triton


@pytest.fixture(params=[backends.Torch, backends.Numba, backends.Triton], ids=["torch", "numba", "triton"])
def backend(request):
    """An object whose ``sample`` is the public function on one backend, CPU tensors in and out."""
    return request.param


@pytest.fixture
def lines():
    """Builds a streams tensor: lines(*rows, header=...), a row being (seed or None, offset)."""

    def build(*rows, global_seed=0, global_offset=0, in_use=None):
        table = [[_wrap(global_seed), _wrap(global_offset), len(rows) if in_use is None else in_use]]
        table += [[0 if s is None else _wrap(s), _wrap(o), 0 if s is None else 1] for s, o in rows]
        return torch.tensor(table, dtype=torch.int64)

    return build


def _wrap(value):
    return (value + 2**63) % 2**64 - 2**63
