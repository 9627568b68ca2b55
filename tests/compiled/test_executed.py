"""Runs ``compiled_sampler.py``, whose tests compile kernels, in a process where Triton is no interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def test_compiled_kernels_executed_without_a_gpu():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "compiled_sampler.py"],
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
