"""Static cost of the sampler kernel and of its peers, with no GPU.

    python bench/static.py [--json FILE] [--target sm_90 ...] [--fewer] [--quick]

Every variant is compiled for sm_80, sm_90, sm_100 and gfx942, and its machine code is read:

    instructions  what one warp executes on the path taken, loops with their trips (``walk.py`` says how the
                  path is chosen; here: an active row, seeded or not, finite logits, top_k = 50 and no tie
                  beyond it, no embedding gather). Where the ways of a branch that nothing decides differ
                  much, the figures of the path are left out, and that is said
    slots         instructions x ceil(warps / 4): a multiprocessor has four schedulers: this is the busiest's
    issued        instructions x warps: what a row costs a full GPU
    barriers      block-wide barriers on that path
    fp64          float64 arithmetic (DADD, DMUL, DFMA, DSETP; v_*_f64) on that path
    registers, spills (bytes a thread, local stores and loads), shared (bytes): whole kernel
    listed        instructions in the listing, paths not taken included

These are counts, not times. Pointers and strides carry the alignment hints that a launch gives them. They
matter: sglang-omni's single kernel compiled without any lists 3,320 instructions, padding and paths not taken
included, and 105 barriers; with them it has 25. Its rows come twice. A loop whose trips depend on the data is
counted once and its row marked ">=" (vLLM's top-k and top-p search: a lower bound).

Peers: sglang-omni's Qwen3-TTS sampling kernels (its module alone, without its engine) and vLLM's V2 sampler
kernels, from the installed packages, each skipped with a printed reason where it cannot be compiled.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `python bench/static.py` and `-m bench.static` alike

import triton
import walk
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MAIN_TARGET = "sm_90"
"""README's."""
NVIDIA_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
FP64 = r"D(ADD|MUL|FMA|SETP)\b|v_(add|mul|fma|cmp\w*|cmpx\w*)_f64"
BARRIERS = r"BAR\.(SYNC|RED)|BAR$|s_barrier"


MOST_DOUBT = 0.05
"""Of a path's instructions: what undecided branches may make up before its figures are left out."""

OFF_PATH = ("_any_row", "_wide_greedy", "_wide_draw")
"""The sampler's functions that the described case does not run."""

ON_PATH = ("_pull", "_nucleus")
"""Those that it does run, where they are compiled into it."""

TRIPS = {"_threshold": 32, "_find": 0, "_nucleus": 7}
"""Trips of the sampler's loops, by the function that holds them."""


class Constant(types.SimpleNamespace):
    """An argument fixed at compile time: its value."""


def constant(value):
    return Constant(value=value)


