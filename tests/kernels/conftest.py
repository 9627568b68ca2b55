"""Both backends behind one call, and the batches that the sampler's tests share."""

import pytest
import torch
from triton_worker import TritonWorker

from rowseed.kernels.sampling import sample


@pytest.fixture(scope="session")
def triton_worker():
    worker = TritonWorker()
    yield worker
    worker.close()


class Torch:
    slow = False
    sample = staticmethod(sample)


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """An object whose ``sample`` is the public function on one backend, CPU tensors in and out."""
    return Torch if request.param == "torch" else request.getfixturevalue("triton_worker")


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
