"""What a decode step costs the host around the code predictor: rowseed beside vLLM-Omni's own code.

    python bench/host.py [--json FILE] [--quick]

    ours_us      rowseed's `pack_rows`: each request's extra_args read and checked, seeds, offsets and
                 parameters packed; all that it does in the V2 runner
    peer_v2_us   vLLM-Omni's V2 preparation of the same rows: `_get_mtp_generator` for each, then
                 `_prepare_mtp_sample_uniforms`, [rows, 15, 2048] of noise, row by row if any row has a seed
    ours_v1_us   the V1 runner's `_talker_mtp_forward` as rowseed joins it, packing and dispatch
    peer_v1_us   vLLM-Omni's own `_talker_mtp_forward`: the list of generators, dispatch

The real classes and methods take turns in one process; the MTP that they call does nothing. On a CPU the
noise of peer_v2 is also made within its time; on a GPU one fill a row is launched. So one more figure:

    peer_v2_calls_us   the same with 1 number a row in place of 15 x 2048: close to its host part alone
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tests/vllm_omni/support"))

import omni_fakes
import torch
from records import write_json
from rich.console import Console
from rich.table import Table
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner
from vllm_omni.worker.sampling_utils import get_tts_local_seed
from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState

from rowseed.vllm_omni.extra_args import SEED_ARG, stage_parameters
from rowseed.vllm_omni.worker.row_packing import bind_rows, pack_rows
from rowseed.vllm_omni.worker.runner_v1 import join_talker_mtp_forward

CODES, VOCAB, HIDDEN = 15, 2048, 1024
WAYS = ("ours", "peer_v2", "peer_v2_calls", "ours_v1", "peer_v1")
SEEDED = ("all", "half", "none")


class Mtp(torch.nn.Module):
    """Takes what a runner passes and answers at once."""

    talker_mtp_output_key = ("codes", "audio")
    talker_mtp_seed_extra_arg = SEED_ARG
    talker_mtp_accepts_per_row_generators = True

    def __init__(self, rows: int, *, row_streams: bool) -> None:
        super().__init__()
        self.codes = torch.zeros(rows, CODES + 1, dtype=torch.long)
        self.talker_mtp_accepts_row_streams = row_streams
        if row_streams:
            bind_rows(self, rows, torch.device("cpu"), rank=0, defaults=stage_parameters(None))

    def talker_mtp(self, ids, embeds, hidden, text, **kwargs):
        return embeds, self.codes[: ids.shape[0]]


def steps(rows: int, seeded: str) -> dict:
    """One decode step of each way, as calls without arguments."""
    share = {"all": 1, "half": 2}.get(seeded)
    extra = {f"r{i}": {SEED_ARG: 1000 + i} if share and i % share == 0 else None for i in range(rows)}

    packed = Mtp(rows, row_streams=True)
    requests = [(name, omni_fakes.request(args).sampling_params) for name, args in extra.items()]
    frames = list(range(rows))
    defaults = stage_parameters(None)

    def v2(numbers_a_row: tuple[int, int]):
        state = object.__new__(OmniModelState)
        state.model = SimpleNamespace(get_mtp_seed=get_tts_local_seed)
        state._mtp_generators = {}
        state._mtp_sample_uniforms = torch.empty(rows, *numbers_a_row)
        device = torch.device("cpu")

        def prepare():
            generators = [state._get_mtp_generator(name, params, device) for name, params in requests]
            state._prepare_mtp_sample_uniforms(generators, rows)

        return prepare

    def v1(method, model):
        omni_fakes.MAX_ROWS = rows
        runner = omni_fakes.make_runner(model, extra, frames=frames, hidden=HIDDEN)
        names, embeds = list(extra), torch.zeros(rows, HIDDEN)
        return lambda: method(runner, names, embeds, frames)

    original = OmniGPUModelRunner._talker_mtp_forward
    return {
        "ours": lambda: pack_rows(packed, requests, frames, defaults),
        "peer_v2": v2((CODES, VOCAB)),
        "peer_v2_calls": v2((1, 1)),
        "ours_v1": v1(join_talker_mtp_forward(original), Mtp(rows, row_streams=True)),
        "peer_v1": v1(original, Mtp(rows, row_streams=False)),
    }


def measure(rows: int, seeded: str, repeats: int) -> dict:
    """Medians and the 20th and 80th percentiles, microseconds."""
    calls = steps(rows, seeded)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with torch.inference_mode():
        for turn in range(repeats + 3):
            for way in WAYS:
                start = time.perf_counter_ns()
                calls[way]()
                if turn >= 3:
                    times[way].append((time.perf_counter_ns() - start) / 1e3)
    record = {"rows": rows, "seeded": seeded}
    for way in WAYS:
        ordered = sorted(times[way])
        record[f"{way}_us"] = round(statistics.median(ordered), 1)
        for share in (20, 80):
            record[f"{way}_p{share}_us"] = round(ordered[round(share / 100 * (repeats - 1))], 1)
    return record | {"repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="1 and 64 rows, 11 repeats")
    arguments = parser.parse_args()
    # With more threads than free cores, a barrier costs a scheduler's time slice.
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.rows, arguments.repeats = [1, 64], 11
    if arguments.repeats < 5:
        parser.error(f"--repeats must be at least 5, got {arguments.repeats}")

    records = [measure(rows, seeded, arguments.repeats) for rows in arguments.rows for seeded in SEEDED]
    table = Table(title="a decode step's host cost: median (p20 - p80), microseconds")
    for column in ("rows", "seeded", *WAYS):
        table.add_column(column, justify="right")
    for record in records:
        table.add_row(
            str(record["rows"]),
            record["seeded"],
            *(
                f"{record[f'{way}_us']:.0f} ({record[f'{way}_p20_us']:.0f} - {record[f'{way}_p80_us']:.0f})"
                for way in WAYS
            ),
        )
    Console(width=140).print(table)
    if arguments.json:
        write_json(arguments.json, "host", records)


if __name__ == "__main__":
    main()
