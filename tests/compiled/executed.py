"""Triton launches on CPU tensors, run as the PTX that Triton compiles for a GPU that is not here.

    with executing("sm_90") as runs:
        kernel[grid](x, y, BLOCK=128)
    runs[0].counts.instructions_a_warp

The arguments, constants, specialisation and options are the launch's own; tensors that share memory are
apart in the run. Needs TRITON_INTERPRET=0, as kernels are compiled; no pytest.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "support"))

from compiling import Launch, launch_of
from ptx import Code, Counts, GlobalMemory, Program, run

NEW = {
    "_sample_kernel": ("out_ptr", "status_ptr", "logprob_ptr", "next_input_ptr"),
    "_split_kernel": ("values_ptr", "ids_ptr", "failed_ptr"),
}
"""Parameters of the project's kernels that point at memory with nothing in it yet, unless an earlier launch
wrote there."""

Change = Callable[[str, Program], Program]
"""(kernel's name, its program) -> the program to run in its place."""


@dataclass
class Run:
    kernel: str
    program: Program
    counts: Counts
    shared_bytes: int


class RaceError(AssertionError):
    """Threads met in memory with nothing between them."""


@contextlib.contextmanager
def executing(
    target: str,
    order: int | None = None,
    new: Mapping[str, Sequence[str]] = NEW,
    change: Change | None = None,
    measure: bool = True,
    races: bool = False,
) -> Iterator[list[Run]]:
    """Runs every Triton launch inside in place of making it; results are in the launch's tensors.

    target: a name of `compiling.TARGETS` on NVIDIA; order, measure: see `ptx.run`; new: by kernel, the
    names of
    its parameters whose memory holds nothing yet; races: True leaves them to the caller (`counts.races`),
    False raises `RaceError`.

    Yields the runs made so far. Raises `ptx.Fault` and `ptx.UnknownInstruction` where the launch stands.
    """
    runs: list[Run] = []
    ready: dict[
        int, tuple[torch.Tensor, np.ndarray]
    ] = {}  # by address; holds the tensor, so that it stays its own

    def launch(kernel, *arguments, grid, warmup, **constants):
        if warmup:
            raise ValueError("a launch to be executed must not be a warm-up")
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        if callable(grid):
            grid = grid(values)
        recorded = launch_of(kernel, arguments, constants)
        name = kernel.fn.__name__
        runs.append(execute(recorded, grid, values, target, order, new.get(name, ()), ready, change, measure))
        found = runs[-1].counts.races
        if found and not races:
            raise RaceError(f"{name} for {target}: {len(found)} races, the first: {found[0]}")

    with patch.object(JITFunction, "run", launch):
        yield runs


def execute(
    launch: Launch,
    grid: Sequence[int],
    values: Mapping[str, object],
    target: str,
    order: int | None = None,
    new: Sequence[str] = (),
    ready: dict[int, tuple[torch.Tensor, np.ndarray]] | None = None,
    change: Change | None = None,
    measure: bool = True,
) -> Run:
    """One launch; see `executing`. values: the kernel's arguments by name."""
    ready = {} if ready is None else ready
    code, shared_bytes = compiled(Key(launch), target)
    name = launch.kernel.fn.__name__
    if change:
        code = changed(change, name, code)
    memory, arguments, tensors = GlobalMemory(), [], []
    for parameter in launch.kernel.params:
        value = values[parameter.name]
        if parameter.name in launch.constexprs:
            continue
        if not isinstance(value, torch.Tensor):
            arguments.append(value)
            continue
        if parameter.name in new and value.data_ptr() not in ready:
            ready[value.data_ptr()] = value, np.zeros(value.shape, bool)
        held = ready.get(value.data_ptr())
        arguments.append(memory.add(as_array(value), held[1] if held else True, value.data_ptr()))
        tensors.append(value)
    counts, now_ready = run(code, grid, arguments, memory, shared_bytes, order, measure)
    for tensor, elements in zip(tensors, now_ready, strict=True):
        if tensor.data_ptr() in ready:
            ready[tensor.data_ptr()] = tensor, elements
    return Run(name, code.program, counts, shared_bytes)


class Key:
    """A launch by what it compiles to."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.parts = (launch.kernel, *(str(sorted(d.items(), key=str)) for d in (
            launch.signature, launch.constexprs, launch.attributes, launch.options)))  # fmt: skip

    def __hash__(self):
        return hash(self.parts)

    def __eq__(self, other):
        return self.parts == other.parts


@functools.cache
def compiled(key: Key, target: str) -> tuple[Code, int]:
    """The decoded kernel, and its bytes of shared memory."""
    result = key.launch.compile(target)
    return Code(Program(result.asm["ptx"])), result.metadata.shared


def changed(change: Change, name: str, code: Code) -> Code:
    program = change(name, code.program)
    return code if program is code.program else Code(program)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory; 16-bit floats as int16."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
