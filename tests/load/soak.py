"""Load on a real `vllm serve --omni` (tiny checkpoint, CPU, loopback): what it keeps while it is abused.

Seeded requests, unseeded ones, clients that leave mid-stream and bad requests, eight at a time. Every good
seeded answer must equal the bytes of the same request sent alone, no good request may fail, every bad one
must get a 400 that names its field, the processes' memory must settle, the server must stop cleanly.

Bounded in count and in time; the server is stopped at the end, also after an error.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / ".cache" / "tiny-qwen3-tts"

START_S, STOP_S = 360, 60
"""Longest start and stop of the server, in seconds."""

WARM_UP = 50
"""Requests after which memory must stay."""

GROWTH = 0.05
"""How much of its memory after the warm-up the server may add."""

BAD_SEEDS = (-(2**63) - 1, 2**64, 10**20, "42", "abc", 4.2, True)
GOOD_SEEDS = (0, 7, 2**63 - 1, 1234)
TEXTS = ("The rain had stopped.", "Nobody had told them about the second door.")
KINDS = ("seeded", "seeded", "unseeded", "seeded", "bad", "seeded", "aborted", "seeded", "unseeded", "bad")
"""What request i is, over and over."""


@dataclass
class Report:
    """What happened. Memory in MiB: resident, summed over the server's processes."""

    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    failures: list[str] = field(default_factory=list)
    unequal: int = 0
    refused_here: int = 0  # by rowseed, rather than by the server's own validation before it
    memory: list[tuple[int, float]] = field(default_factory=list)  # after how many requests
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    exit_code: int | None = None
    left_over: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float | None:
        """Largest memory after the warm-up over the memory at its end, less 1; None if nothing came after."""
        settled = [memory for count, memory in self.memory if count >= WARM_UP]
        return max(settled) / settled[0] - 1 if len(settled) > 1 else None

    def check(self) -> None:
        """AssertionError for the first promise that was not kept."""
        assert self.failures == []
        assert self.unequal == 0
        assert self.growth is None or self.growth <= GROWTH, self.memory
        assert self.metrics["rowseed_refused_requests_total"] == self.refused_here
        assert self.metrics['rowseed_rows_total{kind="seeded"}'] > 0
        assert self.left_over == []
        assert self.exit_code == 0


