"""From the requests of one decode step to the packed rows on the device. Shared by both runners."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rowseed.kernels.streams import check_seed
from rowseed.vllm_omni.extra_args import Parameters, RowArgs, read_row
from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.worker.flagged_rows import FlaggedRows, Once

logger = logging.getLogger("vllm.rowseed")


_once = Once()


def read_request(
    request_id: str, sampling_params: Any, defaults: Parameters, seed_arg: str | None
) -> RowArgs:
    """``read_row``, but a bad value makes this row unseeded and default instead of ending the engine.

    Admission refuses such values; this is for those that came another way.
    """
    try:
        return read_row(getattr(sampling_params, "extra_args", None), defaults, seed_arg)
    except (TypeError, ValueError) as error:
        _name(request_id, error)
        return RowArgs(None, 0, defaults)


def read_seed(request_id: str, extra_args: dict[str, Any], seed_arg: str | None) -> int | None:
    """The seed as it was given, for a generator; a bad one makes this row unseeded."""
    seed = extra_args.get(seed_arg) if seed_arg else None
    if seed is None:
        return None
    try:
        check_seed(seed, str(seed_arg))
    except (TypeError, ValueError) as error:
        _name(request_id, error)
        return None
    return seed


def _name(request_id: str, error: Exception) -> None:
    if _once.first(request_id):
        counters().count_flagged("request")
        logger.warning(
            "rowseed: request %s is sampled unseeded, with the stage's parameters: %s", request_id, error
        )


def pack_rows(
    model: Any,
    requests: Iterable[tuple[str, Any]],
    frames: Sequence[int] | np.ndarray,
    defaults: Parameters,
    *,
    padded_rows: int | None = None,
) -> torch.Tensor:
    """Pack one step's rows into ``model.talker_mtp_row_streams`` and ``talker_mtp_row_parameters``.

    Args:
        model: declares ``talker_mtp_seed_extra_arg`` and has both buffers bound.
        requests: (request id, sampling params) of each row, in row order.
        frames: frame index of each row, from the position that the scheduler has scheduled.
        defaults: the stage's sub-talker parameters.
        padded_rows: rows of the (padded) batch.

    Returns:
        int64 [rows + 1, 3] on the device: the streams of the (padded) batch.
    """
    seed_arg = getattr(model, "talker_mtp_seed_extra_arg", None)
    seeds: list[int | None] = []
    unusual: dict[int, RowArgs] = {}  # rows that say more than a seed
    # This runs for every row of every frame, so what nearly all requests are is read here.
    for row, (request_id, params) in enumerate(requests):
        extra_args = getattr(params, "extra_args", None)
        if not extra_args:
            seeds.append(None)
        elif (
            type(extra_args) is dict
            and len(extra_args) == 1
            and type(seed := extra_args.get(seed_arg)) is int
            and -(2**63) <= seed < 2**63
        ):
            seeds.append(seed)
        else:
            args = read_request(request_id, params, defaults, seed_arg)
            seeds.append(args.seed)
            if args.base_offset or args.parameters is not defaults:
                unusual[row] = args
    offsets = np.asarray(frames, dtype=np.int64)
    if unusual:
        rows = [unusual.get(row) or RowArgs(None, 0, defaults) for row in range(len(seeds))]
        # int64 sums wrap modulo 2^64, as offsets do.
        offsets = offsets + np.array([row.base_offset for row in rows], dtype=np.int64)
        temperature, top_k, top_p = zip(*(row.parameters for row in rows), strict=True)
        model.talker_mtp_row_parameters.pack(temperature, top_k, top_p)
    else:
        model.talker_mtp_row_parameters.fill(*defaults)
    # Where code 0 of these frames was drawn from the same buffer, nothing is left to be sent.
    packed = model.talker_mtp_row_streams.repack(seeds, offsets, padded_rows)
    unseeded = seeds.count(None)
    counters().count_rows(len(seeds) - unseeded, unseeded)
    return packed


def bind_rows(model: Any, max_rows: int, device: torch.device, *, rank: int, defaults: Parameters) -> None:
    """Give ``model`` the static buffers that a captured graph reads: after load, before capture."""
    from rowseed.kernels.streams import RowParameters, RowStreams

    model.talker_mtp_row_streams = RowStreams(max_rows, device, rank=rank)
    model.talker_mtp_row_parameters = RowParameters(max_rows, device, **defaults._asdict())
    model.talker_mtp_flagged_rows = FlaggedRows()


def warm_up_sizes(max_rows: int, device: torch.device) -> list[int]:
    """Batch sizes to run before the first request: on a GPU the predictor has a graph a power of two."""
    if device.type == "cpu":
        return [1]
    return sorted({max_rows, *(1 << i for i in range(max_rows.bit_length()))})


def data_parallel_rank(vllm_config: Any) -> int:
    """The rank whose unseeded rows must differ from its siblings'; tensor-parallel ranks share it.

    vLLM-Omni's replicas of a stage (``num_replicas``) are all of data-parallel rank 0: the number that it
    puts into the environment of a replica's processes tells them apart.
    """
    rank = int(getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_rank", 0) or 0)
    replica = os.environ.get("VLLM_OMNI_REPLICA_ID", "")
    return rank + (int(replica) << 16 if replica.isdecimal() else 0)
