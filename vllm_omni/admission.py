"""Refuse a bad seed or sub-talker parameter where the request comes in, for that request alone.

Such values would reach the engine, and several of them end it or hang it. Doors: the parameter list
that both clients resolve (``OmniBase.resolve_sampling_params_list``) and the server's handlers, which alone
still see the raw JSON value: pydantic turns "42", true and 4.0 into integers.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rowseed.kernels.streams import check_seed
from rowseed.vllm_omni.extra_args import Parameters, read_row
from rowseed.vllm_omni.metrics import counters


def check_request(extra_args: Any) -> None:
    """Check the seed, base offset and sub-talker parameters in ``extra_args`` (a mapping, or None).

    Raises:
        vllm_omni.errors.OmniClientError: HTTP 400; names the key, the value and what is accepted.
    """
    _client_errors(read_row, extra_args, Parameters())


def check_sampling_params(params: Any, *, int64_seed: bool = False) -> None:
    """Check ``seed`` and ``extra_args`` of one stage's parameters, a mapping or an object.

    ``int64_seed``: the stage's own sampler keeps ``seed`` as int64 (vLLM's V2 runner), and a larger one would
    end the engine.
    """
    seed = _get(params, "seed")
    if seed is not None:
        _client_errors(_check_int64_seed if int64_seed else check_seed, seed, "seed")
    _client_errors(_check_no_bools, params)
    check_request(_get(params, "extra_args"))


def check_speech(seed: Any, extra_params: Any = None) -> None:
    """Check the ``seed`` and ``extra_params`` that a speech request's JSON has, None where it has none.

    Raises:
        vllm_omni.errors.OmniClientError: HTTP 400; names the field, the value and what is accepted.
    """
    if seed is not None:
        _client_errors(check_seed, seed, "seed")
    _client_errors(_check_mapping, extra_params)
    _client_errors(_check_no_bools, extra_params)
    check_request(extra_params)


def guard_resolve(resolve: Callable) -> Callable:
    """``OmniBase.resolve_sampling_params_list`` that checks every stage's parameters first."""

    @functools.wraps(resolve)
    def resolve_sampling_params_list(self, sampling_params_list, allow_delta_coercion=False):
        if isinstance(sampling_params_list, Sequence) and not isinstance(sampling_params_list, (str, bytes)):
            given = sampling_params_list
        else:
            given = [] if sampling_params_list is None else [sampling_params_list]
        stages = getattr(getattr(self, "engine", None), "stage_configs", None) or []
        for params, stage in itertools.zip_longest(given, stages[: len(given)]):
            check_sampling_params(params, int64_seed=_runs_v2(stage))
        return resolve(self, sampling_params_list, allow_delta_coercion)

    return resolve_sampling_params_list


def guard_create_speech(create_speech: Callable) -> Callable:
    """``OmniOpenAIServingSpeech.create_speech`` that checks the request's seed and ``extra_params`` first."""

    @functools.wraps(create_speech)
    async def guarded_create_speech(self, request, raw_request=None):
        from vllm_omni.errors import OmniClientError

        try:
            check_speech(await _raw_seed(raw_request, request.seed), request.extra_params)
        except OmniClientError as error:
            return self.create_error_response(error.message)
        return await create_speech(self, request, raw_request)

    return guarded_create_speech


async def _raw_seed(raw_request: Any, parsed: int | None) -> Any:
    """The seed as the client wrote it, where the body can be read again."""
    if raw_request is None or parsed is None:
        return parsed
    try:
        body = await raw_request.json()
    except Exception:  # not a readable JSON body: what pydantic made of it is all there is
        return parsed
    return body.get("seed", parsed) if isinstance(body, Mapping) else parsed


def _client_errors(check: Callable, *args: Any) -> None:
    try:
        check(*args)
    except (TypeError, ValueError) as error:
        from vllm_omni.errors import OmniClientError

        counters().count_refused()
        raise OmniClientError(str(error)) from error


def _check_int64_seed(seed: Any, name: str) -> None:
    check_seed(seed, name)
    if seed >= 2**63:
        raise ValueError(f"{name} must be below 2**63 with the V2 model runner, got {seed!r}")


def _check_mapping(extra_params: Any) -> None:
    if extra_params is not None and not isinstance(extra_params, Mapping):
        raise TypeError(f"extra_params must be an object, got {extra_params!r}")


def _check_no_bools(params: Any) -> None:
    """The numbers that ``extra_params`` may set.

    vLLM's own checks take a bool for one, its wire format does not: the engine's input thread would end.
    """
    for name in ("temperature", "top_p", "top_k"):
        value = _get(params, name)
        if isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r}")


def _runs_v2(stage: Any) -> bool:
    configs = (_get(stage, name) for name in ("model_config", "engine_args"))
    return any(_get(config, "use_v2_model_runner") is True for config in configs)


def _get(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
