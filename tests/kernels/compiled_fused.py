"""The kernel compiled for GPUs that are not here: no spill, nothing that rounds another way."""

import re
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from compiling import TARGETS, Launch, machine_code, recorded_launches

from rowseed.kernels import fused
from rowseed.kernels.sampling import Gather, sample


def launches(B=2, V=2048, dtype=torch.bfloat16, C=None, per_row=True, gather=True, top_k=50, top_p=0.9):
    """What `sample` launches, arguments on the CPU; the checks of the public function included."""
    logits = torch.empty((B, V) if C is None else (B, C, V), dtype=dtype)
    kwargs = dict(temperature=0.9, top_k=top_k, top_p=top_p)
    if per_row:
        kwargs["temperature"], kwargs["top_p"] = torch.empty(B), torch.empty(B)
        kwargs["top_k"] = torch.empty(B, dtype=torch.int32)
    if gather and C is None:
        table = torch.empty(V, 1024, dtype=dtype)
        kwargs["gather"] = Gather(table, torch.empty(B, 1024), table, torch.empty(B, 1024, dtype=dtype))
    kwargs["out"] = torch.empty(logits.shape[:-1], dtype=torch.int64)
    kwargs["status"] = torch.empty(logits.shape[:-1], dtype=torch.int32)
    streams = torch.zeros(B + 1, 3, dtype=torch.int64)
    with recorded_launches() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "INTERPRETED", True)  # lets CPU tensors through
        sample(logits, streams, codebook=3, backend="triton", **kwargs)
    return recorded


def float_rounding(code):
    """Counts of instructions that round, by kind, where the hardware has a choice."""
    kinds = {
        "fused": r"FFMA|DFMA|HFMA2(?!\.MMA)\b|v_fma_f|v_fmac_f|v_pk_fma|v_mad_f|v_mac_f",
        "approximate": r"MUFU|v_rcp|v_exp|v_log|v_sqrt|v_rsq|v_sin|v_cos",
        "float64": r"D(?:ADD|MUL|FMA|SETP)|v_\w+_f64",
    }
    counts = Counter()
    for mnemonic, count in code.instructions.items():
        for kind, pattern in kinds.items():
            if re.match(pattern, mnemonic):
                counts[kind] += count
    return counts


@triton.jit
def _allowed_kernel(x_ptr, y_ptr, p_ptr, out_ptr):
    """The places where machine code may fuse: one IEEE divide, and one float64 product to int64 in each of
    the two ways through the kernel (a row takes one of them)."""
    quotient = tl.div_rn(tl.load(x_ptr), tl.load(y_ptr))
    bar = tl.load(out_ptr)
    for _ in tl.static_range(2):
        bar = (bar.to(tl.float64) * tl.load(p_ptr).to(tl.float64)).to(tl.int64)
    tl.store(out_ptr, bar + quotient.to(tl.int32))


@pytest.fixture(scope="module")
def allowed():
    """Counts per target of a kernel with nothing but the allowed places."""
    signature = dict(x_ptr="*fp32", y_ptr="*fp32", p_ptr="*fp32", out_ptr="*i64")
    launch = Launch(_allowed_kernel, signature, {}, {}, dict(num_warps=4, enable_fp_fusion=False))
    return {target: float_rounding(machine_code(launch.compile(target))) for target in TARGETS}


FORBIDDEN_PTX = r"\b(?:fma|div\.full|ex2|lg2|sqrt|rsqrt|rcp|sin|cos)\.[\w.]*f(?:32|64)"


def violations(code, allowed):
    """What the kernel does beyond the allowed places; empty when its bits are kept."""
    beyond = {k: n for k, n in float_rounding(code).items() if n > allowed[k] and k != "float64"}
    found = Counter(re.findall(FORBIDDEN_PTX, code.ptx))
    found += Counter(re.findall(r"\b\w[\w.]*\.(?:approx|ftz)[\w.]*", code.ptx))
    divisions = len(re.findall(r"\bdiv\.rn\.f32", code.ptx))
    doubles = len(re.findall(r"\b(?:add|mul|sub|div)[\w.]*\.f64", code.ptx))
    # One float64 product in each of the two ways through the kernel; a row takes one of them.
    if divisions > 1 or doubles > 2:
        found += Counter({"div.rn.f32": divisions, "float64 arithmetic": doubles})
    return beyond | dict(found)


