"""vLLM-Omni's own speech routes and handlers on a socket, before an engine that makes noise of a seed."""

import asyncio
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import uvicorn
from fastapi import FastAPI
from vllm.sampling_params import SamplingParams
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech
from vllm_omni.entrypoints.openai.serving_speech_stream import OmniStreamingSpeechHandler

from rowseed.vllm_omni.fresh_seeds import join_generate

SAMPLES, CHUNKS = 480, 3


class Engine:
    """What the handlers need of AsyncOmni. ``stages`` has the parameters of every request it got."""

    def __init__(self):
        self.errored = False
        self.stage_configs = ()
        self.model_config = SimpleNamespace(async_chunk=True)
        self.default_sampling_params_list = [SamplingParams(), SamplingParams()]
        self.tts_batch_max_items = 32
        self.stages = []
        self.incomplete = 0
        self.gate = threading.Event()
        self.gate.set()

    def resolve_sampling_params_list(self, given, allow_delta_coercion):
        return given or list(self.default_sampling_params_list)

    @join_generate
    def generate(self, prompt, sampling_params=None, request_id="", *, sampling_params_list=None, **kwargs):
        self.stages.append(sampling_params_list)
        return self._noise(sampling_params_list[0])

    async def _noise(self, talker):
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        audio = noise((talker.extra_args or {}).get("tts_local_seed"))
        for chunk in audio.chunk(CHUNKS) if talker.output_kind.name == "DELTA" else [audio]:
            yield SimpleNamespace(
                multimodal_output={"audio": chunk, "sr": 24000}, final_output_type="audio", outputs=[]
            )


def noise(seed):
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    return torch.rand(SAMPLES * CHUNKS, generator=generator) - 0.5


class Adapter:
    """A model adapter that lets everything pass."""

    validates_generation = True

    def __init__(self, service):
        self._service = service

    def validate(self, request):
        return None if request.input.strip() else "Input text cannot be empty"

    async def build(self, request, sampling_params_list, has_inline_ref_audio):
        return SimpleNamespace(
            prompt={"prompt": request.input},
            tts_params={},
            model_type=self._service._tts_model_type,
            warmup_artifact_key=None,
            output_policy=SimpleNamespace(accumulate_nonstreaming=False),
        )

    def apply_sampling_overrides(self, sampling_params_list, request, prompt, request_id):
        return sampling_params_list

    def validate_generation(self, tts_params, **result):
        if self._service.engine_client.incomplete:
            from vllm_omni.entrypoints.openai.tts_adapters.base import TTSGenerationError

            self._service.engine_client.incomplete -= 1
            error = TTSGenerationError("incomplete")
            error.retryable = True
            raise error


class Service(OmniOpenAIServingSpeech):
    """The real handlers on the fake engine, without a model's configuration."""

    def __init__(self, engine, model_type):
        self.engine_client = engine
        self.model_config = engine.model_config
        self._tts_model_type = model_type
        self._is_tts = True
        self._batch_max_items = engine.tts_batch_max_items
        self._speech_output_policies = {}
        self._tts_tokenizer = None
        self._fake_adapter = Adapter(self)

    def _get_tts_adapter(self):
        return self._fake_adapter

    def _get_available_speakers(self):
        return set()

    def _track_ref_audio_artifact_warmup(self, *args, **kwargs):
        pass

    _mark_ref_audio_artifact_ready_for_request = _track_ref_audio_artifact_warmup
    _discard_ref_audio_artifact_warmup = _track_ref_audio_artifact_warmup

    async def _check_model(self, request):
        return None

    def _audio_encode_speed(self, request):
        return 1.0

    def _compute_speech_input_details(self, request, tts_params):
        from vllm_omni.entrypoints.openai.protocol.audio import SpeechInputTokenDetails

        return SpeechInputTokenDetails()


@contextmanager
def serve(model_type="qwen3_tts"):
    """The routes at ``url`` (HTTP) on a free port, and their engine."""
    engine = Engine()
    app = FastAPI()
    app.include_router(api_server.router)
    app.state.openai_serving_speech = Service(engine, model_type)
    app.state.openai_streaming_speech = OmniStreamingSpeechHandler(app.state.openai_serving_speech)
    app.state.enable_server_load_tracking = False
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, engine=engine)
    finally:
        server.should_exit = True
        thread.join(10)
