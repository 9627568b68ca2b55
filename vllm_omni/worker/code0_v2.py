"""Code 0 on the V2 runner: the draw of its sampler, an attribute of that one object.

vLLM hands each new sampler to its model state, ``custom_sampler(sampler)``: the one moment that has the
sampler, the requests' parameters and the model.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.worker.code0 import (
    Code0Rows,
    mode_obstacle,
    say_who_draws,
    seed_arg,
    signature_obstacle,
    why_vllms,
)
from rowseed.vllm_omni.worker.row_packing import data_parallel_rank

DRAW = (
    *("processed_logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "top_k", "top_p"),
    "use_flashinfer",
)


def join_custom_sampler(original: Callable) -> Callable:
    """``OmniModelState.custom_sampler`` that also lets a talker's own sampler draw from row streams."""

    def custom_sampler(self, sampler):
        custom = original(self, sampler)
        if getattr(self.model, "talker_mtp_accepts_row_streams", False):
            _bind(self, sampler, custom)
        return custom

    custom_sampler.__qualname__ = original.__qualname__
    custom_sampler.__doc__ = original.__doc__
    custom_sampler.__wrapped__ = original  # type: ignore[attr-defined]
    return custom_sampler


def _bind(state: Any, sampler: Any, custom: Any) -> None:
    reason = why_vllms(_obstacle, state, sampler, custom)
    say_who_draws(reason, "V2")
    if not reason:
        # On the object: vLLM-Omni asks whether its type is vLLM's own.
        sampler._sample_random = V2Draw(state, sampler)


class V2Draw:
    """Stands on one sampler for vLLM's ``Sampler._sample_random``; called as that is."""

    def __init__(self, state: Any, sampler: Any):
        self._state = state
        self._sampler = sampler
        # A buffer of its own: the offsets become known on the device only, the residual codes' on the host.
        rank = data_parallel_rank(state.vllm_config)
        self.rows = Code0Rows(RowStreams(state.max_num_reqs, state.device, rank=rank))
        self._warm = False

    def __call__(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        use_flashinfer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token a row.

        Args:
            processed_logits: [rows, V], everything but top-k and top-p applied; the model's own dtype where
                nothing was to be applied.
            expanded_idx_mapping: integers [rows], the rows' requests, on the device.
            idx_mapping_np: the same on the host.
            pos: int64 [rows] on the device, the position of the last token that each row read.
            top_k: int32 [rows], or None.
            top_p: float32 [rows], or None.
            use_flashinfer: vLLM's choice for its own draw; not read.

        Returns:
            (tokens int64 [rows], processed_logits).
        """
        if not self._warm:  # the profiling run is the first to come
            self._warm = True
            ones = torch.ones(len(processed_logits), device=processed_logits.device)
            self.rows.warm_up(processed_logits.float(), [1.0, ones])
        sampler = self._sampler
        buffers = self._state.intermediate_buffer.buffers
        infos = [buffers[slot] for slot in idx_mapping_np]
        requests = [(info.get("req_id", ""), info.get("sampling_params")) for info in infos]
        # The frame that a token begins is its position less the prompt; it is one past what the row read.
        frames = 1 - sampler.req_states.prompt_len.np[idx_mapping_np].astype(np.int64)
        self.rows.pack(requests, frames, seed_arg(self._state.model), positions=pos)
        temperature: float | torch.Tensor = 1.0
        if sampler.sampling_states.any_greedy(idx_mapping_np):
            temperatures = sampler.sampling_states.temperature.gpu[expanded_idx_mapping]
            temperature = (temperatures != 0).to(torch.float32)
        tokens = self.rows.draw(
            processed_logits,
            top_k,
            top_p,
            request_ids=[request_id for request_id, _ in requests],
            temperature=temperature,
        )
        return tokens, processed_logits


def _obstacle(state: Any, sampler: Any, custom: Any) -> str:
    """Why vLLM's draw must stay, or nothing."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    if custom or type(sampler) is not Sampler:
        return f"the runner's sampler is of type {type(custom[0] if custom else sampler).__name__}"
    config = state.vllm_config
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding"
    if getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
        return "the ranks share a batch's rows out (enable_batch_sharded_sampling)"
    if sampler.return_sampling_mask:
        return "the sampling mask is returned"
    return mode_obstacle(sampler) or signature_obstacle(sampler._sample_random, DRAW)
