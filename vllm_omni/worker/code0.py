"""The talker's own token, code 0, from the same streams as the residual codes: codebook 0 of a frame.

vLLM's sampler does everything up to the draw (bias, allowed ids, penalties, temperature, min_p) and after it
(greedy rows, log-probabilities). Its draw alone is replaced, on the sampler of a talker's runner only. The
seed is ``SamplingParams.seed``, else ``tts_local_seed``; the offset is the index of the frame that the token
begins. ``ROWSEED_CODE0=vllm`` leaves the draw to vLLM.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.extra_args import Parameters
from rowseed.vllm_omni.worker.flagged_rows import FlaggedRows
from rowseed.vllm_omni.worker.row_packing import data_parallel_rank, read_request, read_seed

logger = logging.getLogger("vllm.rowseed")

CODE0 = "ROWSEED_CODE0"
V1_DRAW = ("logits", "generators", "k", "p")

_PROCESSED_MODES = ("processed_logits", "processed_logprobs")
_said: set[str] = set()


def bind_v1(runner: Any) -> None:
    """Let the runner's own sampler draw from row streams, or say once why vLLM's draw stays."""
    reason = _not_wanted() or _v1_obstacle(runner)
    if reason:
        _say(logging.INFO, "rowseed: code 0 is drawn by vLLM: %s", reason)
        return
    upstream = runner.sampler.topk_topp_sampler
    if not isinstance(upstream, V1Draw):
        runner.sampler.topk_topp_sampler = V1Draw(runner, upstream)
        _say(logging.INFO, "rowseed: code 0 is drawn from the row streams, by the %s runner", "V1")


class V1Draw(nn.Module):
    """Stands in one sampler for vLLM's ``TopKTopPSampler``, whose call it has: see `forward`."""

    def __init__(self, runner: Any, upstream: nn.Module):
        super().__init__()
        self._runner = runner
        self._upstream = upstream
        rank = data_parallel_rank(runner.vllm_config)
        self._rows = Code0Rows(runner.max_num_reqs, runner.device, rank=rank)
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
            generators: vLLM's, by row; emptied, so that no chunk of a prompt rewinds one.
            k, p: int32 or float32 [rows], or None.

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
        self._rows.pack(requests, _next_frames(runner, rows), _seed_arg(runner.model))
        return self._rows.draw(logits, k, p, request_ids=request_ids), None

    def _no_batch(self, logits, generators, k, p):
        """A dummy run, for memory and warm-up; anything else is not known."""
        if self._runner.input_batch.num_reqs:
            _say(
                logging.WARNING,
                "rowseed: code 0 of some steps is drawn by vLLM, unseeded: %s",
                "its sampler got another number of rows than the batch has",
            )
        elif not self._warm:
            self._warm = True
            for top_k in (k, None):
                for top_p in (p, None):
                    self._rows.warm_up(logits, top_k, top_p)
        return self._upstream(logits, generators, k, p)


