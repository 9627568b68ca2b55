"""A client sees the seed that the engine got: OpenAI's own client, plain and streamed, on a socket."""

import base64
import io
import json
import wave

import httpx
import numpy as np
import openai
import pytest
from speech_app import noise, serve

from rowseed.vllm_omni.fresh_seeds import gives_fresh_seeds

SEED, SCHEME = "x-rowseed-seed", "x-rowseed-scheme"


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@pytest.fixture(params=["global", "fresh"])
def choice(request, monkeypatch):
    monkeypatch.setenv("ROWSEED_UNSEEDED", request.param)
    gives_fresh_seeds.cache_clear()
    yield request.param
    gives_fresh_seeds.cache_clear()


@pytest.fixture
def speech(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client.audio.speech


def ask(**extra):
    return {"model": "tiny", "voice": "vivian", "input": "hello", "extra_body": extra}


def close_to(audio, seed):
    """Whether ``audio`` is the seed's noise in 16 bits: two steps for the encoders' scale and rounding."""
    found, expected = np.frombuffer(audio, "<i2").astype(float), noise(seed).numpy() * 32767
    return found.shape == expected.shape and abs(found - expected).max() <= 2


@pytest.mark.parametrize("seed", [7, 0, -1, 2**63 - 1, -(2**63)])
def test_openais_client_reads_plain_speech_and_its_seed(speech, seed):
    raw = speech.with_raw_response.create(**ask(seed=seed), response_format="pcm")
    assert raw.headers[SEED] == str(seed) and raw.headers[SCHEME] == "1"
    assert close_to(raw.parse().content, seed)
    assert not close_to(raw.parse().content, seed ^ 1)
    with wave.open(io.BytesIO(speech.create(**ask(seed=seed), response_format="wav").content)) as audio:
        assert close_to(audio.readframes(audio.getnframes()), seed)


@pytest.mark.parametrize("container", ["pcm", "wav"])
def test_openais_client_reads_streamed_speech_and_its_seed(speech, container):
    asked = ask(seed=7, stream=True, stream_format="audio")
    with speech.with_streaming_response.create(**asked, response_format=container) as response:
        assert response.headers[SEED] == "7" and response.headers[SCHEME] == "1"
        audio = b"".join(response.iter_bytes())
    assert close_to(audio[44 if container == "wav" else 0 :], 7)


def test_openais_client_reads_events_and_the_first_has_the_seed(speech):
    asked = ask(seed=2**63 - 1)
    with speech.with_streaming_response.create(
        **asked, response_format="pcm", stream_format="sse"
    ) as response:
        assert response.headers[SEED] == str(2**63 - 1)
        events = [
            json.loads(line.removeprefix("data: "))
            for line in response.iter_lines()
            if line.startswith("data: ")
        ]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 3 + ["speech.audio.done"]
    assert [event.get("rowseed") for event in events] == [{"seed": str(2**63 - 1), "scheme": 1}] + [None] * 3
    assert close_to(b"".join(base64.b64decode(event["audio"]) for event in events[:-1]), 2**63 - 1)


@pytest.mark.parametrize("how", [{}, {"stream": True, "stream_format": "audio"}, {"stream": True}])
@pytest.mark.parametrize("misplaced", [{}, {"Seed": 7}, {"extra_params": {"seed": 7}}], ids=str)
def test_no_seed_or_one_in_the_wrong_place_is_none_or_the_fresh_one(server, choice, how, misplaced):
    response = httpx.post(
        f"{server.url}/v1/audio/speech", json={"input": "hello", "response_format": "pcm", **how, **misplaced}
    )
    assert response.status_code == 200 and response.headers[SCHEME] == "1"
    talker = server.engine.stages[-1][0]
    if choice == "global":
        assert response.headers[SEED] == "none"
        assert talker.seed is None
        return
    assert 0 <= int(response.headers[SEED]) < 2**63
    assert int(response.headers[SEED]) == talker.seed == talker.extra_args["tts_local_seed"]


def test_the_seed_that_extra_params_name_is_reported(server):
    extra = {"tts_local_seed": 2**64 - 2}
    response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "hello", "extra_params": extra})
    assert response.headers[SEED] == "-2"


def test_the_seed_of_a_second_try_is_the_one_reported(server):
    server.engine.incomplete = 1
    response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "hello"})
    assert response.headers[SEED] == str(server.engine.stages[-1][0].extra_args["tts_local_seed"])
    assert (server.engine.stages[-2][0].extra_args or {}).get("tts_local_seed") is None


def test_a_refusal_names_the_seed_and_reports_none_used(server):
    response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "hello", "seed": "42"})
    assert response.status_code == 400 and "'42'" in response.text
    assert SEED not in response.headers


def test_nothing_is_said_of_another_models_seeds():
    with serve("fish_speech") as other:
        for how in ({}, {"stream": True}):
            body = {"input": "hello", "seed": 7, "response_format": "pcm", **how}
            response = httpx.post(f"{other.url}/v1/audio/speech", json=body)
            assert response.status_code == 200
            assert SEED not in response.headers and "rowseed" not in response.text
