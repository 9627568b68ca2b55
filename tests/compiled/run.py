"""Every variant of the sampler as Triton compiles it, executed and compared with the torch reference.

    TRITON_INTERPRET=0 python tests/compiled/run.py [--targets sm_80 sm_90 sm_100] [--only TEXT]
                                               [--order SEED]

Ends with a summary and the exit code 1 if anything differed, raced or was refused.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"
sys.path.append(str(Path(__file__).parent))

import torch
import triton
from executed import RaceError, executing
from golden_rows import wrong_rows
from ptx import Fault, UnknownInstruction
from rich.console import Console
from rich.progress import track
from sampler_cases import VARIANTS, differences

from rowseed.kernels import fused


def check(index: int, target: str, order: int | None) -> tuple[int, str, str]:
    """Draws made, what went wrong ("" for nothing) and its kind."""
    torch.set_num_threads(1)
    case = VARIANTS[index]
    try:
        got, _ = case.execute(target, order=order, measure=False)
    except RaceError as error:
        return 0, str(error), "races"
    except (Fault, UnknownInstruction) as error:
        return 0, f"{type(error).__name__}: {error}", "faults"
    wrong = differences(case.draw("torch"), got)
    return got["out"].numel(), str(wrong) if wrong else "", "differences"


def golden(target: str) -> tuple[int, str, str]:
    with patch.object(fused, "INTERPRETED", True), executing(target, measure=False):
        done, wrong = wrong_rows("triton")
    return done, "; ".join(wrong[:3]), "differences"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument(
        "--order", type=int, help="seed of the order of warps and blocks; in lockstep without"
    )
    options = parser.parse_args()
    console, begin = Console(), time.monotonic()
    chosen = [i for i, case in enumerate(VARIANTS) if options.only in case.name]
    failed = {"differences": 0, "races": 0, "faults": 0}
    rows = 0
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = {}
        for target in options.targets:
            if not options.only:
                jobs[pool.submit(golden, target)] = f"{target}, golden rows"
            for i in chosen:
                jobs[pool.submit(check, i, target, options.order)] = f"{target}, {VARIANTS[i].name}"
        for job, name in track(jobs.items(), "compiled and executed", console=console):
            done, wrong, kind = job.result()
            rows += done
            if wrong:
                failed[kind] += 1
                console.print(f"{name}: {wrong}", markup=False)
    console.print(
        f"Triton {triton.__version__}, {', '.join(options.targets)}: {len(chosen)} variants each, {rows}"
        f" draws compared with the reference; differences {failed['differences']}, races {failed['races']},"
        f" faults {failed['faults']}; {time.monotonic() - begin:.0f} s"
    )
    return int(any(failed.values()))


if __name__ == "__main__":
    sys.exit(main())
