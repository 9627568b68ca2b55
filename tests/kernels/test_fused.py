"""Runs ``compiled_fused.py``, whose tests compile kernels, in a process where Triton is no interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def test_compiled_for_gpus_that_are_not_here(capsys):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "compiled_fused.py"]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    with capsys.disabled():
        print(*(line for line in run.stdout.splitlines() if "registers" in line), sep="\n")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
