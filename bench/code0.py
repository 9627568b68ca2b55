"""What a step's code 0 costs: rowseed's draw in vLLM's sampler beside vLLM's own, on the same logits.

    python bench/code0.py [--json FILE] [--quick] [--device cpu|cuda]

Each way is called as the runner's sampler calls it, with every row's requests at hand, and is timed until the
tokens are there:

    rowseed, V1   `V1Draw`: seeds and offsets read and packed, one launch
    vLLM, V1      its `TopKTopPSampler`: a generator a seeded row; where none is, FlashInfer if it can be had
    rowseed, V2   `V2Draw`
    vLLM, V2      its `Sampler._sample_random`; needs Triton, so not on a CPU

The ways take turns in one process. Logits are float32, as a sampler has them once a temperature was applied.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests/vllm_omni/support"))
sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

import code0_runners
import torch
from records import CODE0_SEEDED, Record, write_json
from rich.console import Console
from rich.table import Table
from timing import Timing

from rowseed.vllm_omni import plugin

VOCAB, TOP_K = 3072, 50
BATCHES = (1, 16, 64)
Draw = Callable[[torch.Tensor], torch.Tensor]


def seeds(rows: int, seeded: str) -> list[int | None]:
    count = {"none": 0, "one": 1, "all": rows}[seeded]
    return [*range(1000, 1000 + count), *[None] * (rows - count)]


def v1(rows: int, seeded: str, device: torch.device) -> dict[str, Draw]:
    k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
    params = code0_runners.seeded(*seeds(rows, seeded))
    bound = code0_runners.light_v1(params, frames=list(range(rows)), device=device).sampler
    plain = code0_runners.light_v1(params, bind=False, device=device).sampler
    generators = {
        row: torch.Generator(device).manual_seed(seed)
        for row, seed in enumerate(seeds(rows, seeded))
        if seed is not None
    }
    return {
        "rowseed, V1": lambda logits: bound.topk_topp_sampler(logits, {}, k, None)[0],
        "vLLM, V1": lambda logits: plain.topk_topp_sampler(logits, generators, k, None)[0],
    }


def v2(rows: int, seeded: str, device: torch.device) -> dict[str, Draw]:
    """Empty where vLLM-Omni has no V2 runner."""
    try:
        import code0_runners_v2
        from vllm.triton_utils import HAS_TRITON
    except ImportError:
        return {}
    plugin.register()  # joins the model state's class
    params = code0_runners.seeded(*seeds(rows, seeded), top_k=TOP_K)
    bound = code0_runners_v2.Runner(params, slots=rows, vocabulary=VOCAB, device=device)
    plain = code0_runners_v2.Runner(
        params, slots=rows, vocabulary=VOCAB, device=device, model=SimpleNamespace()
    )
    ways: dict[str, Draw] = {"rowseed, V2": lambda logits: bound.draw(logits)[0]}
    if HAS_TRITON and device.type == "cuda":
        ways["vLLM, V2"] = lambda logits: plain.draw(logits)[0]
    return ways


def measure(rows: int, seeded: str, device: torch.device, repeats: int) -> list[Record]:
    """One record a way."""
    random = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, VOCAB, generator=random) * 2).to(device)
    ways = v1(rows, seeded, device) | v2(rows, seeded, device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: dict[str, list[float]] = {way: [] for way in ways}
    with torch.inference_mode():
        kept = logits.topk(TOP_K).values[:, -1:]
        for turn in range(repeats + 3):
            for way, draw in ways.items():
                given = logits.clone()  # vLLM's draw writes into its logits
                wait()
                start = time.perf_counter_ns()
                tokens = draw(given)
                wait()
                if turn >= 3:
                    times[way].append((time.perf_counter_ns() - start) / 1e3)
                if not (logits.gather(1, tokens[:, None].long()) >= kept).all():
                    raise RuntimeError(f"{way}: a token that top-k {TOP_K} does not keep, {rows} rows")
    return [
        {
            **{"impl": way, "batch": rows, "vocab": VOCAB, "dtype": "float32", "top_k": TOP_K},
            **{"seeded": seeded, "repeats": repeats},
            **Timing.of(taken)._asdict(),
        }
        for way, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="64 rows only")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    options = parser.parse_args()
    if options.repeats < 5:
        parser.error(f"--repeats must be at least 5, got {options.repeats}")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # With more threads than free cores, a barrier costs a scheduler's time slice.
    torch.set_num_threads(1)
    batches = BATCHES[-1:] if options.quick else BATCHES
    records = [
        record
        for rows in batches
        for seeded in CODE0_SEEDED
        for record in measure(rows, seeded, device, options.repeats)
    ]
    table = Table(title="code 0 of a step, median us (p20 - p80)")
    for column in ("rows", "", *(f"seeded: {seeded}" for seeded in CODE0_SEEDED)):
        table.add_column(column, justify="right")
    at = {(r["batch"], r["impl"], r["seeded"]): r for r in records}
    for rows, impl in dict.fromkeys((r["batch"], r["impl"]) for r in records):
        cells = [at[rows, impl, seeded] for seeded in CODE0_SEEDED]
        table.add_row(
            str(rows), impl, *(f"{r['p50_us']:.0f} ({r['p20_us']:.0f} - {r['p80_us']:.0f})" for r in cells)
        )
    Console(width=110).print(table)
    if options.json:
        write_json(options.json, "code0", records)


if __name__ == "__main__":
    main()
