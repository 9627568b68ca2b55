"""What a request says about its stream, in ``SamplingParams.extra_args``: read, checked, never cached.

Keys: ``tts_local_seed`` (int), ``tts_local_offset`` (int, added to the frame index), and the sub-talker's
``subtalker_temperature``, ``subtalker_top_k``, ``subtalker_top_p``, ``subtalker_do_sample``.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rowseed.kernels.streams import check_seed

SEED_ARG = "tts_local_seed"
OFFSET_ARG = "tts_local_offset"
SUBTALKER_PREFIX = "subtalker_"
PARAMETER_ARGS = frozenset(SUBTALKER_PREFIX + name for name in ("temperature", "top_k", "top_p", "do_sample"))

INT32_MAX = 2**31 - 1


class Parameters(NamedTuple):
    """Sub-talker sampling parameters of one row. Temperature 0 is greedy, top_k <= 0 and top_p 1 are off."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0


class RowArgs(NamedTuple):
    """One request's row: its seed (None: unseeded), base offset and sub-talker parameters."""

    seed: int | None
    base_offset: int
    parameters: Parameters


def read_row(extra_args: Any, defaults: Parameters, seed_arg: str | None = SEED_ARG) -> RowArgs:
    """Read a request's ``extra_args`` (a mapping, or anything else for none).

    Raises:
        TypeError, ValueError: names the key, the value and what is accepted.
    """
    if not extra_args or not (type(extra_args) is dict or isinstance(extra_args, Mapping)):
        return RowArgs(None, 0, defaults)
    seed = extra_args.get(seed_arg) if seed_arg else None
    offset = extra_args.get(OFFSET_ARG)
    return RowArgs(
        None if seed is None else check_seed(seed, seed_arg or SEED_ARG),
        0 if offset is None else check_seed(offset, OFFSET_ARG),
        defaults if PARAMETER_ARGS.isdisjoint(extra_args) else read_parameters(extra_args, defaults),
    )


def read_parameters(
    values: Mapping[str, Any], defaults: Parameters, prefix: str = SUBTALKER_PREFIX
) -> Parameters:
    """Sub-talker parameters under ``prefix`` + name; None or a missing key gives the default."""
    temperature, top_k, top_p = defaults
    given = values.get(prefix + "temperature")
    if given is not None:
        temperature = _check_temperature(given, prefix + "temperature")
    given = values.get(prefix + "top_k")
    if given is not None:
        top_k = _check_top_k(given, prefix + "top_k")
    given = values.get(prefix + "top_p")
    if given is not None:
        top_p = _check_top_p(given, prefix + "top_p")
    given = values.get(prefix + "do_sample")
    if given is not None:
        if not isinstance(given, bool):
            raise TypeError(f"{prefix}do_sample must be true or false, got {given!r}")
        if not given:
            temperature = 0.0
    return Parameters(temperature, top_k, top_p)


def stage_parameters(values: Any) -> Parameters:
    """The stage's ``subtalker_sampling_params``, over Qwen3-TTS's own defaults (0.9, 50, 1.0).

    A negative temperature is greedy, as in vLLM-Omni's predictor.
    """
    if not isinstance(values, Mapping):
        return Parameters()
    values = dict(values)
    temperature = values.get("temperature")
    if isinstance(temperature, (int, float)) and temperature < 0:
        values["temperature"] = 0.0
    return read_parameters(values, Parameters(), prefix="")


def _number(value: Any, name: str, accepted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number {accepted}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        bits = int(value).bit_length()  # only an int overflows
        raise ValueError(f"{name} must be a number {accepted}, got an int of {bits} bits") from None


def _check_temperature(value: Any, name: str) -> float:
    accepted = "in [0, inf), finite as float32"
    number = _number(value, name, accepted)
    if not (number >= 0 and number <= float(np.finfo(np.float32).max)):
        raise ValueError(f"{name} must be a number {accepted}, got {value!r}")
    return number


def _check_top_p(value: Any, name: str) -> float:
    accepted = "in [0, 1]"
    number = _number(value, name, accepted)
    if math.isnan(number) or not 0 <= number <= 1:
        raise ValueError(f"{name} must be a number {accepted}, got {value!r}")
    return number


def _check_top_k(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int (0 or less: off), got {value!r}")
    return max(min(value, INT32_MAX), 0)
