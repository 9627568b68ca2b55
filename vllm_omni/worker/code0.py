"""The talker's own token, code 0, from the same streams as the residual codes: codebook 0 of a frame.

vLLM's sampler does everything up to the draw (bias, allowed ids, penalties, temperature, min_p) and after it
(greedy rows, log-probabilities). Its draw alone is replaced, on the sampler of a talker's runner only
(``code0_v1``, ``code0_v2``). The seed is ``SamplingParams.seed``, else ``tts_local_seed``; the offset is the
index of the frame that the token begins. ``ROWSEED_CODE0=vllm`` leaves the draw to vLLM.
"""

import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.extra_args import Parameters
from rowseed.vllm_omni.worker.flagged_rows import FlaggedRows
from rowseed.vllm_omni.worker.row_packing import read_request, read_seed

logger = logging.getLogger("vllm.rowseed")

CODE0 = "ROWSEED_CODE0"

_PROCESSED_MODES = ("processed_logits", "processed_logprobs")
_DEFAULTS = Parameters()
_said: set[str] = set()


class Code0Rows:
    """Status words and flags of the rows whose code 0 is drawn from `streams`."""

    def __init__(self, streams: RowStreams):
        self.streams = streams
        self._status = torch.zeros(streams.max_rows, 1, dtype=torch.int32, device=streams.device)
        self._flagged = FlaggedRows()

    def pack(
        self,
        requests: Iterable[tuple[str, Any]],
        frames: np.ndarray,
        seed_arg: str | None,
        *,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Send the rows of a step.

        Args:
            requests: (request id, sampling params) of each row, in row order.
            frames: int64 [rows], the frame that each row's token begins.
            seed_arg: key of ``extra_args`` that holds the seed, or None.
            positions: integers [rows] on the device, added to the frames there.
        """
        seeds, base_offsets = read_speech_rows(requests, seed_arg)
        # int64 sums wrap modulo 2^64, as offsets do.
        packed = self.streams.pack(seeds, frames + base_offsets)
        if positions is not None:
            packed[1:, 1] += positions

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

    def warm_up(self, logits: torch.Tensor, temperatures: Sequence[float | torch.Tensor]) -> None:
        """Compile what a draw of these logits, [rows, V], may need, before the first request."""
        rows, vocabulary = logits.shape
        k = torch.full((rows,), vocabulary - 1, dtype=torch.int32, device=logits.device)
        p = torch.full((rows,), 0.9, dtype=torch.float32, device=logits.device)
        self.streams.pack([0] * rows, [0] * rows)
        for temperature, top_k, top_p in itertools.product(temperatures, (k, None), (p, None)):
            self.draw(logits, top_k, top_p, request_ids=[], temperature=temperature)


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


def seed_arg(model: Any) -> str | None:
    return getattr(model, "talker_mtp_seed_extra_arg", None)


def why_vllms(obstacle: Callable[..., str], *objects: Any) -> str:
    """Why vLLM draws code 0, or nothing: the switch, what `obstacle` finds, or that it cannot be known."""
    try:
        return _not_wanted() or obstacle(*objects)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _not_wanted() -> str:
    choice = os.environ.get(CODE0, "rowseed")
    if choice == "vllm":
        return f"{CODE0}=vllm"
    if choice != "rowseed":
        say(logging.WARNING, "%s must be rowseed or vllm, got %r: taken as rowseed", CODE0, choice)
    return ""


def mode_obstacle(sampler: Any) -> str:
    """Why a sampler of this mode must keep its draw, or nothing."""
    if sampler.logprobs_mode in _PROCESSED_MODES:
        return f"logprobs_mode is {sampler.logprobs_mode}"
    return "fp64 Gumbel noise" if getattr(sampler, "use_fp64_gumbel", False) else ""


def signature_obstacle(method: Callable, expected: tuple[str, ...]) -> str:
    """Why this bound method cannot be replaced, or nothing."""
    found = tuple(inspect.signature(method).parameters)
    if found == expected:
        return ""
    return f"expected {method.__qualname__}({', '.join(expected)}), found ({', '.join(found)})"


def say_who_draws(reason: str, runner: str) -> None:
    """One line a process and runner."""
    if reason:
        say(logging.INFO, "rowseed: code 0 is drawn by vLLM, not from the row streams: %s", reason)
    else:
        say(logging.INFO, "rowseed: code 0 is drawn from the row streams, on the %s runner", runner)


def say(level: int, message: str, *values: Any) -> None:
    """Log a line that this process has not logged before."""
    line = message % values
    if line not in _said:
        _said.add(line)
        logger.log(level, "%s", line)
