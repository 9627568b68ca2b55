"""The V1 runner's contract: what each model declares, and nothing by name.

vLLM-Omni's own ``_talker_mtp_forward`` does the work in every case. It runs on a view of the runner, in
which each request shows the seed that the model asked for, and where the model takes row streams the call
gets them.

| the model declares | what happens |
|---|---|
| ``talker_mtp_seed_extra_arg`` | the key of ``extra_args`` that holds the seed; without it there is no seed |
| ``talker_mtp_accepts_row_streams`` | seeds and offsets are packed, one batched call, padded or not |
| ``talker_mtp_accepts_generators`` (or vLLM-Omni's ``..._per_row_generators``) | one call, one for each row |
| none of these two | a batch with a seeded row goes row by row |
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rowseed.vllm_omni.extra_args import SEED_ARG, stage_parameters
from rowseed.vllm_omni.worker import code0_v1
from rowseed.vllm_omni.worker.flagged_rows import look_at_flags
from rowseed.vllm_omni.worker.row_packing import (
    bind_rows,
    data_parallel_rank,
    pack_rows,
    read_seed,
    warm_up_sizes,
)

SEED_DECLARATION = "talker_mtp_seed_extra_arg"


def declare_seed_arg(model_class: type) -> None:
    """vLLM-Omni seeds every model that has an MTP and declares nothing: say so where the class is silent."""
    if not hasattr(model_class, SEED_DECLARATION):
        setattr(model_class, SEED_DECLARATION, SEED_ARG)


def join_init_talker_mtp(original: Callable) -> Callable:
    """``_init_talker_mtp`` that also binds the row buffers (before capture) and warms the MTP."""

    def _init_talker_mtp(self) -> None:
        original(self)
        if not self.has_talker_mtp:
            return
        declare_seed_arg(type(self.model))
        if getattr(self.model, "talker_mtp_accepts_row_streams", False):
            _bind(self)
            _warm_up(self)

    return _mark(_init_talker_mtp, original)


def join_talker_mtp_forward(original: Callable) -> Callable:
    """``_talker_mtp_forward`` that keeps the contract above."""

    def _talker_mtp_forward(self, decode_req_ids, inputs_embeds, start_offsets=None) -> None:
        if not decode_req_ids:
            return original(self, decode_req_ids, inputs_embeds, start_offsets)
        if getattr(self.model, "talker_mtp_accepts_row_streams", False):
            view = _row_stream_view(self, decode_req_ids)
        else:
            view = _generator_view(self, decode_req_ids)
        return original(view, decode_req_ids, inputs_embeds, start_offsets)

    return _mark(_talker_mtp_forward, original)


def _mark(joined: Callable, original: Callable) -> Callable:
    joined.__qualname__ = original.__qualname__
    joined.__doc__ = original.__doc__
    joined.__wrapped__ = original  # type: ignore[attr-defined]
    return joined


class _View:
    """An object with some attributes shown differently. Everything else, writes too, goes to the object."""

    def __init__(self, of: Any, **shown: Any) -> None:
        object.__setattr__(self, "_of", of)
        for name, value in shown.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_of"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_of"), name, value)


def _shown(extra_args: dict[str, int] | None) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))


_UNSEEDED = _shown(None)


class _ShownSeeds:
    """The requests as vLLM-Omni's method reads them: by item for the seed, by ``get`` for the state."""

    def __init__(self, requests: dict[str, Any], seeds: dict[str, int | None]) -> None:
        self._requests = requests
        self._seeds = seeds

    def __getitem__(self, request_id: str) -> Any:
        self._requests[request_id]  # a missing request stays a KeyError
        seed = self._seeds.get(request_id)
        return _UNSEEDED if seed is None else _shown({SEED_ARG: seed})

    def get(self, request_id: str, default: Any = None) -> Any:
        return self._requests.get(request_id, default)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests


