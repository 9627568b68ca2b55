"""Common set-up: the repository root leaves ``sys.path``, so that the folders
``kernels`` and ``vllm_omni`` never hide the installed packages of those names."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]
os.environ["PYTHONSAFEPATH"] = "1"


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