def compile_kernel(kernel, arguments: dict, target: str, **options):
    """arguments: per argument a Triton type, with ":16" where it is a multiple of 16, or a constant."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        given = arguments[name]
        if isinstance(given, Constant):
            signature[name], constants[(index,)] = "constexpr", given.value
            continue
        kind, _, multiple = given.partition(":")
        signature[name] = kind
        if multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's note on the default of enable_fp_fusion, for the peers
        return triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
            target=TARGETS[target],
            options=options,
        )


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([str(NVIDIA_BIN / name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def measure(compiled, off=(), trips=None, on=()) -> dict:
    """The figures of one compiled kernel, but for the names of the case; None where the branch taken is not
    known."""
    warps = compiled.metadata.num_warps
    if "cubin" in compiled.asm:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/kernel.cubin"
            Path(path).write_bytes(compiled.asm["cubin"])
            blocks = walk.sass_blocks(_tool("nvdisasm", "-c", "-gi", path))
            usage = _tool("cuobjdump", "-res-usage", path)
        registers = int(re.findall(r"REG:(\d+)", usage)[-1])
        spills = int(re.findall(r"STACK:(\d+)", usage)[-1]) + int(re.findall(r"LOCAL:(\d+)", usage)[-1])
    else:
        text = compiled.asm["amdgcn"]
        blocks = walk.amdgcn_blocks(text)
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
        spills = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)[-1])
    path = walk.walk(blocks, off, trips, on)
    figures = {
        "instructions": path.instructions,
        "slots": path.instructions * math.ceil(warps / 4),
        "issued": path.instructions * warps,
        "barriers": path.count(BARRIERS),
        "fp64": path.count(FP64),
    }
    if path.doubt > MOST_DOUBT * path.instructions:
        figures = dict.fromkeys(figures)
    return {
        "warps": warps,
        **figures,
        "registers": registers,
        "spills": spills,
        "shared": compiled.metadata.shared,
        "listed": path.listed.total(),
        "loops_once": path.loops_once,
    }


def our_cases(quick: bool):
    """(vocab, dtype, top_p) to compile the sampler for."""
    yield 2048, "bf16", 1.0
    yield 2048, "bf16", 0.9
    yield 2048, "fp32", 1.0
    if quick:
        return
    yield 2048, "fp32", 0.9
    yield 2048, "fp16", 1.0
    for top_p in (1.0, 0.9):
        yield 3072, "fp32", top_p  # the talker's own token
    for vocab in (1024, 3072, 4096, 8192, 32768, 262144):
        yield vocab, "bf16", 1.0


def our_arguments(vocab: int, dtype: str, top_p: float) -> dict:
    """The sampler's arguments as a call with per-row tensors has them.

    [B, V] logits, int64 codes in a column of [B, Q], a status word, no gather.
    """
    stride = "i32:16" if vocab % 16 == 0 else "i32"
    arguments = {"logits_ptr": f"*{dtype}:16", "row_stride": stride, "codebook_stride": stride, "V": stride}
    arguments |= {"C": constant(1), "streams_ptr": "*i64", "codebook": "i32"}
    for name, kind in (("temperature", "fp32"), ("top_k", "i32"), ("top_p", "fp32")):
        given = name != "top_p" or top_p < 1.0
        arguments[f"{name}s_ptr"] = f"*{kind}:16" if given else constant(None)
        arguments |= {f"{name}_stride": "i32", name: kind}
    for name, kind in (("out", "i64"), ("status", "i32"), ("logprob", "fp32")):
        arguments |= {
            f"{name}_ptr": f"*{kind}",
            f"{name}_row_stride": "i32",
            f"{name}_codebook_stride": "i32",
        }
    arguments |= {"logprob_ptr": constant(None), "min_ps_ptr": constant(None)}
    arguments |= {"min_p_stride": "i32", "min_p": "fp32"}
    for name in ("table", "total", "next_table", "next_input"):
        arguments |= {f"{name}_ptr": constant(None), f"{name}_stride": constant(0)}
    return arguments | {"D": constant(0), "E": constant(0)}


def our_records(target: str, quick: bool):
    """The sampler itself; of a split vocabulary both launches, the first once for each part of a row."""
    from rowseed.kernels import fused

    for vocab, dtype, top_p in our_cases(quick):
        parts = fused.parts_of(vocab)
        scratch = {"values_ptr": "*fp32:16", "ids_ptr": "*i32:16", "failed_ptr": "*i32:16"}
        arguments = our_arguments(vocab, dtype, top_p) | scratch
        options = fused.launch_parameters(vocab, 4 if dtype == "fp32" else 2, target.startswith("gfx"))
        options |= {"TOP_K": True, "TOP_P": top_p < 1.0, "MIN_P": False, "PARTS": parts, "PART": fused.PART}
        if parts:
            yield (
                f"rowseed split (x {parts})",
                vocab,
                dtype,
                top_p,
                our_figures(fused._split_kernel, arguments, options, target),
            )
        else:
            arguments |= {name: constant(None) for name in scratch}
        name = "rowseed" + " of candidates" * bool(parts)
        yield name, vocab, dtype, top_p, our_figures(fused._sample_kernel, arguments, options, target)


def our_figures(kernel, arguments: dict, options: dict, target: str) -> dict:
    constants = {name: constant(value) for name, value in options.items() if name in kernel.arg_names}
    launch = {name: options[name] for name in ("num_warps", "enable_fp_fusion")}
    return measure(compile_kernel(kernel, arguments | constants, target, **launch), OFF_PATH, TRIPS, ON_PATH)


@contextlib.contextmanager
def replaced_modules(**modules):
    """Modules that stand in for others while a peer's file is loaded."""
    modules = {name.replace("__", "."): module for name, module in modules.items()}
    kept = {name: sys.modules.get(name) for name in modules}
    sys.modules |= modules
    try:
        yield
    finally:
        for name, old in kept.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def load_file(name: str, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_sglang():
    """sglang-omni's kernels: its module alone, behind two stub modules in place of its engine."""
    try:
        files = importlib.metadata.files("sglang-omni") or []
    except importlib.metadata.PackageNotFoundError:
        raise LookupError("sglang-omni is not installed") from None
    found = [f for f in files if str(f).endswith("models/qwen3_tts/sampling_kernels.py")]
    if not found:
        raise LookupError("this sglang-omni has no models/qwen3_tts/sampling_kernels.py")
    package = types.ModuleType("sglang_omni")
    package.__path__ = []
    platforms = types.ModuleType("sglang_omni.platforms")
    platforms.current_platform = types.SimpleNamespace(is_npu=lambda: False)
    with replaced_modules(sglang_omni=package, sglang_omni__platforms=platforms):
        return load_file("sglang_kernels", found[0].locate())


def sglang_records(target: str, quick: bool):
    """Its single kernel, and its pair for small batches, at V = 2048 and top_k = 50."""
    kernels = load_sglang()
    row = {"temperatures": "*fp32:16", "top_ks": "*i64:16", "top_ps": "*fp32:16", "seeds": "*i64:16"}
    row |= {"positions": "*i64:16", "out": "*i64:16"}
    logits = {"logits": "*bf16:16", "logits_stride_b": constant(2048), "temperatures": "*fp32:16"}
    for hints in (True,) if quick else (True, False):
        for top_p in (1.0,) if quick else (1.0, 0.9):
            arguments = row | logits | {"max_top_k": constant(50), "block_k": constant(64)}
            arguments["has_top_p"] = constant(top_p < 1.0)
            if not hints:
                arguments = {k: v.split(":")[0] if isinstance(v, str) else v for k, v in arguments.items()}
            compiled = compile_kernel(
                kernels.seeded_top_k_top_p_sample_kernel, arguments, target, num_warps=8
            )
            name = "sglang-omni single" + ("" if hints else ", no hints")
            yield name, 2048, "bf16", top_p, measure(compiled)
    arguments = logits | {"chunk_keys": "*i64:16", "chunk_width": constant(256), "block_k": constant(64)}
    compiled = compile_kernel(kernels.seeded_top_k_chunk_kernel, arguments, target, num_warps=2)
    yield "sglang-omni chunk (x 8)", 2048, "bf16", 1.0, measure(compiled)
    arguments = row | {"chunk_keys": "*i64:16", "num_candidates": constant(512), "block_k": constant(64)}
    arguments |= {
        "log2_num_candidates": constant(9),
        "log2_block_k": constant(6),
        "has_top_p": constant(False),
    }
    compiled = compile_kernel(kernels.seeded_top_k_merge_sample_kernel, arguments, target, num_warps=1)
    yield "sglang-omni merge", 2048, "bf16", 1.0, measure(compiled)


@functools.cache
def load_vllm():
    """vLLM's two kernel files, with Triton given to them: vLLM hides it where it sees no GPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if importlib.util.find_spec("vllm") is None:
        raise LookupError("vllm is not installed")
    import triton.language.extra.libdevice
    import vllm

    utils = types.ModuleType("vllm.triton_utils")
    utils.HAS_TRITON, utils.triton, utils.tl = True, triton, triton.language
    utils.tldevice = triton.language.extra.libdevice
    root = Path(vllm.__file__).parent / "v1"
    import vllm.model_executor.warmup.jit_warmup_triton_helper

    with replaced_modules(vllm__triton_utils=utils):
        names = {"topk_topp": "sample/ops/topk_topp_triton.py", "gumbel": "worker/gpu/sample/gumbel.py"}
        return tuple(load_file(f"vllm_{name}", root / path) for name, path in names.items())


def vllm_records(target: str, quick: bool):
    """vLLM's V2 chain: temperature, top-k / top-p mask, Gumbel draw; float32 logits, as it runs them."""
    topk_topp_triton, gumbel = load_vllm()
    for top_p in (1.0,) if quick else (1.0, 0.9):
        arguments = dict.fromkeys(topk_topp_triton._topk_topp_kernel.arg_names, "*fp32:16")
        arguments |= {"LOGITS_STRIDE_0": "i32:16", "K": "*i32:16", "BATCH_SIZE": "i32"}
        sizes = {"VOCAB_SIZE": 2048, "MASK_VALUE": -math.inf, "BLOCK_SIZE": 8192, "BLOCK_SIZE_TRUNC": 4096}
        sizes |= {"TOPK_ENABLED": True, "TOPP_ENABLED": top_p < 1.0, "SPLIT_COVERS_PONLY": False}
        arguments |= {name: constant(value) for name, value in sizes.items()}
        compiled = compile_kernel(topk_topp_triton._topk_topp_kernel, arguments, target, num_warps=8)
        yield "vLLM V2 top-k top-p", 2048, "fp32", top_p, measure(compiled)
    arguments = {
        name: "i64:16"
        if name.endswith(("stride", "stride_0"))
        else constant(None)
        if "cache" in name
        else None
        for name in gumbel._gumbel_sample_kernel.arg_names
    }
    arguments |= {"local_argmax_ptr": "*i64:16", "local_argmax_stride": "i32", "local_max_ptr": "*fp32:16"}
    arguments |= {"local_max_stride": "i32", "logits_ptr": "*fp32:16", "logits_stride": "i32:16"}
    arguments |= {"expanded_idx_mapping_ptr": "*i32:16", "seeds_ptr": "*i64:16", "pos_ptr": "*i64:16"}
    arguments |= {"temp_ptr": "*fp32:16", "vocab_size": "i32:16", "BLOCK_SIZE": constant(1024)}
    arguments |= {"logits_cache_stride_0": constant(0), "logits_cache_stride_1": constant(0)}
    flags = ("IS_DRAFTING", "APPLY_TEMPERATURE", "USE_FP64", "PER_TOKEN_COL")
    arguments |= {name: constant(False) for name in flags}
    compiled = compile_kernel(gumbel._gumbel_sample_kernel, arguments, target, num_warps=4)
    yield "vLLM V2 gumbel (x 2)", 2048, "fp32", 1.0, measure(compiled, on=("philox_impl",))


SOURCES = {"rowseed": our_records, "sglang-omni": sglang_records, "vLLM": vllm_records}


def collect(targets, quick: bool, fewer: bool) -> list[dict]:
    """All records, compiled by as many processes as there are cores."""
    jobs = [
        (target, source, quick or (fewer and target != MAIN_TARGET))
        for target in targets
        for source in SOURCES
    ]
    start_afresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=start_afresh) as pool:
        return [record for part in pool.map(collect_one, *zip(*jobs, strict=True)) for record in part]


