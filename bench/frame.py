"""One frame (15 residual codes a row) of rowseed's code predictor beside vLLM-Omni's own, in one process.

    python bench/frame.py [--device cpu|cuda] [--json FILE] [--quick]

Real sizes of Qwen3-TTS 12Hz 0.6B (hidden 1024, 5 layers, 16 heads, 8 key/value heads of 128, MLP 3072, 2048
codes, 16 groups), random weights, the same module and weights for both sides, which take turns.

    mode    seeded: every row; half: every second row; unseeded: none. Ours packs row streams within the time;
            vLLM-Omni draws from generators, its V1 way on a CPU, and on CUDA the V2 way: noise filled row by
            row, then its graph.
    peer    eager: vLLM-Omni's predictor as its CPU platform runs it; compiled: with torch.compile, as it is
            where inductor is supported. Ours is never compiled: on CUDA both sides are CUDA graphs.
    ops     operators of a frame without views (on CUDA the Triton kernels between them are not counted);
            sampler_launches: `rowseed::sample` among ours.
    gemm_ms the frame's matrix products alone, on the frame's weights and shapes: the floor under ours_ms.

No time is given for inputs whose check fails: greedy codes equal to vLLM-Omni's in float32; in bfloat16
teacher-forced logits at most 5 % further from float32 truth than vLLM-Omni's (root mean square).
"""

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests/vllm_omni/support"))

import torch
from predictors import (
    REAL,
    TheirCodePredictor,
    frame_inputs,
    make_predictor,
    teacher_forced,
    their_teacher_forced,
)
from records import write_json
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from rowseed.kernels.streams import RowStreams

HIDDEN = REAL["hidden_size"]
MODES = ("seeded", "half", "unseeded")
BF16_MARGIN = 1.05


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(call) -> Counter:
    with torch.inference_mode(), Operators() as seen:
        call()
    return seen.counts


def seeds_of(mode: str, rows: int) -> list[int | None]:
    return [
        1000 + row if mode == "seeded" or (mode == "half" and row % 2 == 0) else None for row in range(rows)
    ]


class Ours:
    def __init__(self, predictor, inputs, mode: str):
        rows, device = inputs[0].shape[0], inputs[0].device
        self.predictor, self.inputs = predictor, inputs
        self.streams = RowStreams(rows, device)
        self.seeds, self.offset = seeds_of(mode, rows), 0

    def __call__(self):
        self.offset += 1
        streams = self.streams.pack(self.seeds, [self.offset] * len(self.seeds))
        return self.predictor(*self.inputs, streams=streams)


class Theirs:
    """V1's generators."""

    def __init__(self, predictor, inputs, mode: str):
        rows, device = inputs[0].shape[0], inputs[0].device
        self.predictor, self.inputs = predictor, inputs
        self.generators: list[torch.Generator | None] | None = None
        if mode != "unseeded":
            self.generators = [
                None if seed is None else torch.Generator(device).manual_seed(seed)
                for seed in seeds_of(mode, rows)
            ]

    def frame(self):
        """The part that a graph can hold."""
        return self()

    def __call__(self):
        return TheirCodePredictor.forward(self.predictor, *self.inputs, generators=self.generators)


class TheirGraph(Theirs):
    """V2: noise filled on the host's orders, row by row where a row has a generator; then a graph."""

    def __init__(self, predictor, inputs, mode: str):
        super().__init__(predictor, inputs, mode)
        rows, device = inputs[0].shape[0], inputs[0].device
        self.noise = torch.rand(rows, REAL["num_code_groups"] - 1, REAL["vocab_size"], device=device)
        for _ in range(3):
            self.frame()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.codes = self.frame()

    def frame(self):
        return TheirCodePredictor.forward(self.predictor, *self.inputs, sample_uniforms=self.noise)

    def __call__(self):
        if self.generators is None:
            self.noise.uniform_(1e-20, 1 - 1e-20)
        else:
            for row, generator in enumerate(self.generators):
                self.noise[row].uniform_(1e-20, 1 - 1e-20, generator=generator)
        self.graph.replay()
        return self.codes


