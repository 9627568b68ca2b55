"""The real `vllm serve --omni` over HTTP on the loopback: throughput, time to first audio, equal bytes.

Two servers one after the other, with rowseed and with ROWSEED=0; to each the same requests, seeded and
unseeded, at rising concurrency. On a CPU a tiny checkpoint made here; on a GPU the model that --model
names. Every request streams raw PCM. A seeded request's bytes are compared with those of the same
request sent alone before.

Bounded in count and in time (--seconds, once a server is ready); each server is stopped at its end, also
after an error.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.append(str(Path(__file__).parent))  # for `python bench/server.py` and `-m bench.server` alike

from records import ROOT, Record, write_json

SAMPLE_RATE, SAMPLE_BYTES = 24_000, 2
"""Of Qwen3-TTS's audio as 16-bit PCM."""

START_S, REQUEST_S, STOP_S = 240, 120, 20
"""Longest start of a server, answer to a request, and polite stop, in seconds."""

TEXTS = (
    "The lighthouse keeper wrote down the weather every evening.",
    "Could you read me the second paragraph again?",
    "Please leave the parcel with the neighbours.",
    "Half an hour later the rain had stopped.",
    "She counted the steps on the way down.",
    "Nobody had told them about the second door.",
    "It takes about twenty minutes on foot.",
    "The answer was written on the back.",
)
"""One a request, over and over; request i has seed i."""


class Level(NamedTuple):
    concurrency: int
    requests: int


LEVELS = {
    "cpu": (Level(1, 4), Level(4, 12), Level(16, 24)),
    "gpu": (Level(1, 8), Level(4, 32), Level(16, 64), Level(64, 192)),
}


class Answer(NamedTuple):
    """One request's outcome; times in seconds."""

    request: int
    first_audio: float
    latency: float
    pcm: bytes

    @property
    def audio_s(self) -> float:
        return len(self.pcm) / (SAMPLE_RATE * SAMPLE_BYTES)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def record(mode: str, level: Level, answers: list[Answer], wall_s: float, alone: dict[int, bytes]) -> Record:
    """One level's figures. `alone` has the bytes of each request sent alone; empty for unseeded ones."""
    first = [answer.first_audio * 1000 for answer in answers]
    whole = [answer.latency * 1000 for answer in answers]
    same = [answer.pcm == alone[answer.request] for answer in answers] if alone else []
    return {
        "mode": mode,
        "concurrency": level.concurrency,
        "requests": len(answers),
        "requests_per_s": round(len(answers) / wall_s, 3),
        "audio_s_per_s": round(sum(answer.audio_s for answer in answers) / wall_s, 3),
        "first_audio_p50_ms": round(percentile(first, 0.5), 1),
        "first_audio_p95_ms": round(percentile(first, 0.95), 1),
        "latency_p50_ms": round(percentile(whole, 0.5), 1),
        "latency_p95_ms": round(percentile(whole, 0.95), 1),
        "same_as_solo": round(sum(same) / len(same), 3) if same else "",
    }


async def speak(session: aiohttp.ClientSession, url: str, model: str, index: int, seeded: bool) -> Answer:
    """One request; RuntimeError for an answer that is not audio."""
    body = {
        "model": model,
        "input": TEXTS[index % len(TEXTS)],
        "voice": "vivian",
        "language": "English",
        "task_type": "CustomVoice",
        "response_format": "pcm",
        "stream_format": "audio",
        **({"seed": index} if seeded else {}),
    }
    start, first, chunks = time.perf_counter(), 0.0, []
    async with session.post(f"{url}/v1/audio/speech", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"request {index}: HTTP {response.status}: {(await response.text())[:300]}")
        async for chunk in response.content.iter_any():
            first = first or time.perf_counter() - start
            chunks.append(chunk)
    if not any(pcm := b"".join(chunks)):
        raise RuntimeError(f"request {index}: {len(pcm)} bytes of silence")
    return Answer(index, first, time.perf_counter() - start, pcm)