def collect_one(target: str, source: str, quick: bool) -> list[dict]:
    records = []
    try:
        for kernel, vocab, dtype, top_p, figures in SOURCES[source](target, quick):
            case = {"kernel": kernel, "target": target, "vocab": vocab, "dtype": dtype}
            records.append(case | {"top_k": 50, "top_p": top_p} | figures)
            unknown = ": the walk cannot tell the branch taken" if figures["instructions"] is None else ""
            print(f"{target} {kernel} {vocab}{unknown}", file=sys.stderr)
    except Exception as error:  # a peer's module may fail in any way; ours must not
        if source == "rowseed":
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"skipped {source} on {target}: {type(error).__name__}: {first[:160]}", file=sys.stderr)
    return records


def print_table(records: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"Static cost of one row, top_k = 50, compiled by Triton {triton.__version__} (counts, not times)"
    table = Table(title=title)
    columns = ("kernel", "target", "vocab", "dtype", "top_p", "warps", "instructions", "slots", "issued")
    columns += ("barriers", "fp64", "registers", "spills", "shared")
    for name in columns:
        table.add_column(name, justify="left" if name in ("kernel", "target", "dtype") else "right")
    for record in records:
        known = ["?" if record[name] is None else record[name] for name in columns]
        cells = [f"{v:,}" if isinstance(v, int) else str(v) for v in known]
        if record["loops_once"] and record["instructions"] is not None:
            cells[6:9] = [">= " + cell for cell in cells[6:9]]
        table.add_row(*cells)
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the records there, a flat list")
    parser.add_argument("--target", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="sm_90 and three cases of the sampler alone")
    parser.add_argument(
        "--fewer", action="store_true", help="the usual cases only, but for sm_90"
    )
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 must not be set: this compiles kernels")
    targets = [MAIN_TARGET] if options.quick else options.target
    records = collect(targets, options.quick, options.fewer)
    print_table(records)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
