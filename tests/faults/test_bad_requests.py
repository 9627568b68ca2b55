"""One bad seed among good requests, through the real ``AsyncOmni.generate`` and the real HTTP request type.

The engine behind them is a list of what reached it: several of these values ended or hung the real one.
``tests/load`` sends them to a real server; ``tests/vllm_omni/test_admission.py`` has the checks one by one.
"""

import asyncio
import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed")

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from vllm.sampling_params import SamplingParams
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.errors import OmniClientError

from rowseed.vllm_omni import plugin
from rowseed.vllm_omni.admission import guard_create_speech
from rowseed.vllm_omni.metrics import counters

BAD_SEEDS = (-(2**63) - 1, 2**64, 10**20, "42", "abc", 4.2, True)


@pytest.fixture(scope="module", autouse=True)
def joined():
    plugin.register()


class Engine:
    num_stages = 2
    stage_configs = ()

    def __init__(self):
        self.reached = []

    async def add_request_async(self, *, request_id, sampling_params_list, **_):
        self.reached.append(sampling_params_list[0].extra_args["tts_local_seed"])


def make_client():
    """AsyncOmni without its engine: ``generate`` is the real one up to the engine's door."""
    client = object.__new__(AsyncOmni)
    client.engine = Engine()
    client.default_sampling_params_list = [SamplingParams(), SamplingParams()]
    client.sampling_constraints_list = [{}, {}]
    client.request_states, client.log_stats, client._paused = {}, False, False
    client._pause_cond = asyncio.Condition()
    client._final_output_handler = lambda: None
    client._compute_final_stage_id = lambda _: 1
    client._compute_final_output_stage_ids = lambda _: [1]
    client._publish_request_gauges = lambda _: None
    client._log_summary_and_cleanup = lambda _: None

    async def results(request_id, *_):
        yield request_id

    async def abort(*_, **__):
        pass

    client._process_orchestrator_results = results
    client._abort_internal_requests = abort
    return client


def good(seed):
    return SamplingParams(seed=seed, extra_args={"tts_local_seed": seed})


def bad_params(place, seed):
    """A bad value set as a caller may who does not go through the constructor, which refuses some."""
    params = good(5)
    if place == "seed":
        params.seed = seed
    else:
        params.extra_args = {"tts_local_seed": seed}
    return params


@pytest.mark.parametrize("place", ["seed", "tts_local_seed"])
@pytest.mark.parametrize("seed", BAD_SEEDS, ids=repr)
def test_async_omni_refuses_it_alone(place, seed, caplog):
    refused = counters().refused

    async def main():
        client = make_client()

        async def speak(params):
            stages = [params, SamplingParams()]
            return [output async for output in client.generate("hello", sampling_params_list=stages)]

        answers = await asyncio.gather(
            *map(speak, (good(1), bad_params(place, seed), good(2))), return_exceptions=True
        )
        return client, answers

    caplog.set_level(logging.CRITICAL)
    client, (first, error, last) = asyncio.run(main())
    assert isinstance(error, OmniClientError)
    assert place in str(error) and repr(seed) in str(error)
    assert len(first) == len(last) == 1
    assert sorted(client.engine.reached) == [1, 2]
    assert counters().refused == refused + 1


@pytest.fixture(scope="module")
def http():
    """The request type of `/v1/audio/speech` before the guarded handler; what it accepts, it returns."""

    class Handler:
        def create_error_response(self, message):
            return SimpleNamespace(message=message)

        @guard_create_speech
        async def create_speech(self, request, raw_request=None):
            return SimpleNamespace(message=None, seed=request.seed)

    @asynccontextmanager
    async def lifespan(_):
        yield

    app, handler = FastAPI(lifespan=lifespan), Handler()

    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    @app.exception_handler(RequestValidationError)
    async def as_vllm_does(_, error):
        return JSONResponse({"error": str(error.errors())}, status_code=400)

    @app.post("/v1/audio/speech")
    async def create_speech(request: OpenAICreateSpeechRequest, raw_request: Request):
        answer = await handler.create_speech(request, raw_request)
        if answer.message is not None:
            return JSONResponse({"error": answer.message}, status_code=400)
        return {"seed": answer.seed}

    with TestClient(app) as client:
        yield client


def post(http, **fields):
    return http.post("/v1/audio/speech", json={"input": "hello", "voice": "vivian", **fields})


@pytest.mark.parametrize("seed", BAD_SEEDS, ids=repr)
def test_http_answers_400_and_names_the_field(http, seed):
    first = post(http, seed=1)
    bad = {"seed": {"seed": seed}, "tts_local_seed": {"extra_params": {"tts_local_seed": seed}}}
    for name, fields in bad.items():
        answer = post(http, **fields)
        assert answer.status_code == 400
        assert name in answer.json()["error"]
    last = post(http, seed=2)
    assert (first.json(), last.json()) == ({"seed": 1}, {"seed": 2})


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63), None])
def test_http_takes_good_seeds(http, seed):
    assert post(http, seed=seed).json() == {"seed": seed}
