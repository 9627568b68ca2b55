"""The server bench's figures, and its client against a small stand-in for the HTTP server."""

import asyncio
import time

import pytest
import records
import server
from aiohttp import web
from server import Answer, Level, Load

SECOND = b"\1\0" * server.SAMPLE_RATE


def test_record_figures():
    answers = [Answer(i, first_audio=0.1 * (i + 1), latency=1.0 + i, pcm=SECOND * 2) for i in range(4)]
    alone = {0: SECOND * 2, 1: SECOND * 2, 2: SECOND * 2, 3: SECOND}
    row = server.record("seeded", Level(4, 4), answers, 2.0, alone)
    records.check("server", [row])
    assert row["requests_per_s"] == 2.0
    assert row["audio_s_per_s"] == 4.0
    assert row["first_audio_p50_ms"] == pytest.approx(300)
    assert row["latency_p95_ms"] == pytest.approx(4000)
    assert row["same_as_solo"] == 0.75
    assert server.record("unseeded", Level(4, 4), answers, 2.0, {})["same_as_solo"] == ""


class StandIn:
    """Streams PCM that depends on the seed, or on how many requests it has seen where there is none."""

    def __init__(self, depends_on_load=False):
        self.seen = self.now = self.most = 0
        self.depends_on_load = depends_on_load

    async def speech(self, request):
        body = await request.json()
        self.seen += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        value = body.get("seed", self.seen) + 1 + (self.now if self.depends_on_load else 0)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2):
            await response.write(bytes([value % 256, 1]) * 600)
        self.now -= 1
        await response.write_eof()
        return response


def measure(stand_in, seconds=60, say=lambda text: None):
    async def run():
        app = web.Application()
        app.router.add_post("/v1/audio/speech", stand_in.speech)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        load = Load("name", f"http://127.0.0.1:{port}", "m", lambda: None)
        try:
            return await server.run(load, (Level(1, 4), Level(4, 16)), time.monotonic() + seconds, say)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_levels_run_at_their_concurrency_and_compare_bytes():
    stand_in = StandIn()
    rows = measure(stand_in)
    assert [(row["mode"], row["concurrency"], row["requests"], row["same_as_solo"]) for row in rows] == [
        ("name, seeded", 1, 4, 1.0),
        ("name, unseeded", 1, 4, ""),
        ("name, seeded", 4, 16, 1.0),
        ("name, unseeded", 4, 16, ""),
    ]
    assert stand_in.most == 4 and stand_in.seen == server.DISTINCT + 1 + 2 * (4 + 16)
    assert all(row["latency_p95_ms"] >= row["first_audio_p50_ms"] >= 10 for row in rows)


def test_bytes_that_depend_on_the_load_are_noticed():
    rows = measure(StandIn(depends_on_load=True))
    assert rows[0]["same_as_solo"] == 1.0
    assert rows[2]["same_as_solo"] < 1.0


def test_no_level_starts_that_would_end_after_the_deadline():
    assert [row["concurrency"] for row in measure(StandIn(), seconds=-1)] == [1, 1]

    class Slow(StandIn):
        async def speech(self, request):
            await asyncio.sleep(0.05)
            return await super().speech(request)

    said = []
    rows = measure(Slow(), seconds=2.1, say=said.append)  # 9 and 8 requests, then 32: at least 0.06 s each
    assert [row["concurrency"] for row in rows] == [1, 1]
    assert len(said) == 1 and said[0].startswith("name: Level(concurrency=4, requests=16) is left out")


def test_an_error_of_the_server_is_not_a_measurement():
    class Broken(StandIn):
        async def speech(self, request):
            return web.Response(status=500, text="no voice")

    with pytest.raises(RuntimeError, match="request 0: HTTP 500: no voice"):
        measure(Broken())


def test_a_server_that_ends_at_once_shows_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "ROOT", tmp_path)
    started = server.Server(str(tmp_path / "no-model"), None, False, "none")
    started.process.kill()
    (tmp_path / "out/bench-server-none.log").write_text("what went wrong\n")
    try:
        with pytest.raises(RuntimeError, match=r"ended with -9; the end of .*\nwhat went wrong"):
            started.wait(time.monotonic() + 60)
    finally:
        started.stop()
    assert started.process.poll() is not None


def test_a_server_that_is_not_ready_in_time_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "ROOT", tmp_path)
    started = server.Server(str(tmp_path / "no-model"), None, False, "none")
    try:
        assert not started.wait(time.monotonic())
    finally:
        started.stop()