CASES = {
    "bf16 2048": dict(),
    "bf16 2048 numbers": dict(per_row=False),
    "bf16 2048 top-k only": dict(per_row=False, top_p=1.0, gather=False),
    "fp32 2048": dict(dtype=torch.float32),
    "fp16 3072": dict(dtype=torch.float16, V=3072),
    "fp32 1025": dict(dtype=torch.float32, V=1025),
    "bf16 8192": dict(V=8192),
    "fp32 8192": dict(dtype=torch.float32, V=8192),
    "bf16 [2, 15, 2048]": dict(C=15),
    "fp32 262144": dict(dtype=torch.float32, V=262144, gather=False),
}


EVERYWHERE = ("bf16 2048", "bf16 8192", "fp32 262144")
# Scalar registers that a release may keep in lanes of vector registers, not in memory: at most so many.
KNOWN_SPILLS = {("bf16 8192", "gfx942"): 8}
PAIRS = [(case, target) for case in CASES for target in TARGETS if target == "sm_90" or case in EVERYWHERE]


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_no_spill_and_nothing_that_rounds_another_way(case, target, allowed, record_property, capsys):
    recorded = launches(**CASES[case])
    assert 1 <= len(recorded) <= (2 if CASES[case].get("V", 0) > fused.ONE_BLOCK else 1)
    for launch in recorded:
        assert launch.options["enable_fp_fusion"] is False
        code = machine_code(launch.compile(target))
        record_property("registers", code.registers)
        with capsys.disabled():
            warps = launch.options["num_warps"]
            print(f"\n{target} {case}: {code.registers} registers, {warps} warps", end=" ")
        assert code.spilled <= KNOWN_SPILLS.get((case, target), 0)
        assert violations(code, allowed[target]) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_the_check_rejects_fused_arithmetic(target, allowed):
    (launch,) = launches()
    assert violations(machine_code(launch.compile(target, enable_fp_fusion=True)), allowed[target])


@triton.jit
def _forbidden_kernel(x_ptr, KIND: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 128))
    if KIND == "divide":
        x = x / (x + 3.0)
    elif KIND == "floor":
        x = tl.floor(x)
    elif KIND == "exp":
        x = tl.exp(x)
    elif KIND == "log2":
        x = tl.log2(x)
    tl.store(x_ptr + tl.arange(0, 128), x)


@pytest.mark.parametrize("kind", ["divide", "floor", "exp", "log2"])
def test_the_check_rejects_what_the_scheme_forbids(kind, allowed):
    signature = dict(x_ptr="*fp32", KIND="constexpr")
    options = dict(num_warps=4, enable_fp_fusion=False)
    launch = Launch(_forbidden_kernel, signature, dict(KIND=kind), {}, options)
    assert violations(machine_code(launch.compile("sm_90")), allowed["sm_90"])


@pytest.mark.parametrize("case", ["bf16 2048", "bf16 2048 numbers", "bf16 [2, 15, 2048]", "fp32 262144"])
def test_one_compiled_kernel_for_every_batch(case):
    """Nothing that Triton specialises on moves with B: no compile after warm-up."""
    kept = [launches(B=B, **CASES[case]) for B in (1, 2, 3, 16, 17, 64)]
    assert all(recorded == kept[0] for recorded in kept)


def test_one_compiled_kernel_for_every_number():
    """Nor with the codebook, the column written, or what temperature, top_k and top_p are."""
    logits, streams = torch.empty(2, 2048), torch.zeros(3, 3, dtype=torch.int64)
    codes = torch.empty(2, 16, dtype=torch.int64)
    with recorded_launches() as recorded, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "INTERPRETED", True)
        for codebook, temperature, top_k, top_p in [(1, 1.0, 1, 0.5), (2, 0.9, 50, 0.9), (15, 0.0, 16, 0.0)]:
            filters = dict(temperature=temperature, top_k=top_k, top_p=top_p)
            sample(logits, streams, codebook=codebook, out=codes[:, codebook], backend="triton", **filters)
    assert len(recorded) == 3
    assert recorded[0] == recorded[1] == recorded[2]
