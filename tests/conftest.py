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
if not torch.cuda.is_available():
    # Before triton is imported: the kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
