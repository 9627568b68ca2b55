"""Every bench, one after another: raw results, plots, README's tables, and a short table last.

    python bench/all.py [--quick] [--only NAME ...] [--out FOLDER]

Results go to bench/results/<device>/, and README's tables are written from there; with --quick
or --out they go elsewhere and README stays as it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parent))  # for `python bench/all.py` and `-m bench.all` alike

import plot
import tables
from records import ROOT, device_folder, environment, write_csv

HERE = Path(__file__).resolve().parent

BUDGET_S = {"full": 490, "quick": 108}
"""All benches together. What is left at a bench's start is the most that it may take."""


class Part(NamedTuple):
    """A bench, and the most that it may take: on a GPU, on a CPU, and in a quick run, in seconds."""

    name: str
    gpu_s: int
    cpu_s: int
    quick_s: int
    timed: bool = True  # the others count, and may run at the same time
    reserve_s: int | None = None  # its --seconds is the limit less this; None: it has no such option


PARTS = (
    Part("static", 240, 240, 60, timed=False),
    Part("flips", 200, 200, 60, timed=False),
    Part("sampler", 180, 90, 60, reserve_s=20),
    Part("host", 60, 60, 40),
    Part("code0", 60, 60, 30),
    Part("frame", 200, 80, 60, reserve_s=15),
    Part("server", 300, 300, 0, reserve_s=30),  # an engine's start alone takes most of a quick run's time
)


def run_part(part: Part, more: list[str], seconds: float) -> list[dict] | str:
    """The bench's records, or why there are none."""
    script = HERE / f"{part.name}.py"
    # The benches import one another by name, also where PYTHONSAFEPATH keeps a script's folder off the path.
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        command = [sys.executable, str(script), "--json", str(file), *more]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"not done within {seconds:.0f} s"
        if status:
            return f"exit status {status}"
        return json.loads(file.read_text())


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes; results go to out/bench")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--model", help="a Qwen3-TTS CustomVoice model for the server, on a GPU")
    parser.add_argument(
        "--patience", type=float, default=1, metavar="X", help="X times the time for each bench"
    )
    parser.add_argument("--out", type=Path, help="folder for the results of this device")
    options = parser.parse_args(arguments)
    console = Console()
    kept = not options.quick and options.out is None
    folder = device_folder() if kept else options.out or ROOT / "out" / "bench" / device_folder().name
    where = environment()
    on_gpu = torch.cuda.is_available()
    kind = f"a GPU, driver {where['driver']}" if on_gpu else "a CPU: what needs a GPU is skipped"
    console.print(f"{where['device']} ({kind}); commit {where['commit'] or 'unknown'}", highlight=False)

    end = time.monotonic() + BUDGET_S["quick" if options.quick else "full"] * options.patience
    outcome: dict[str, tuple[str, float]] = {}

    def measure(part: Part) -> None:
        limit = part.quick_s if options.quick else part.gpu_s if on_gpu else part.cpu_s
        limit *= options.patience
        if not limit:
            outcome[part.name] = ("left out of a quick run", 0)
            return
        if part.name == "server" and on_gpu and not options.model:
            outcome[part.name] = ("left out: name a model, make bench MODEL=...", 0)
            return
        more = ["--quick"] if options.quick else []
        if part.name == "server" and options.model:
            more += ["--model", options.model]
        if part.name == "frame":
            more += ["--device", "cuda"] if on_gpu else ["--mode", "seeded"]
        if part.name == "static" and not on_gpu and options.patience == 1:
            more += ["--fewer"]
        start = time.monotonic()
        seconds = max(10, min(limit, end - start))
        if part.reserve_s is not None:
            more += ["--seconds", f"{max(1, seconds - part.reserve_s):.0f}"]
        result = run_part(part, more, seconds)
        took = time.monotonic() - start
        if isinstance(result, str):
            outcome[part.name] = (f"FAILED: {result}", took)
        else:
            write_csv(folder / f"{part.name}.csv", part.name, result, where)
            outcome[part.name] = (f"{len(result)} points", took)

    chosen = [part for part in PARTS if part.name in options.only]
    steps = [[part for part in chosen if not part.timed], *([part] for part in chosen if part.timed)]
    steps = [step for step in steps if step]
    for index, step in enumerate(steps, 1):
        what = ", ".join(f"{part.name} ({tables.WHAT[part.name]})" for part in step)
        console.rule(f"[{index}/{len(steps)}] {what}")
        with ThreadPoolExecutor() as pool:
            list(pool.map(measure, step))
    plot.draw(folder)
    if kept:
        tables.update(ROOT / "README.md", tables.text())

    table = Table(title=f"results in {folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder}")
    for column in ("bench", "outcome", "s", "in short"):
        table.add_column(column, justify="right" if column == "s" else "left")
    for name in options.only:
        text, took = outcome[name]
        table.add_row(name, text, f"{took:.0f}", tables.in_short(name, folder))
    console.print(table)
    return 1 if any(text.startswith("FAILED") for text, _ in outcome.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
