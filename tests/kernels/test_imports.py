"""What importing the sampler needs, each in a process of its own."""

import subprocess
import sys

SAMPLE = """
import torch
from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams
packed = RowStreams(1, "cpu", global_seed=0).pack([7], [0])
codes = sample(torch.zeros(1, 2048), packed)
assert 0 <= int(codes) < 2048
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sampler_imports_neither_vllm_nor_vllm_omni():
    # numba looks for scipy by itself, and must do without.
    code = "import sys; sys.modules['scipy'] = None\n" + SAMPLE
    imported = run(
        code + "print(*{name.partition('.')[0] for name in sys.modules if sys.modules[name]})"
    ).split()
    assert {"triton", "numba"} <= set(imported)
    assert not {"vllm", "vllm_omni", "scipy", "hypothesis"} & set(imported)


def test_without_numba_torch_draws_and_the_log_says_so_once():
    off = "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'"
    printed = []
    for start in ("", "import sys; sys.modules['numba'] = None", off):
        code = start + SAMPLE + "print(*codes.tolist(), *sample(torch.ones(1, 99), packed).tolist())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        printed.append(done.stdout)
        assert done.stderr.count("sampled by the torch reference, with the same codes") == bool(start)
        assert done.stderr.count("\n") == bool(start), done.stderr
    assert len(set(printed)) == 1


def test_the_torch_path_needs_no_triton():
    run("import sys; sys.modules['triton'] = None" + SAMPLE)
    refused = """
from rowseed.kernels import sampling
try:
    sampling.sample(torch.zeros(1, 8), packed, backend="triton")
except ValueError as error:
    print(error)
"""
    message = run("import sys; sys.modules['triton'] = None" + SAMPLE + refused)
    assert message == "backend must be 'torch' where Triton is not installed, got 'triton'\n"