class Load:
    """Requests to one server: first each alone (warm-up, and the bytes to compare with), then the levels."""

    def __init__(self, url: str, model: str, name: str, levels: tuple[Level, ...], deadline: float, progress):
        self.url, self.model, self.name, self.levels = url, model, name, levels
        self.deadline, self.progress = deadline, progress
        count = 2 * sum(level.requests for level in levels) + self.distinct
        self.task = progress.add_task(name, total=count)

    @property
    def distinct(self) -> int:
        """Request i of a level is request i modulo this."""
        return min(len(TEXTS), *(max(level.requests, 4) for level in self.levels))

    async def run(self) -> list[Record]:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            alone = {}
            for index in range(self.distinct):
                alone[index] = (await self.one(session, index, True)).pcm
            records = []
            for level in self.levels:
                for seeded in (True, False):
                    # A level that the time left does not allow is left out whole.
                    if time.monotonic() > self.deadline:
                        self.progress.console.print(f"out of time: {self.name}, {level} left out")
                        continue
                    answers, wall = await self.level(session, level, seeded)
                    mode = f"{self.name}, {'seeded' if seeded else 'unseeded'}"
                    records.append(record(mode, level, answers, wall, alone if seeded else {}))
            return records

    async def one(self, session: aiohttp.ClientSession, index: int, seeded: bool) -> Answer:
        answer = await speak(session, self.url, self.model, index, seeded)
        self.progress.advance(self.task)
        return answer

    async def level(self, session: aiohttp.ClientSession, level: Level, seeded: bool):
        """Answers and seconds of `level.requests` requests, `level.concurrency` at any time."""
        indices = iter([index % self.distinct for index in range(level.requests)])

        async def client() -> list[Answer]:
            return [await self.one(session, index, seeded) for index in indices]

        start = time.perf_counter()
        lists = await asyncio.gather(*(client() for _ in range(level.concurrency)))
        return [answer for answers in lists for answer in answers], time.perf_counter() - start


@contextlib.contextmanager
def serving(model: str, deploy_config: str | None, rowseed: bool, log: Path) -> Iterator[str]:
    """Base URL of a server on a free port of the loopback; stopped with all its processes on leaving."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", model, "--omni"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--trust-remote-code"]
    if deploy_config:
        command += ["--deploy-config", deploy_config]
    environment = {**os.environ, "ROWSEED": "1" if rowseed else "0", "VLLM_NO_USAGE_STATS": "1"}
    # The benches' folder, which bench/all.py puts there, has modules named like other packages'.
    environment.pop("PYTHONPATH", None)
    if deploy_config:
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            asyncio.run(ready(f"http://127.0.0.1:{port}", process, log))
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


async def ready(url: str, process: subprocess.Popen, log: Path) -> None:
    """Return when the server answers; RuntimeError with the end of its log if it ends or takes too long."""
    end = time.monotonic() + START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
    what = f"ended with {process.poll()}" if process.poll() is not None else f"was not ready in {START_S} s"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    raise RuntimeError(f"the server {what}; the end of {log}:\n{tail}")


def stop(process: subprocess.Popen) -> None:
    """End the server and every process of its session."""
    for sign, seconds in ((signal.SIGINT, STOP_S), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it


def tiny_model() -> tuple[str, str]:
    """The tiny checkpoint, made if need be, and the deploy config for it."""
    folder = ROOT / ".cache" / "tiny-qwen3-tts"
    command = [sys.executable, str(ROOT / "examples" / "tiny_checkpoint.py"), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"examples/tiny_checkpoint.py failed:\n{made.stderr[-2000:]}")
    return str(folder), str(ROOT / "examples" / "cpu.yaml")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    parser.add_argument("--quick", action="store_true", help="three requests a level, up to 4 at once")
    parser.add_argument(
        "--model", help="a Qwen3-TTS CustomVoice model, needs a GPU (default: a tiny one, on a CPU)"
    )
    parser.add_argument("--deploy-config", help="YAML for vLLM-Omni (with --model: its own, if not given)")
    parser.add_argument("--seconds", type=float, default=60, help="last start of a level (%(default)s)")
    options = parser.parse_args(arguments)
    # bench/all.py ends a bench that takes too long; the servers must end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    console = Console()
    on_gpu = torch.cuda.is_available()
    if on_gpu and not options.model:
        parser.error("on a GPU, name a model: --model (make bench MODEL=...)")
    if options.model and not on_gpu:
        parser.error("--model needs a GPU; without one the tiny checkpoint is served")
    model, config = (options.model, options.deploy_config) if on_gpu else tiny_model()
    config = options.deploy_config or config
    levels = LEVELS["gpu" if on_gpu else "cpu"]
    if options.quick:
        levels = tuple(Level(c, 3 * c) for c, _ in levels[:2])
    records: list[Record] = []
    with Progress(console=console, transient=True) as progress:
        for name, rowseed in (("rowseed", True), ("vllm-omni", False)):
            starting = progress.add_task(f"starting the server ({name})", total=None)
            log = ROOT / "out" / f"bench-server-{name}.log"
            with serving(model, config, rowseed, log) as url:
                progress.remove_task(starting)
                deadline = time.monotonic() + options.seconds
                records += asyncio.run(Load(url, model, name, levels, deadline, progress).run())
    if not records:
        console.print("no level was measured within its time: see --seconds")
        return 1
    for row in records:
        row["model"] = options.model or "tiny checkpoint"
    if options.json:
        write_json(options.json, "server", records)
    columns = [key for key in records[0] if key != "model"]
    table = Table(*columns, title=f"vllm serve --omni, {records[0]['model']}")
    for row in records:
        table.add_row(*(str(row[key]) for key in columns))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