class Server:
    """A running server, as its clients see it."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            return [leader, *leader.children(recursive=True)]
        return []

    def memory(self) -> float:
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 2**20

    async def ready(self, session: aiohttp.ClientSession) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"the server did not start; the end of {self.log}:\n{tail}")


@contextlib.contextmanager
def serving(log: Path, **environment: str) -> Iterator[Server]:
    """A server of the tiny checkpoint on a free port. Kills what is left of it on leaving."""
    sys.path.append(str(ROOT / "examples"))
    from tiny_checkpoint import make_checkpoint

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm_omni.entrypoints.cli.main",
        "serve",
        str(make_checkpoint(CHECKPOINT)),
    ]
    command += ["--omni", "--deploy-config", str(ROOT / "examples" / "cpu.yaml"), "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # The log is read for INFO lines, and other tests of this process make it quieter.
    defaults["VLLM_LOGGING_LEVEL"] = "INFO"
    # A background job of a shell ignores it, and the server would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **defaults, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        yield server
    finally:
        for survivor in server.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.wait(10)


def stop(server: Server, report: Report) -> None:
    """Ask the server to end, as Ctrl-C does, and note how it went."""
    tree = server.tree()
    os.kill(server.process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        report.exit_code = server.process.wait(STOP_S)
    _, alive = psutil.wait_procs(tree[1:], timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            report.left_over.append(" ".join(process.cmdline())[:200])
            process.kill()


class Client:
    def __init__(self, server: Server, session: aiohttp.ClientSession):
        self.server, self.session = server, session

    def post(self, text: str, **fields):
        body = {
            "model": str(CHECKPOINT),
            "input": text,
            "voice": "vivian",
            "language": "English",
            "task_type": "CustomVoice",
            "response_format": "pcm",
            **fields,
        }
        return self.session.post(f"{self.server.url}/v1/audio/speech", json=body)

    async def speak(self, text: str, **fields) -> bytes:
        """The audio; RuntimeError for another answer."""
        async with self.post(text, **fields) as response:
            body = await response.read()
            if response.status != 200 or not any(body):
                raise RuntimeError(f"HTTP {response.status}, {len(body)} bytes: {body[:300]!r}")
            return body

    async def refused(self, text: str, **fields) -> str:
        """The error's text; RuntimeError if the answer is no error of the client's."""
        async with self.post(text, **fields) as response:
            body = await response.text()
            if response.status != 400:
                raise RuntimeError(f"{fields}: HTTP {response.status} for a bad request: {body[:300]}")
            return body

    async def leave_mid_stream(self, text: str, **fields) -> None:
        async with self.post(text, stream=True, stream_format="audio", **fields) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            await response.content.readany()
            response.close()

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.server.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:7] == "rowseed"
        }


class Load:
    def __init__(self, client: Client, report: Report):
        self.client, self.report = client, report
        self.alone: dict[tuple[str, int], bytes] = {}

    async def run(self, count: int, concurrency: int) -> None:
        for text in TEXTS:
            for seed in GOOD_SEEDS:
                self.alone[text, seed] = await self.client.speak(text, seed=seed)
        if len(set(self.alone.values())) != len(self.alone):
            self.report.failures.append("two seeds or texts gave the same speech")
        indices = iter(range(count))
        done = 0

        async def worker() -> None:
            nonlocal done
            for index in indices:
                kind = KINDS[index % len(KINDS)]
                self.report.kinds[kind] += 1
                try:
                    await getattr(self, kind)(index)
                except Exception as error:
                    self.report.failures.append(f"request {index} ({kind}): {error!r}"[:500])
                done += 1
                if done % 10 == 0:
                    self.report.memory.append((done, round(self.client.server.memory(), 1)))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        await asyncio.sleep(2)  # the workers' counts are at most a second old
        self.report.metrics = await self.client.metrics()

    async def seeded(self, index: int) -> None:
        text, seed = TEXTS[index % 2], GOOD_SEEDS[index // 2 % len(GOOD_SEEDS)]
        self.report.unequal += await self.client.speak(text, seed=seed) != self.alone[text, seed]

    async def unseeded(self, index: int) -> None:
        if await self.client.speak(TEXTS[index % 2]) in self.alone.values():
            raise RuntimeError("an unseeded request repeated a seeded one")

    async def aborted(self, index: int) -> None:
        fields = {"seed": 7} if index % 20 < 10 else {}
        await self.client.leave_mid_stream(TEXTS[index % 2], **fields)

    async def bad(self, index: int) -> None:
        seed = BAD_SEEDS[index // 10 % len(BAD_SEEDS)]
        if index % 10 == 4:
            message = await self.client.refused("hello", seed=seed)
            # The rest is refused by the request's own type before rowseed sees it.
            self.report.refused_here += seed in ("42", True)
            wanted = "seed"
        else:
            message = await self.client.refused("hello", extra_params={"tts_local_seed": seed})
            self.report.refused_here += 1
            wanted = "tts_local_seed"
        if wanted not in message:
            raise RuntimeError(f"{seed!r}: the answer does not name {wanted}: {message[:300]}")


async def repeats_a_fresh_take(client: Client) -> bool:
    """With ROWSEED_UNSEEDED=fresh: an unseeded request, and again with the seed that the log names."""
    take = await client.speak(TEXTS[0])
    seeds = re.findall(r"fresh seed (\d+)", client.server.log.read_text(errors="replace"))
    return take == await client.speak(TEXTS[0], seed=int(seeds[-1]))


async def drive(server: Server, report: Report, count: int, concurrency: int, fresh: bool) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(server, session)
        await server.ready(session)
        if fresh and not await repeats_a_fresh_take(client):
            report.failures.append("a fresh take was not repeated by its seed")
        await Load(client, report).run(count, concurrency)


def soak(
    count: int, *, log: Path, concurrency: int = 8, limit_s: float = 1200.0, fresh: bool = False
) -> Report:
    """Runs the whole thing; `limit_s` bounds start and load together. TimeoutError if it is not enough."""
    report, start = Report(), time.monotonic()
    with serving(log, ROWSEED_UNSEEDED="fresh" if fresh else "global") as server:
        asyncio.run(asyncio.wait_for(drive(server, report, count, concurrency, fresh), limit_s))
        stop(server, report)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1200, help="limit of start and load together")
    parser.add_argument("--fresh", action="store_true", help="ROWSEED_UNSEEDED=fresh")
    parser.add_argument("--log", type=Path, default=ROOT / "out" / "soak.log", help="what the server prints")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    report = soak(
        arguments.requests,
        log=arguments.log,
        concurrency=arguments.concurrency,
        limit_s=arguments.seconds,
        fresh=arguments.fresh,
    )
    print(json.dumps(asdict(report) | {"growth": report.growth}, indent=1))
    report.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
