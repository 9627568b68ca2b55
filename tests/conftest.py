"""Common set-up: the repository root leaves ``sys.path``, so that the folders
``kernels`` and ``vllm_omni`` never hide the installed packages of those names."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    # The kernels then run in Triton's interpreter, which is chosen before triton is imported; the
    # processes that tests start, engines among them, do not inherit it.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    del os.environ["TRITON_INTERPRET"]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
