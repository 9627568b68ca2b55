"""Compiles what a call would launch, for GPUs that are not here, and reads the machine code."""

import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One launch as Triton specialises it: two equal ones share a compiled kernel."""

    kernel: JITFunction
    signature: dict
    constexprs: dict
    attributes: dict
    options: dict

    def compile(self, target: str, **options):
        source = ASTSource(
            fn=self.kernel, signature=self.signature, constexprs=self.constexprs, attrs=self.attributes
        )
        return triton.compile(source, target=TARGETS[target], options=self.options | options)


@contextlib.contextmanager
def recorded_launches():
    """Collects launches in place of making them; arguments may live on the CPU."""
    launches: list[Launch] = []

    def run(kernel, *args, grid, warmup, **kwargs):
        launches.append(launch_of(kernel, args, kwargs))

    with patch.object(JITFunction, "run", run):
        yield launches


def launch_of(kernel, args, kwargs):
    options = {name: value for name, value in kwargs.items() if name in OPTIONS}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name not in OPTIONS}
    signature, constexprs, attributes = {}, {}, {}
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[name], constexprs[name] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        aligned = (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0
        fixed = parameter.do_not_specialize or (
            isinstance(value, torch.Tensor) and parameter.do_not_specialize_on_alignment
        )
        if aligned and not fixed and not isinstance(value, float):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constexprs, attributes, options)


def _tool(name, *arguments):
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class MachineCode:
    registers: int
    spilled: int  # bytes of memory; on AMD also registers, those kept in lanes of others included
    instructions: Counter  # SASS or amdgcn mnemonics
    ptx: str  # empty on AMD


def machine_code(compiled) -> MachineCode:
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        numbers = dict(re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.M))
        kinds = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        spilled = sum(int(numbers[kind]) for kind in kinds)
        mnemonics = re.findall(r"^\s+([vs]_\w+)", text, re.M)
        return MachineCode(int(numbers["vgpr_count"]), spilled, Counter(mnemonics), "")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "-res-usage", cubin.name)
        sass = _tool("cuobjdump", "-sass", cubin.name)
    registers, stack, local = (int(re.findall(rf"{n}:(\d+)", usage)[-1]) for n in ("REG", "STACK", "LOCAL"))
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", sass, re.M)
    return MachineCode(registers, stack + local, Counter(mnemonics), compiled.asm["ptx"])
