"""Code 0 on the V1 runner: the draw of its sampler, an attribute of that one object."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from rowseed.vllm_omni.worker.code0 import (
    Code0Rows,
    mode_obstacle,
    say,
    say_who_draws,
    seed_arg,
    signature_obstacle,
    why_vllms,
)

DRAW = ("logits", "generators", "k", "p")


def bind(runner: Any) -> None:
    """Let the runner's own sampler draw from row streams, or say once why vLLM's draw stays."""
    reason = why_vllms(_obstacle, runner)
    say_who_draws(reason, "V1")
    if not reason:
        draw = runner.sampler.topk_topp_sampler
        upstream = draw.upstream if isinstance(draw, V1Draw) else draw
        runner.sampler.topk_topp_sampler = V1Draw(runner, upstream)


class V1Draw(nn.Module):
    """Stands in one sampler for vLLM's ``TopKTopPSampler``; called as that is."""

    def __init__(self, runner: Any, upstream: nn.Module):
        super().__init__()
        self._runner = runner
        self.upstream = upstream
        # The residual codes' own buffer: the next step draws them at these seeds and offsets.
        self.rows = Code0Rows(runner.model.talker_mtp_row_streams)
        self._warm = False

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw one token a row of the runner's batch.

        Args:
            logits: float32 [rows, V], temperature and everything before it applied.
            generators: vLLM's, by row. Emptied: a chunk of a prompt would rewind its own, which no draw moved
                and which a CPU's cannot do.
            k: int32 [rows], or None.
            p: float32 [rows], or None.

        Returns:
            (tokens int64 [rows], None).
        """
        runner, rows = self._runner, logits.shape[0]
        batch = runner.input_batch
        if batch.num_reqs != rows:
            return self._no_batch(logits, generators, k, p)
        generators.clear()
        request_ids = batch.req_ids
        requests = [(name, getattr(runner.requests[name], "sampling_params", None)) for name in request_ids]
        self.rows.pack(requests, _next_frames(runner, rows), seed_arg(runner.model))
        return self.rows.draw(logits, k, p, request_ids=request_ids), None

    def _no_batch(self, logits, generators, k, p):
        """A dummy run, for memory and warm-up. Nothing else that vLLM does comes here."""
        if self._runner.input_batch.num_reqs:
            say(
                logging.WARNING,
                "rowseed: some steps' code 0 is drawn by vLLM and unseeded: the sampler got %d rows, not one"
                " a request",
                logits.shape[0],
            )
        elif not self._warm:
            self._warm = True
            self.rows.warm_up(logits, [1.0])
        return self.upstream(logits, generators, k, p)


def _next_frames(runner: Any, rows: int) -> np.ndarray:
    """Index of the frame that each row's token begins, by the scheduler's own counts: int64 [rows]."""
    batch = runner.input_batch
    scheduled = np.diff(runner.query_start_loc.cpu[: rows + 1].numpy())
    computed = np.asarray(batch.num_computed_tokens_cpu)[:rows].astype(np.int64)
    return computed + scheduled - np.asarray(batch.num_prompt_tokens)[:rows]


def _obstacle(runner: Any) -> str:
    """Why vLLM's draw must stay, or nothing."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    sampler: Any = getattr(runner, "sampler", None)
    if type(sampler) is not Sampler:
        return f"the runner's sampler is of type {type(sampler).__name__}"
    if getattr(runner, "speculative_config", None) is not None:
        return "speculative decoding"
    draw = sampler.topk_topp_sampler
    if isinstance(draw, V1Draw):
        return ""
    if type(draw) is not TopKTopPSampler:
        return f"the sampler draws with a {type(draw).__name__}"
    if not hasattr(runner, "query_start_loc"):
        return "the runner does not tell how many tokens it has scheduled"
    return mode_obstacle(draw) or signature_obstacle(draw.forward, DRAW)
