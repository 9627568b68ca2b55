"""Qwen3-TTS in vLLM-Omni's own engine, as a server runs it, with the codes handed out beside the audio."""

import dataclasses
import time

import numpy as np
from speech import Request, Speech
from transformers import AutoTokenizer
from vllm_omni import AsyncOmni
from vllm_omni.config import register_pipeline
from vllm_omni.model_executor.models.qwen3_tts.pipeline import QWEN3_TTS_PIPELINE
from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import Qwen3TTSPromptEmbedsBuilder


class SpeechEngine:
    """vLLM-Omni's two stages: the talker (text to codes) and the codec (codes to waveform)."""

    def __init__(self, model: str, deploy_config: str | None = None):
        # As published, the pipeline's talker stage keeps its codes to itself: make them a final output too,
        # and hand them on whole, as codes that are streamed to the next stage go to that stage alone.
        talker, codec = QWEN3_TTS_PIPELINE.stages
        talker = dataclasses.replace(talker, final_output=True, final_output_type="latent")
        register_pipeline(dataclasses.replace(QWEN3_TTS_PIPELINE, stages=(talker, codec)))
        self._omni = AsyncOmni(model=model, deploy_config=deploy_config, async_chunk=False, log_stats=False)
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def close(self) -> None:
        self._omni.shutdown()

    async def speak(self, request: Request) -> Speech:
        """Serve one request; many may run at once, and the engine batches them."""
        start = time.perf_counter()
        prompt = self._prompt(request)
        results = {}
        async for output in self._omni.generate(
            prompt=prompt,
            sampling_params_list=self._sampling_params(request.seed),
            output_modalities=["latent", "audio"],
        ):
            results[output.stage_id] = output.multimodal_output
        seconds = time.perf_counter() - start
        # One row a position; those of the prompt are zero.
        codes = results[0]["codes"]["audio"].cpu().numpy().astype(np.int64)[len(prompt["prompt_token_ids"]) :]
        waveform = results[1]["audio"].float().cpu().numpy().reshape(-1)
        return Speech(codes, waveform, int(results[1]["sr"]), seconds)

    def _sampling_params(self, seed: int | None) -> list:
        """The stages' defaults, with the seed where vLLM-Omni's speech server puts a request's `"seed"`."""
        stages = [params.clone() for params in self._omni.default_sampling_params_list]
        if seed is not None:
            stages[0].seed = seed
            stages[0].extra_args = {**(stages[0].extra_args or {}), "tts_local_seed": seed}
        return stages

    def _prompt(self, request: Request) -> dict:
        """Placeholders for as many positions as the model will fill with embeddings."""
        information = {
            "task_type": ["CustomVoice"],
            "text": [request.text],
            "language": [request.language],
            "speaker": [request.voice],
            "instruct": [""],
        }
        talker_config = self._omni.model_config.hf_config.talker_config
        length = Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information(
            information,
            task_type="CustomVoice",
            tokenize_prompt=lambda text: self._tokenizer(text)["input_ids"],
            codec_language_id=talker_config.codec_language_id,
            spk_is_dialect=talker_config.spk_is_dialect,
        )
        return {"prompt_token_ids": [1] * length, "additional_information": information}