def check(predictor, exact, inputs) -> str | None:
    """Why times on these inputs would mean nothing, or None."""
    if exact is None:
        theirs = TheirCodePredictor.forward(predictor, *inputs, do_sample=False)
        same = (predictor(*inputs, do_sample=False) == theirs).float().mean().item()
        return None if same == 1 else f"only {same:.1%} of greedy codes equal vLLM-Omni's"
    code0, embed, hidden = inputs
    residual = torch.randint(REAL["vocab_size"], (code0.shape[0], REAL["num_code_groups"] - 1))
    codes = torch.cat((code0, residual.to(code0.device)), 1)
    truth = their_teacher_forced(exact, (code0, embed.float(), hidden.float()), codes)
    ours, peer = (
        (forced(predictor, inputs, codes) - truth).square().mean().sqrt().item()
        for forced in (teacher_forced, their_teacher_forced)
    )
    print(f"batch {len(codes)}: logits off float32 truth (rms): ours {ours:.5f}, vLLM-Omni {peer:.5f}")
    return None if 0 < ours <= BF16_MARGIN * peer else f"logits off by {ours:.2e}, vLLM-Omni's by {peer:.2e}"


def timed(call, device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compare(ours, theirs, device: str, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each, taking turns. On a CPU the frames that counted operators were the warm-up."""
    if device == "cuda":
        ours()
        theirs()
    pairs = [(timed(ours, device), timed(theirs, device)) for _ in range(repeats)]
    return [ours_ms for ours_ms, _ in pairs], [theirs_ms for _, theirs_ms in pairs]


def reset_peer(predictor, *, compiled: bool) -> None:
    """What `_setup_compile` sets up, without compiling for every batch size up to max_num_seqs."""
    predictor._proj_buf = None
    predictor._bucket_sizes, predictor._bucket_pos_ids = [], {}
    predictor._model_dtype = predictor.lm_head[0].weight.dtype
    predictor._lm_heads_list = list(predictor.lm_head)
    predictor._codec_embeds_list = list(predictor.model.codec_embedding)
    predictor._compiled_model_fwd = predictor.model.forward
    if compiled:
        predictor._compiled_model_fwd = torch.compile(
            predictor.model.forward, dynamic=False, options={"epilogue_fusion": False}
        )


def weights_floor(predictor, rows: int) -> float:
    """Milliseconds that a frame's GEMMs take alone, on the frame's own weights and shapes."""
    frame = predictor.prepare(rows)
    weights, buffers = frame.weights, frame.buffers

    def gemms(N: int) -> None:
        for layer in weights.layers:
            layer.qkv(buffers.y[:N], buffers.qkv[:N])
            layer.o.add_to(buffers.x[:N], buffers.attention[:N])
            layer.gate_up(buffers.y[:N], buffers.gate_up[:N])
            layer.down.add_to(buffers.x[:N], buffers.gated[:N])

    def frame_of_gemms() -> None:
        buffers.x.zero_()
        for step, head in enumerate(weights.heads):
            gemms(2 * rows if step == 0 else rows)
            head(buffers.y[:rows], buffers.logits[:rows])

    with torch.inference_mode():
        frame_of_gemms()
        device = weights.device.type
        return statistics.median(timed(frame_of_gemms, device) for _ in range(5))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--mode", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of both sides")
    parser.add_argument("--compiled", action="store_true", help="on a CPU, vLLM-Omni compiled as well")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--quick", action="store_true", help="seeded; on a CPU batch 1 in float32")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mode = ["seeded"]
        # A CPU without bfloat16 arithmetic takes seconds for a frame of vLLM-Omni's.
        on_cpu = arguments.device == "cpu"
        arguments.dtype, arguments.batch = (["float32"], [1]) if on_cpu else (["bfloat16"], [1, 8])
    if arguments.repeats < 5:
        parser.error(f"--repeats must be at least 5, got {arguments.repeats}")
    torch.set_num_threads(arguments.threads)
    device = arguments.device

    torch.manual_seed(0)
    records, failed = [], []
    end = time.monotonic() + arguments.seconds
    for name in arguments.dtype:
        dtype = getattr(torch, name)
        predictor = make_predictor(max_num_seqs=max(arguments.batch), dtype=dtype, **REAL).to(device)
        exact = make_predictor(**REAL) if dtype != torch.float32 else None
        if exact is not None:
            exact.load_state_dict(predictor.state_dict())
            exact.to(device)
        peers = ["eager", "compiled"] if arguments.compiled and device == "cpu" else ["eager"]
        if device == "cuda":
            peers = ["compiled"]
        for peer in peers:
            with torch.inference_mode():
                reset_peer(predictor, compiled=peer == "compiled")
            took, took_rows = 0.0, 1  # at the last batch; more rows take at most as much longer
            for rows in arguments.batch:
                start, expected = time.monotonic(), took * rows / took_rows
                if start + expected > end:
                    print(f"{name} {rows} {peer}: left out, it could take {expected:.0f} s")
                    continue
                inputs = frame_inputs(rows, HIDDEN, dtype, vocab=REAL["vocab_size"])
                inputs = tuple(tensor.to(device) for tensor in inputs)
                fault = check(predictor, exact, inputs)
                if fault:
                    print(f"{name} {rows}: no times, the check failed: {fault}", file=sys.stderr)
                    failed.append(name)
                    continue
                for mode in arguments.mode if peer == peers[0] else arguments.mode[:1]:
                    ours = Ours(predictor, inputs, mode)
                    theirs = (TheirGraph if device == "cuda" else Theirs)(predictor, inputs, mode)
                    # Graphs hide their operators: count what they were captured from.
                    graphs, predictor._graphs = predictor._graphs, None
                    our_ops = operators(ours)
                    predictor._graphs = graphs
                    their_ops = operators(theirs.frame) if peer == "eager" else None
                    if peer == "compiled" and device == "cpu":
                        theirs()  # compiles; its operators were not counted
                    our_times, their_times = compare(ours, theirs, device, arguments.repeats)
                    ours_ms, peer_ms = statistics.median(our_times), statistics.median(their_times)
                    records.append(
                        {
                            "device": device,
                            "dtype": name,
                            "batch": rows,
                            "mode": mode,
                            "peer": peer,
                            "ours_ms": ours_ms,
                            "ours_p20_ms": quantile(our_times, 0.2),
                            "ours_p80_ms": quantile(our_times, 0.8),
                            "peer_ms": peer_ms,
                            "peer_p20_ms": quantile(their_times, 0.2),
                            "peer_p80_ms": quantile(their_times, 0.8),
                            "ratio": peer_ms / ours_ms,
                            "gemm_ms": weights_floor(predictor, rows),
                            "sampler_launches": our_ops["rowseed.sample.default"],
                            "ops_ours": our_ops.total(),
                            "ops_peer": None if their_ops is None else their_ops.total(),
                            "repeats": arguments.repeats,
                            "threads": arguments.threads,
                            "torch": torch.__version__,
                        }
                    )
                    print_row(records[-1])
                took, took_rows = time.monotonic() - start, rows
    print_table(records)
    if arguments.json:
        write_json(arguments.json, "frame", records)
    sys.exit(1 if failed else 0)


def print_row(record: dict) -> None:
    print(
        f"{record['dtype']} {record['batch']:3} {record['mode']:8} {record['peer']:8} "
        f"{record['peer_ms']:.1f} / {record['ours_ms']:.1f} ms = {record['ratio']:.2f}",
        flush=True,
    )


def spread(record: dict, side: str) -> str:
    median, low, high = (record[f"{side}_{part}ms"] for part in ("", "p20_", "p80_"))
    return f"{median:.1f} ({low:.1f} - {high:.1f})"


def print_table(records: list[dict]) -> None:
    table = Table(title="one frame: median (p20 - p80), ms")
    for column in (
        "dtype",
        "batch",
        "mode",
        "peer",
        "vLLM-Omni",
        "rowseed",
        "ratio",
        "GEMMs alone",
        "launches",
        "ops",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "mode", "peer") else "right")
    for record in records:
        table.add_row(
            record["dtype"],
            str(record["batch"]),
            record["mode"],
            record["peer"],
            *(spread(record, side) for side in ("peer", "ours")),
            f"{record['ratio']:.2f}",
            f"{record['gemm_ms']:.1f} ({record['gemm_ms'] / record['ours_ms']:.0%})",
            str(record["sampler_launches"]),
            f"{record['ops_ours']} / {record['ops_peer'] or '-'}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