class Code0Rows:
    """Streams, status words and flags of the rows whose code 0 is drawn, at most `max_rows` of them."""

    def __init__(self, max_rows: int, device: torch.device, *, rank: int):
        self.streams = RowStreams(max_rows, device, rank=rank)
        self._status = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)
        self._flagged = FlaggedRows()

    def pack(self, requests: Iterable[tuple[str, Any]], frames: np.ndarray, seed_arg: str | None) -> None:
        """Send the rows of a step: (request id, sampling params) each, and frames int64 [rows]."""
        seeds, base_offsets = read_speech_rows(requests, seed_arg)
        # int64 sums wrap modulo 2^64, as offsets do.
        self.streams.pack(seeds, frames + base_offsets)

    def draw(
        self,
        logits: torch.Tensor,  # [rows, V]
        k: torch.Tensor | None,
        p: torch.Tensor | None,
        *,
        request_ids: Sequence[str],
        temperature: float | torch.Tensor = 1.0,
    ) -> torch.Tensor:
        """The tokens, int64 [rows], of the rows packed last; flagged rows are counted and named."""
        rows = logits.shape[0]
        tokens = sample(
            logits,
            self.streams.tensor[: rows + 1],
            temperature=temperature,
            top_k=k,
            top_p=1.0 if p is None else p,
            codebook=0,
            status=self._status[:rows, 0],
        )
        self._flagged.push(request_ids, self._status)
        return tokens

    def warm_up(self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> None:
        rows = logits.shape[0]
        self.streams.pack([0] * rows, [0] * rows)
        self.draw(logits, k, p, request_ids=[])


def read_speech_rows(
    requests: Iterable[tuple[str, Any]], seed_arg: str | None
) -> tuple[list[int | None], np.ndarray]:
    """Seed and base offset of each (request id, sampling params): a list, and int64 [rows].

    An explicit ``seed`` of the parameters comes before the one under `seed_arg`. A bad value leaves the row
    unseeded, or at base offset 0.
    """
    seeds: list[int | None] = []
    base_offsets: list[int] = []
    for request_id, params in requests:
        seed, base_offset = getattr(params, "seed", None), 0
        if seed is not None:
            seed = read_seed(request_id, {"seed": seed}, "seed")
        extra_args = getattr(params, "extra_args", None)
        if extra_args:
            args = read_request(request_id, params, _DEFAULTS, seed_arg)
            seed, base_offset = args.seed if seed is None else seed, args.base_offset
        seeds.append(seed)
        base_offsets.append(base_offset)
    return seeds, np.array(base_offsets, dtype=np.int64)


_DEFAULTS = Parameters()


def _next_frames(runner: Any, rows: int) -> np.ndarray:
    """Index of the frame that each row's token begins, by the scheduler's own counts: int64 [rows]."""
    batch = runner.input_batch
    scheduled = np.diff(runner.query_start_loc.cpu[: rows + 1].numpy())
    computed = np.asarray(batch.num_computed_tokens_cpu)[:rows].astype(np.int64)
    return computed + scheduled - np.asarray(batch.num_prompt_tokens)[:rows]


def _seed_arg(model: Any) -> str | None:
    return getattr(model, "talker_mtp_seed_extra_arg", None)


def _not_wanted() -> str:
    choice = os.environ.get(CODE0, "rowseed")
    if choice == "vllm":
        return f"{CODE0}=vllm"
    if choice != "rowseed":
        _say(logging.WARNING, "%s must be rowseed or vllm, taken as rowseed: it is %r", CODE0, choice)
    return ""


def _v1_obstacle(runner: Any) -> str:
    """Why vLLM's draw must stay, or nothing."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    sampler: Any = getattr(runner, "sampler", None)
    if type(sampler) is not Sampler:
        return f"the runner's sampler is a {type(sampler).__name__}"
    if getattr(runner, "speculative_config", None) is not None:
        return "speculative decoding"
    draw = sampler.topk_topp_sampler
    if isinstance(draw, V1Draw):
        return ""
    if type(draw) is not TopKTopPSampler:
        return f"the sampler draws with a {type(draw).__name__}"
    return _mode_obstacle(draw) or _signature_obstacle(draw.forward, V1_DRAW)


def _mode_obstacle(sampler: Any) -> str:
    if sampler.logprobs_mode in _PROCESSED_MODES:
        return f"logprobs_mode is {sampler.logprobs_mode}"
    return "fp64 Gumbel noise" if getattr(sampler, "use_fp64_gumbel", False) else ""


def _signature_obstacle(method: Callable, expected: tuple[str, ...]) -> str:
    found = tuple(inspect.signature(method).parameters)
    if found == expected:
        return ""
    return f"expected {method.__qualname__}({', '.join(expected)}), found ({', '.join(found)})"


def _say(level: int, message: str, *values: Any) -> None:
    line = message % values
    if line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)