def _generator_view(runner: Any, request_ids: list[str]) -> Any:
    """The runner itself where vLLM-Omni's method does the right thing, else a view that makes it so."""
    from vllm_omni.platforms import current_omni_platform

    model = runner.model
    if type(model).__module__.startswith("vllm_omni."):
        declare_seed_arg(type(model))
    seed_arg = getattr(model, SEED_DECLARATION, None)
    seeds, upstreams_seeds = {}, {}
    for request_id in request_ids:
        params = getattr(runner.requests[request_id], "sampling_params", None)
        extra_args = getattr(params, "extra_args", None)
        if not isinstance(extra_args, dict):
            continue
        upstreams_seeds[request_id] = extra_args.get(SEED_ARG)
        seeds[request_id] = read_seed(request_id, extra_args, seed_arg)
    shown: dict[str, Any] = {}
    if seeds != upstreams_seeds:
        shown["requests"] = _ShownSeeds(runner.requests, seeds)
    per_row = getattr(model, "talker_mtp_accepts_per_row_generators", False)
    if getattr(model, "talker_mtp_accepts_generators", False) and not per_row:
        shown["model"] = _View(model, talker_mtp_accepts_per_row_generators=True)
    seeded = any(seed is not None for seed in seeds.values())
    if seeded and isinstance(runner.talker_mtp, current_omni_platform.get_graph_wrapper_cls()):
        # A graph replays without its generators, and a padded batch needs more of them than there are rows.
        shown["talker_mtp"] = model.talker_mtp
    return _View(runner, **shown) if shown else runner


class _WithStreams:
    """The MTP, graph-wrapped or not, with the batch's streams: packed here, as the padded size is known."""

    def __init__(self, talker_mtp: Callable, pack: Callable[[int], Any], then: Callable[[], None]) -> None:
        self._talker_mtp = talker_mtp
        self._pack = pack
        self._then = then

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the runner pads only what is an instance of the platform's graph wrapper
        return type(self._talker_mtp)

    def __call__(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        streams = self._pack(int(input_ids.shape[0]))
        outputs = self._talker_mtp(input_ids, *args, streams=streams, **kwargs)
        self._then()
        return outputs


def _row_stream_view(runner: Any, request_ids: list[str]) -> Any:
    model = runner.model
    if getattr(model, "talker_mtp_row_streams", None) is None:
        _bind(runner)

    def pack(padded_rows: int) -> Any:
        requests = [(rid, getattr(runner.requests[rid], "sampling_params", None)) for rid in request_ids]
        frames = _scheduled_frames(runner.input_batch, request_ids)
        return pack_rows(model, requests, frames, _stage_defaults(runner), padded_rows=padded_rows)

    return _View(
        runner,
        model=model,  # read for every row: an attribute of its own is found faster
        requests=_ShownSeeds(runner.requests, {}),
        talker_mtp=_WithStreams(runner.talker_mtp, pack, lambda: look_at_flags(model, request_ids)),
    )


def _scheduled_frames(input_batch: Any, request_ids: list[str]) -> np.ndarray:
    """Frames generated so far by each request, from the scheduler's own count: int64 [rows]."""
    index = [input_batch.req_id_to_index[request_id] for request_id in request_ids]
    computed = np.asarray(input_batch.num_computed_tokens_cpu)[index].astype(np.int64)
    return computed - np.asarray(input_batch.num_prompt_tokens)[index]


def _stage_defaults(runner: Any) -> Any:
    model_config = getattr(runner.vllm_config, "model_config", None)
    return stage_parameters(getattr(model_config, "subtalker_sampling_params", None))


def _bind(runner: Any) -> None:
    ids = runner.talker_mtp_input_ids.gpu
    rank = data_parallel_rank(runner.vllm_config)
    bind_rows(runner.model, ids.shape[0], ids.device, rank=rank, defaults=_stage_defaults(runner))
    code0_v1.bind(runner)


def _warm_up(runner: Any) -> None:
    """Run the MTP before the first request: vLLM-Omni's ``_dummy_run`` does not, for this kind of model."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm_omni.platforms import current_omni_platform

    ids = runner.talker_mtp_input_ids.gpu
    for rows in warm_up_sizes(min(ids.shape[0], runner.max_num_reqs), ids.device):
        streams = runner.model.talker_mtp_row_streams.pack([0] * rows, [0] * rows, rows)
        with current_omni_platform.set_forward_context(
            None,
            runner.vllm_config,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            runner.model.talker_mtp(
                ids[:rows],
                runner.talker_mtp_inputs_embeds.gpu[:rows],
                runner.last_talker_hidden.gpu[:rows],
                runner.text_step.gpu[:rows],
                streams=streams,
            )
