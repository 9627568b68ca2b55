"""The sampler beside its peers: time of one draw for a whole batch, on the same logits in one run.

On a GPU: eager and in a CUDA graph of 15 draws, L2 cache warm and cold, CUDA events. On a CPU: the
project's CPU path and the peers that run there. No time is taken of a path before its
codes on the same inputs are right (bench/gate.py; this project's also bit for bit against the
torch reference). `--dry-run` runs every GPU case at a tiny size in Triton's interpreter.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.append(str(Path(__file__).parent))  # for `python bench/sampler.py` and `-m bench.sampler` alike

from gate import Expected, WrongError
from peers import DRY_RUN, SAMPLERS, Case, Rowseed, Sampler, Unavailable, interpreted
from records import Record, write_json
from timing import CudaClock, HostClock, PretendedClock

TOP_K, TOP_PS = 50, (1.0, 0.9)
SEEDED = ("all", "half", "none")
BATCHES = (1, 4, 16, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)
LOGIT_SD = 2.0


def grid(kind: str) -> list[Case]:
    """Cases that share inputs one after another, the largest batch of each group first.

    kind: "gpu", "cpu" (fewer vocabularies and batches: a CPU is slow), "quick" or "dry".
    """
    groups: list[tuple[int, torch.dtype, float, str, tuple[int, ...]]]
    if kind == "dry":
        groups = [(128, d, p, "half", (2,)) for d in DTYPES for p in TOP_PS]
        groups += [(128, torch.bfloat16, 1.0, s, (2,)) for s in ("all", "none")]
        groups += [(2048, torch.bfloat16, 1.0, "all", (1,))]  # sglang-omni's only size
    elif kind == "quick":
        groups = [(2048, torch.bfloat16, 1.0, s, (64, 16, 1)) for s in ("all", "none")]
    else:
        fewer = (256, 64, 16, 1) if kind == "cpu" else BATCHES[::-1]
        batches = {torch.bfloat16: BATCHES[::-1], torch.float32: fewer}
        groups = [(2048, d, p, s, batches[d]) for d in DTYPES for p in TOP_PS for s in SEEDED]
        if kind == "cpu":
            groups = [group for group in groups if group[1] == torch.bfloat16 or group[3] == "all"]
        if kind == "gpu":
            others = (256, 64, 1)
            groups += [(v, d, p, "all", others) for v in (1024, 4096, 32768) for d in DTYPES for p in TOP_PS]
        else:
            groups += [(v, torch.bfloat16, 1.0, "all", (16, 1)) for v in (1024, 4096, 32768)]
    return [Case(b, v, d, min(TOP_K, v), p, s) for v, d, p, s, batches in groups for b in batches]


class Bench:
    """Runs the grid on one device; keeps records, skips and failures."""

    def __init__(self, device: torch.device, clock: HostClock | CudaClock, *, draws: int, console: Console):
        self.device, self.clock, self.draws, self.console = device, clock, draws, console
        self.records: list[Record] = []
        self.skips: dict[tuple[str, str], int] = {}
        self.wrong: list[str] = []
        self._logits: tuple = (None, None)
        self._expected: tuple = (None, None)
        self._gated: dict[tuple, str] = {}

    def logits(self, case: Case) -> torch.Tensor:
        """[S, batch, V] of the case's group; a smaller batch is the first rows of a larger one."""
        key = case._replace(batch=0, top_p=1.0, seeded="")
        if self._logits[0] != key:
            random = torch.Generator().manual_seed(case.vocab)
            shape = (self.clock.calls_a_frame, case.batch, case.vocab)
            values = torch.randn(shape, generator=random) * LOGIT_SD
            self._logits = (key, values.to(self.device, case.dtype))
        held = self._logits[1]
        if held.shape[1] < case.batch:
            raise ValueError(f"cases must come largest batch first, got {case} after batch {held.shape[1]}")
        return held[:, : case.batch]

    def expected(self, case: Case) -> Expected:
        key = case._replace(seeded="")
        if self._expected[0] != key:
            self._expected = (key, Expected(self.logits(case)[0], case.temperature, case.top_k, case.top_p))
        return self._expected[1]

    def gate(self, made: type[Sampler], case: Case) -> None:
        """Check the group's largest batch once, by distribution; raise WrongError now and later if wrong."""
        key = (made.name, *case._replace(batch=0))
        if key not in self._gated:
            self._gated[key] = ""
            try:
                sampler = made(case, self.logits(case))
                draws = []
                for step in range(max(1, self.draws // case.batch)):
                    sampler.advance(step)
                    sampler.before()
                    draws.append(sampler.draw().clone())
                self.expected(case).check(torch.stack(draws))
            except WrongError as error:
                self._gated[key] = str(error)
        if self._gated[key]:
            raise WrongError(self._gated[key])

    def run(self, case: Case, made: type[Sampler]) -> Iterator[Record]:
        """Records of one implementation and case, one a mode."""
        if made.name == "floor":
            sampler = made(case, self.logits(case))
        else:
            self.gate(made, case)
            sampler = made(case, self.logits(case))
            self.check(sampler, sampler.draw())
        for mode in self.clock.modes:
            if mode.startswith("graph") and sampler.uncapturable:
                self.skip(made.name, f"in a graph: {sampler.uncapturable}")
                continue
            held: list[torch.Tensor] = []

            def frame(held=held, sampler=sampler) -> None:
                held[:] = [sampler.draw(codebook) for codebook in range(self.clock.calls_a_frame)]

            prepared = self.clock.prepare(frame, mode)
            if made.name != "floor" and mode.startswith("graph"):
                sampler.before()
                prepared()
                self.check(sampler, held[0])
            timing = self.clock.time(sampler.before, prepared, mode)
            yield {
                "impl": made.name,
                "batch": case.batch,
                "vocab": case.vocab,
                "dtype": str(case.dtype).removeprefix("torch."),
                "top_k": case.top_k,
                "top_p": case.top_p,
                "seeded": case.seeded,
                "mode": mode,
                "threads": torch.get_num_threads(),
                **timing._asdict(),
            }

    def check(self, sampler: Sampler, codes: torch.Tensor) -> None:
        """Every code is of a kept token; this project's are the reference's, bit for bit."""
        self.expected(sampler.case).ranks(codes)
        if isinstance(sampler, Rowseed):
            reference = sampler.reference()
            if not torch.equal(codes.cpu(), reference):
                row = int((codes.cpu() != reference).nonzero()[0, 0])
                raise WrongError(
                    f"row {row}: code {int(codes[row])}, the torch reference: {int(reference[row])}"
                )

    def skip(self, name: str, reason: str) -> None:
        if (name, reason) not in self.skips:
            self.console.print(f"skipped {name}: {reason}", highlight=False)
        self.skips[name, reason] = self.skips.get((name, reason), 0) + 1

    def run_all(
        self,
        cases: list[Case],
        samplers: tuple[type[Sampler], ...] = SAMPLERS,
        seconds: float = float("inf"),
    ) -> list[Record]:
        """Records of all cases; those that would start after `seconds` are left out, and that is said."""
        end = time.monotonic() + seconds
        with Progress(console=self.console, transient=True) as progress:
            for number, case in enumerate(progress.track(cases, description="sampler")):
                if time.monotonic() > end:
                    left = len(cases) - number
                    self.console.print(f"out of time: {left} of {len(cases)} cases left out, from {case} on")
                    break
                for made in samplers:
                    try:
                        self.records += self.run(case, made)
                    except Unavailable as reason:
                        self.skip(made.name, str(reason))
                    except WrongError as error:
                        self.wrong.append(f"{made.name}, {case}: {error}")
                        self.console.print(f"NOT TIMED, wrong codes: {self.wrong[-1]}", highlight=False)
                    except Exception as error:
                        # A peer may fail to compile or to be captured here; the others go on without it.
                        if not made.peer:
                            raise
                        line = str(error).strip().split("\n")[0][:150]
                        self.skip(made.name, f"it failed: {type(error).__name__}: {line}")
        return self.records


def summary(records: list[Record], console: Console) -> None:
    """The everyday case: V = 2048, bfloat16, top_p = 1, every row seeded."""
    chosen = [r for r in records if r["vocab"] == 2048 and r["dtype"] == "bfloat16" and r["top_p"] == 1]
    for mode in dict.fromkeys(r["mode"] for r in chosen):
        points = {(r["impl"], r["batch"]): r for r in chosen if r["mode"] == mode and r["seeded"] == "all"}
        batches = sorted({batch for _, batch in points})
        table = Table(title=f"one draw, median us, {mode}: V 2048, bfloat16, top_k 50, all seeded")
        table.add_column("")
        for batch in batches:
            table.add_column(f"B = {batch}", justify="right")
        for impl in dict.fromkeys(impl for impl, _ in points):
            cells = [points.get((impl, batch)) for batch in batches]
            table.add_row(impl, *(f"{cell['p50_us']:.1f}" if cell else "" for cell in cells))
        console.print(table)


def dry_run() -> int:
    """Every GPU case, tiny, in the interpreter; returns the exit status."""
    if not interpreted():
        # The interpreter must be chosen before triton is imported.
        command = [sys.executable, __file__, "--dry-run"]
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", DRY_RUN: "1"}).returncode
    console = Console()
    bench = Bench(torch.device("cpu"), PretendedClock(), draws=2, console=console)
    bench.run_all(cases := grid("dry"))
    ran = ", ".join(dict.fromkeys(record["impl"] for record in bench.records))
    console.print(f"dry run of {len(cases)} cases, {len(bench.records)} points, nothing measured; ran: {ran}")
    return 1 if bench.wrong else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    parser.add_argument("--quick", action="store_true", help="the everyday case only")
    parser.add_argument("--seconds", type=float, default=150, help="last start of a case (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="every GPU case once, tiny, without a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    options = parser.parse_args(arguments)
    if options.dry_run:
        if options.json:
            parser.error("--dry-run measures nothing, so --json has nothing to write")
        return dry_run()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device")
    console = Console()
    clock = CudaClock() if on_gpu else HostClock(budget_s=0.06)
    if not on_gpu:
        # With more threads than free cores, a barrier costs a scheduler's time slice.
        torch.set_num_threads(1)
    bench = Bench(device, clock, draws=4096 if on_gpu else 1024, console=console)
    cases = grid("quick" if options.quick else "gpu" if on_gpu else "cpu")
    records = bench.run_all(cases, seconds=options.seconds)
    if options.json:
        write_json(options.json, "sampler", records)
    summary(records, console)
    return 1 if any(wrong.startswith(Rowseed.name) for wrong in bench.wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
