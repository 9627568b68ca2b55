"""Qwen3-TTS talker whose residual codes are drawn from row streams, on both runners.

The V1 runner packs the rows and passes ``streams`` (``rowseed.vllm_omni.worker.runner_v1``). The V2 runner
has a hook before its MTP, ``preprocess_decode_batch_mrv2``, and the talker packs there itself.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as upstream

from rowseed.vllm_omni.extra_args import SEED_ARG, stage_parameters
from rowseed.vllm_omni.model_executor.models.qwen3_tts.code_predictor import SeededCodePredictor
from rowseed.vllm_omni.worker.flagged_rows import look_at_flags
from rowseed.vllm_omni.worker.row_packing import bind_rows, data_parallel_rank, pack_rows, warm_up_sizes

_PREDICTOR = "Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM"
_swap_lock = threading.Lock()


@contextmanager
def _seeded_code_predictor() -> Iterator[None]:
    """The talker's constructor takes its predictor's class from a module global: swap it only meanwhile.

    Replacing the predictor afterwards would allocate its weights twice.
    """
    with _swap_lock:
        original = getattr(upstream, _PREDICTOR)
        setattr(upstream, _PREDICTOR, SeededCodePredictor)
        try:
            yield
        finally:
            setattr(upstream, _PREDICTOR, original)


class SeededTalker(upstream.Qwen3TTSTalkerForConditionalGeneration):
    """vLLM-Omni's Qwen3-TTS talker; each row's residual codes depend on its own (seed, offset) alone.

    ``talker_mtp_row_streams`` and ``talker_mtp_row_parameters`` are the static buffers that a captured graph
    reads. They are bound after load and before capture: by the V1 runner, or here for the V2 runner.
    """

    talker_mtp_seed_extra_arg = SEED_ARG
    talker_mtp_accepts_row_streams = True
    talker_mtp_accepts_generators = True

    talker_mtp_row_streams: Any = None
    talker_mtp_row_parameters: Any = None
    talker_mtp_flagged_rows: Any = None
    _packed_request_ids: Sequence[str] = ()
    _code0_sum: torch.Tensor | None = None  # float32 [D]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _seeded_code_predictor():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Without it the V2 runner would allocate [rows, 15, vocab] of noise and fill it row by row.
        self.mtp_sample_uniforms = False
        if self._on_v2():
            bind_rows(
                self,
                int(vllm_config.scheduler_config.max_num_seqs),
                self._tts_pad_embed.device,
                rank=data_parallel_rank(vllm_config),
                defaults=stage_parameters(self._subtalker_sampling_params),
            )

    @torch.inference_mode()
    def talker_mtp(
        self,
        input_ids: torch.Tensor,  # [B]
        input_embeds: torch.Tensor,  # [B, D]
        last_talker_hidden: torch.Tensor,  # [B, D]
        text_step: torch.Tensor,  # [B, D]
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        generators: Any = None,
        sample_uniforms: torch.Tensor | None = None,
        streams: torch.Tensor | None = None,  # int64 [B + 1, 3]
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes and next input embeddings of one frame.

        With ``streams``, or with row streams bound, rows are drawn from them, under the bound per-row
        parameters (or, where none are bound, the arguments'). Otherwise, and with generators or uniforms:
        vLLM-Omni's own way.

        Returns:
            (inputs_embeds [B, D], codes int64 [B, Q]).
        """
        rows = int(input_ids.shape[0])
        host_noise = generator is not None or generators is not None or sample_uniforms is not None
        if streams is None and self.talker_mtp_row_streams is not None and not host_noise:
            streams = self.talker_mtp_row_streams.tensor[: rows + 1]
        if streams is None or int(self.talker_config.num_code_groups) < 2:
            if sample_uniforms is not None:  # not in vllm-omni 0.28
                kwargs["sample_uniforms"] = sample_uniforms
            return super().talker_mtp(
                input_ids,
                input_embeds,
                last_talker_hidden,
                text_step,
                do_sample=do_sample,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                generator=generator,
                generators=generators,
                **kwargs,
            )

        device, dtype = input_embeds.device, self._embedding_dtype
        layer0 = input_ids.reshape(rows, 1).to(dtype=torch.long, device=device)
        embeds = input_embeds.reshape(rows, -1).to(dtype=dtype, device=device)
        hidden = last_talker_hidden.reshape(rows, -1).to(dtype=dtype, device=device)
        text = text_step.reshape(rows, -1).to(dtype=dtype, device=device)
        temperature, top_k, top_p = self._row_parameters(rows, do_sample, temperature, top_k, top_p)
        codes = self.code_predictor(
            layer0_code=layer0,
            layer0_embed=embeds.unsqueeze(1),
            last_talker_hidden=hidden.unsqueeze(1),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            streams=streams,
        )
        # As upstream: a layer-0 id that is no code (EOS) makes the whole frame code 0, embeddings too.
        invalid = (layer0 < 0) | (layer0 >= int(self._codebook_vocab_size))
        codes = codes.masked_fill(invalid, 0)
        if self._code0_sum is None:  # weights that were never loaded (load_format: dummy)
            self._build_stacked_codec_embed()
        assert self._code0_sum is not None
        frame_sum = torch.where(invalid, self._code0_sum, self.code_predictor.frame_sum[:rows])
        return embeds + frame_sum.to(self._stacked_codec_embed.dtype) + text, codes

    @property
    def talker_mtp_status(self) -> torch.Tensor:
        """int32 [rows, Q]: the sampler's status words of the last frame."""
        return self.code_predictor.status

    # The V2 runner calls `mtp`; the base class's alias is bound to the base class's function.
    mtp = talker_mtp

    def postprocess_batch_mrv2(self, *, hidden_states, last_token_indices):
        """vLLM-Omni's hook of the V2 runner after the forward pass."""
        look_at_flags(self, self._packed_request_ids)
        self._packed_request_ids = []
        return super().postprocess_batch_mrv2(
            hidden_states=hidden_states, last_token_indices=last_token_indices
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM-Omni's loading; for the V2 runner, which has no hook of its own for it, then a warm-up."""
        loaded = super().load_weights(weights)
        if self._on_v2():
            self._warm_up()
        return loaded

    def _on_v2(self) -> bool:
        return bool(getattr(self, "_use_v2_model_runner", False))  # vllm-omni 0.28 has only V1

    def _warm_up(self) -> None:
        streams = self.talker_mtp_row_streams
        for n in warm_up_sizes(streams.max_rows, streams.device):
            ids = torch.zeros(n, dtype=torch.long, device=streams.device)
            zeros = torch.zeros(n, self.mtp_hidden_size, dtype=self._embedding_dtype, device=streams.device)
            self.talker_mtp(ids, zeros, zeros, zeros, streams=streams.pack([0] * n, [0] * n))

    @staticmethod
    def get_mtp_seed(sampling_params: Any) -> None:
        """No seed for the V2 runner: it makes a host generator for each, and bypasses its graph."""
        return None

    def preprocess_decode_batch_mrv2(self, *, input_ids, input_embeds, req_infos):
        """vLLM-Omni's decode hook of the V2 runner, called once before the MTP with its rows in order."""
        requests = [(info["req_id"], info.get("sampling_params")) for info in req_infos]
        frames = [info["_omni_num_computed_tokens"] - info["_omni_prompt_len"] for info in req_infos]
        self._packed_request_ids = [request_id for request_id, _ in requests]
        pack_rows(self, requests, frames, stage_parameters(self._subtalker_sampling_params))
        return super().preprocess_decode_batch_mrv2(
            input_ids=input_ids, input_embeds=input_embeds, req_infos=req_infos
        )

    def _build_stacked_codec_embed(self) -> None:
        """Called at the end of every load: share the predictor's stacked tables instead of copying them."""
        self._stacked_codec_embed = self.code_predictor.stacked_codec_embedding
        # An invalid frame's embeddings are those of code 0. In place on a reload: captured graphs read it.
        code0_sum = self._stacked_codec_embed[:, 0].float().sum(0)
        if self._code0_sum is None:
            self._code0_sum = code0_sum
        else:
            self._code0_sum.copy_(code0_sum)

    def _row_parameters(self, rows, do_sample, temperature, top_k, top_p):
        bound = self.talker_mtp_row_parameters
        if bound is not None:
            return bound.temperature[:rows], bound.top_k[:rows], bound.top_p[:rows]
        stage = stage_parameters(self._subtalker_sampling_params)
        temperature = stage.temperature if temperature is None else temperature
        return (
            temperature if do_sample in (None, True) else 0.0,
            stage.top_k if top_k is None else top_k,
            stage.top_p if top_p is None else top_p,
        )
