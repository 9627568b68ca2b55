"""The GPU's kernels between the matrix products, in Triton's interpreter and compiled without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture import Operator, differences, record
from predictors import (
    TINY,
    frame_inputs,
    make_predictor,
    randomise,
    teacher_forced,
    their_teacher_forced,
)
from static_server import Server

from rowseed.vllm_omni.model_executor.models.qwen3_tts import frame_kernels
from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame import FrameBuffers, FrameWeights
from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame_kernels import FusedFrame

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
)


def fused_predictor(talker_hidden: int, dtype: torch.dtype = torch.float32, rows: int = 3):
    torch.manual_seed(0)
    predictor = make_predictor(talker_hidden=talker_hidden, dtype=dtype, max_num_seqs=rows, **TINY)
    randomise(predictor)
    with torch.no_grad():
        weights = FrameWeights(predictor, packed=False)
        predictor._frame = FusedFrame(weights, FrameBuffers(weights, rows))
    return predictor


@interpreted
@pytest.mark.parametrize("talker_hidden", [32, 48], ids=["same-size", "projection"])
def test_logits_equal_theirs(talker_hidden):
    predictor = fused_predictor(talker_hidden)
    inputs = frame_inputs(3, talker_hidden)
    codes = torch.randint(0, 64, (3, 6))
    ours = teacher_forced(predictor, inputs, codes)
    torch.testing.assert_close(ours, their_teacher_forced(predictor, inputs, codes), atol=1e-5, rtol=0)


@interpreted
def test_bfloat16():
    predictor = fused_predictor(32, torch.bfloat16)
    exact = make_predictor(**TINY)
    exact.load_state_dict(predictor.state_dict())
    inputs = frame_inputs(3, 32, torch.bfloat16)
    codes = torch.randint(0, 64, (3, 6))
    truth = their_teacher_forced(exact, (inputs[0], inputs[1].float(), inputs[2].float()), codes)
    ours, theirs = (
        (forced(predictor, inputs, codes) - truth).square().mean().sqrt()
        for forced in (teacher_forced, their_teacher_forced)
    )
    # The interpreter cuts float32 down to bfloat16 where a GPU rounds: twice the error a store.
    assert 0 < ours <= 2 * theirs


def test_two_frames_launch_the_same(monkeypatch):
    """Kernels in the order of the operators, with their addresses and numbers; see `capture`."""
    server = Server(48)
    predictor = fused_predictor(48, rows=8)
    server.predictor = predictor
    recorded = []
    for step in (2, 3):
        launches: list[Operator] = []

        def launch(kernel, grid, *arguments, launches=launches, **constants):
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            numbers = [a for a in arguments if not isinstance(a, torch.Tensor)]
            launches.append(
                Operator(
                    f"triton.{kernel.fn.__name__}",
                    tuple((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors),
                    (repr(grid), *map(repr, numbers), repr(constants)),
                    0,
                )
            )

        monkeypatch.setattr(frame_kernels, "launch", launch)
        server.pack(step)
        recorded.append((record(server.frame), launches))
    (operators, launches), (other_operators, other_launches) = recorded
    assert differences(operators, other_operators) == []
    assert differences(launches, other_launches) == []
    # A layer's step: two norms, attention, gate; and a norm before each head.
    assert len(launches) == 5 * (2 * 4 + 1)


def test_compiled_for_gpus_that_are_not_here():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "compiled_frame_kernels.py",
    ]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_they_equal_the_operators(dtype):
    torch.manual_seed(0)
    predictor = make_predictor(dtype=dtype, **TINY).cuda()
    randomise(predictor)
    inputs = tuple(tensor.cuda() for tensor in frame_inputs(5, 32, dtype))
    codes = torch.randint(0, 64, (5, 6), device="cuda")
    assert isinstance(predictor.prepare(), FusedFrame)
    fused = teacher_forced(predictor, inputs, codes)
    theirs = their_teacher_forced(predictor, inputs, codes)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(fused, theirs, atol=tolerance, rtol=0)
