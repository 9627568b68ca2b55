"""The WebSocket: a bad seed is refused by name, and audio.start has the one that is used."""

import json

import pytest
from speech_app import noise, serve
from vllm_omni.entrypoints.openai.protocol.audio import StreamingSpeechSessionConfig
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

takes_seeds = pytest.mark.skipif(
    "seed" not in StreamingSpeechSessionConfig.model_fields, reason="this release's WebSocket has no seed"
)


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@pytest.fixture
def socket(server):
    with connect(f"ws://127.0.0.1:{server.port}/v1/audio/speech/stream") as socket:
        yield socket


def event(socket):
    return json.loads(socket.recv(timeout=20))


def speak(socket, **config):
    for message in ({"type": "session.config", **config}, {"type": "input.text", "text": "hello"}):
        socket.send(json.dumps(message))
    socket.send(json.dumps({"type": "input.done"}))


@pytest.mark.parametrize("seed", ["42", True, 7.0, 2**64, "\ud800", [], {}], ids=ascii)
def test_a_bad_seed_gets_an_event_that_names_it(server, socket, seed):
    asked = len(server.engine.stages)
    socket.send(json.dumps({"type": "session.config", "seed": seed}))
    refusal = event(socket)
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=20)
    assert closed.value.rcvd.code == 1008
    assert refusal["type"] == "error"
    assert refusal["message"].startswith("seed must be an int in [-2**63, 2**64), got ")
    assert repr(seed) in refusal["message"]
    assert len(server.engine.stages) == asked


@takes_seeds
def test_a_later_bad_seed_leaves_the_session_as_it_was(socket):
    socket.send(json.dumps({"type": "session.config", "seed": 7}))
    speak(socket, seed="8")
    assert "'8'" in event(socket)["message"]
    assert event(socket)["rowseed"] == {"seed": "7", "scheme": 1}


@takes_seeds
@pytest.mark.parametrize("seed", [7, -1, 2**63 - 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_start_event_has_the_seed(socket, seed, streamed):
    speak(socket, seed=seed, response_format="pcm", stream_audio=streamed)
    start = event(socket)
    assert start["type"] == "audio.start" and start["sentence_text"] == "hello"
    assert start["rowseed"] == {"seed": str(seed), "scheme": 1}
    chunks = [socket.recv(timeout=20) for _ in range(3 if streamed else 1)]
    assert sum(map(len, chunks)) == 2 * noise(seed).numel()
    assert [event(socket)["type"] for _ in range(2)] == ["audio.done", "session.done"]


def test_without_a_seed_it_says_none(socket):
    speak(socket, Seed=7)
    assert event(socket)["rowseed"] == {"seed": "none", "scheme": 1}


def test_the_start_event_does_not_wait_for_audio(server, socket):
    server.engine.gate.clear()
    try:
        speak(socket)
        assert event(socket)["type"] == "audio.start"
    finally:
        server.engine.gate.set()


def test_the_start_event_still_comes_before_an_error(server, socket):
    server.engine.errored, server.engine.dead_error = True, RuntimeError("dead")
    try:
        speak(socket)
        start, error, done = (event(socket) for _ in range(3))
    finally:
        server.engine.errored = False
    assert (start["type"], error["type"], done["type"]) == ("audio.start", "error", "audio.done")
    assert "rowseed" not in start


def test_nothing_is_said_of_another_models_seeds():
    with (
        serve("fish_speech") as other,
        connect(f"ws://127.0.0.1:{other.port}/v1/audio/speech/stream") as socket,
    ):
        speak(socket, seed=7)
        start = event(socket)
    assert start["type"] == "audio.start" and "rowseed" not in start
