"""Refuse a bad seed or sub-talker parameter where the request comes in, for that request alone.

Such values would reach the engine, and several of them end it or hang it. Two doors: the parameter list
that both clients resolve (``OmniBase.resolve_sampling_params_list``) and the HTTP handler
(``create_speech``), which alone still sees the raw JSON value: pydantic turns "42", true and 4.0 into
integers.
"""

import functools
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


def check_sampling_params(params: Any) -> None:
    """Check ``seed`` and ``extra_args`` of one stage's parameters, a mapping or an object."""
    get = params.get if isinstance(params, Mapping) else functools.partial(_attribute, params)
    seed = get("seed")
    if seed is not None:
        _client_errors(check_seed, seed, "seed")
    check_request(get("extra_args"))


def guard_resolve(resolve: Callable) -> Callable:
    """``OmniBase.resolve_sampling_params_list`` that checks every stage's parameters first."""

    @functools.wraps(resolve)
    def resolve_sampling_params_list(self, sampling_params_list, allow_delta_coercion=False):
        if isinstance(sampling_params_list, Sequence) and not isinstance(sampling_params_list, (str, bytes)):
            given = sampling_params_list
        else:
            given = [] if sampling_params_list is None else [sampling_params_list]
        for params in given:
            check_sampling_params(params)
        return resolve(self, sampling_params_list, allow_delta_coercion)

    return resolve_sampling_params_list


def guard_create_speech(create_speech: Callable) -> Callable:
    """``OmniOpenAIServingSpeech.create_speech`` that checks the request's seed and ``extra_params`` first."""

    @functools.wraps(create_speech)
    async def guarded_create_speech(self, request, raw_request=None):
        from vllm_omni.errors import OmniClientError

        try:
            seed = await _raw_seed(raw_request, request.seed)
            if seed is not None:
                _client_errors(check_seed, seed, "seed")
            check_request(request.extra_params)
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


def _attribute(params: Any, name: str) -> Any:
    return getattr(params, name, None)
