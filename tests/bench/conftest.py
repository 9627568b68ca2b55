import sys
from pathlib import Path

import pytest
import torch

# The benches are scripts beside one another, not an installed package.
sys.path.append(str(Path(__file__).parents[2] / "bench"))


@pytest.fixture(autouse=True)
def one_thread():
    """Many small operations: with more threads than free cores each would wait for a time slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
