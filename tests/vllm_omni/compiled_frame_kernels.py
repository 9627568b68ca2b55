"""The frame's kernels at the real sizes, compiled for GPUs that are not here; run by `test_frame_kernels`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))
from compiling import TARGETS, machine_code, recorded_launches

from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame_kernels import FusedFrame

SIZES = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "groups": 16, "eps": 1e-6, "mlp": 3072}


def launches(dtype: torch.dtype, n: int):
    """One of each kernel, for 2 rows with n new positions."""
    weights = SimpleNamespace(**SIZES, norm=torch.empty(1024, dtype=dtype), device="cpu")
    rows = 2 * n
    cache = torch.empty(1, 2, 8, 16, 128)
    buffers = SimpleNamespace(
        attention=torch.empty(rows, 2048, dtype=dtype),
        gated=torch.empty(rows, 3072, dtype=dtype),
        keys=cache,
        values=torch.empty_like(cache),
    )
    layer = SimpleNamespace(cos=torch.empty(16, 24, 128), sin=torch.empty(16, 24, 2, 64))
    frame = FusedFrame(weights, buffers)
    x = torch.empty(rows, 1024, dtype=dtype)
    with recorded_launches() as recorded:
        frame._rms_norm(x, weights.norm, torch.empty_like(x))
        frame._attend(layer, 0, torch.empty(rows, 4096, dtype=dtype), 2, 0 if n == 2 else 5, n)
        frame._gate(torch.empty(rows, 6144, dtype=dtype))
    return recorded


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_spills(target, dtype):
    for n in (1, 2):
        for launch in launches(dtype, n):
            code = machine_code(launch.compile(target))
            name = launch.kernel.fn.__name__
            assert code.spilled == 0, (name, target, code.spilled)


def test_positions_share_one_kernel():
    """Nothing is compiled after the first frame: not for another position, not for another batch."""
    one = launches(torch.bfloat16, 1)
    weights = SimpleNamespace(**SIZES, norm=torch.empty(1024), device="cpu")
    assert len(one) == 3
    for position in (2, 15, 16):
        cache = torch.empty(1, 7, 8, 16, 128)
        buffers = SimpleNamespace(
            attention=torch.empty(7, 2048, dtype=torch.bfloat16), keys=cache, values=torch.empty_like(cache)
        )
        layer = SimpleNamespace(cos=torch.empty(16, 24, 128), sin=torch.empty(16, 24, 2, 64))
        frame = FusedFrame(weights, buffers)
        with recorded_launches() as recorded:
            frame._attend(layer, 0, torch.empty(7, 4096, dtype=torch.bfloat16), 7, position, 1)
        assert recorded == one[1:2]
