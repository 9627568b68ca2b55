"""The real `vllm serve --omni` over HTTP on the loopback: throughput, time to first audio, equal bytes.

Two servers, one after the other (an idle one takes time from the other on a small machine), with rowseed and
with ROWSEED=0; to each the same requests, seeded and unseeded, at rising
concurrency. On a CPU a tiny checkpoint made here; on a GPU the model that --model
names. Every request streams raw PCM. A seeded request's bytes are compared with those of the same
request sent alone before.

Bounded in count and in time (--seconds, their start included): a level that is expected to end later is left
out. The servers are stopped at the end, also after an error.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
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

REQUEST_S, STOP_S = 120, 20
"""Longest answer to a request, and polite stop, in seconds."""

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


DISTINCT = len(TEXTS)
"""Request i of a level is request i modulo this."""

SERVERS = {"rowseed": True, "vllm-omni": False}
"""Name of a server, and whether rowseed is on there."""


class Level(NamedTuple):
    concurrency: int
    requests: int


LEVELS = {
    "cpu": (Level(1, 4), Level(4, 16), Level(16, 32)),
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


async def speak(session: aiohttp.ClientSession, url: str, model: str, request: int, seeded: bool) -> Answer:
    """One request; RuntimeError for an answer that is not audio."""
    body = {
        "model": model,
        "input": TEXTS[request % len(TEXTS)],
        "voice": "vivian",
        "language": "English",
        "task_type": "CustomVoice",
        "response_format": "pcm",
        "stream_format": "audio",
        **({"seed": request} if seeded else {}),
    }
    start, first, chunks = time.perf_counter(), 0.0, []
    async with session.post(f"{url}/v1/audio/speech", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"request {request}: HTTP {response.status}: {(await response.text())[:300]}")
        async for chunk in response.content.iter_any():
            first = first or time.perf_counter() - start
            chunks.append(chunk)
    if not any(pcm := b"".join(chunks)):
        raise RuntimeError(f"request {request}: {len(pcm)} bytes of silence")
    return Answer(request, first, time.perf_counter() - start, pcm)


class Load:
    """Requests to one server. `alone` has the bytes of each seeded request sent alone."""

    def __init__(self, name: str, url: str, model: str, advance: Callable[[], None]) -> None:
        self.name, self.url, self.model, self.advance = name, url, model, advance
        self.alone: dict[int, bytes] = {}

    async def one(self, session: aiohttp.ClientSession, request: int, seeded: bool) -> Answer:
        answer = await speak(session, self.url, self.model, request, seeded)
        self.advance()
        return answer

    async def warm_up(self, session: aiohttp.ClientSession) -> None:
        for request in range(DISTINCT):
            self.alone[request] = (await self.one(session, request, True)).pcm
        # vLLM compiles its own sampler when the first request without a seed comes.
        await self.one(session, 0, False)

    async def level(self, session: aiohttp.ClientSession, level: Level, seeded: bool) -> Record:
        """Record of `level.requests` requests, `level.concurrency` at any time."""
        requests = iter([number % DISTINCT for number in range(level.requests)])

        async def client() -> list[Answer]:
            return [await self.one(session, request, seeded) for request in requests]

        start = time.perf_counter()
        lists = await asyncio.gather(*(client() for _ in range(level.concurrency)))
        wall = time.perf_counter() - start
        answers = [answer for answers in lists for answer in answers]
        mode = f"{self.name}, {'seeded' if seeded else 'unseeded'}"
        return record(mode, level, answers, wall, self.alone if seeded else {})


async def run(load: Load, levels: tuple[Level, ...], end: float, say: Callable[[str], None]):
    """Records of the first level, and of those that can be done by `end` on the monotonic clock."""
    a_request = 0.0  # seconds, at the last level; more at once are no slower
    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_S), aiohttp.TCPConnector(limit=0)
    records = []
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await load.warm_up(session)
        for level in levels:
            count, start = 2 * level.requests, time.monotonic()
            if records and start + count * a_request > end:
                say(f"{load.name}: {level} is left out, it could take {count * a_request:.0f} s")
                continue
            for seeded in (True, False):
                records.append(await load.level(session, level, seeded))
            a_request = (time.monotonic() - start) / count
    return records


class Server:
    """`vllm serve --omni` on a free port of the loopback; `stop` ends it with all its processes."""

    def __init__(self, model: str, deploy_config: str | None, rowseed: bool, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = ROOT / "out" / f"bench-server-{name}.log"
        command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", model, "--omni"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--trust-remote-code"]
        environment = {**os.environ, "ROWSEED": "1" if rowseed else "0", "VLLM_NO_USAGE_STATS": "1"}
        # The benches' folder, which bench/all.py puts there, has modules named like other packages'.
        environment.pop("PYTHONPATH", None)
        if deploy_config:
            command += ["--deploy-config", deploy_config]
        if not torch.cuda.is_available():
            environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, end: float) -> bool:
        """Whether it answers before `end`; RuntimeError with the end of its log if it stops."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), direct.open(f"{self.url}/health", timeout=5):
                return True
            time.sleep(0.5)
        status = self.process.poll()
        if status is None:
            return False
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"the server ended with {status}; the end of {self.log}:\n{tail}")

    def stop(self) -> None:
        """End it and every process of its session."""
        for sign, seconds in ((signal.SIGINT, STOP_S), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # children that outlived it


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
    parser.add_argument("--seconds", type=float, default=600, help="for all of it (%(default)s)")
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
    count = len(SERVERS) * (DISTINCT + 1 + 2 * sum(level.requests for level in levels))
    records: list[Record] = []
    end = time.monotonic() + options.seconds
    start_s = 0.0  # how long the server before took to start
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=count)
        for others, name in zip(reversed(range(len(SERVERS))), SERVERS, strict=True):
            begin = time.monotonic()
            if begin + start_s > end:
                console.print(f"{name} is left out: its start could take {start_s:.0f} s")
                continue
            progress.update(task, description=f"starting {name}")
            server = Server(model, config, SERVERS[name], name)
            try:
                if not server.wait(end):
                    console.print(f"{name} is left out: not ready within its time, see {server.log}")
                    continue
                ready = time.monotonic()
                start_s = ready - begin
                share = (end - ready - others * start_s) / (others + 1)
                progress.update(task, description=f"speaking to {name}")
                load = Load(name, server.url, model, functools.partial(progress.advance, task))
                records += asyncio.run(run(load, levels, ready + share, console.print))
            finally:
                server.stop()
    if not records:
        console.print("no level was measured: the time ended before, see --seconds")
        return 1
    records.sort(key=lambda row: row["concurrency"])
    for row in records:
        row["model"] = options.model or "tiny checkpoint"
    if options.json:
        write_json(options.json, "server", records)
    columns = {
        "mode": "",
        "concurrency": "at once",
        "requests_per_s": "req/s",
        "audio_s_per_s": "audio s/s",
        "first_audio_p50_ms": "first audio p50 ms",
        "first_audio_p95_ms": "p95 ms",
        "same_as_solo": "same bytes",
    }
    table = Table(*columns.values(), title=f"vllm serve --omni, {records[0]['model']}")
    for row in records:
        table.add_row(*(str(row[key]) for key in columns))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
