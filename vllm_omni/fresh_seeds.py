"""Report the seed of each request, and give one to a request that has none (``ROWSEED_UNSEEDED=fresh``).

By default (``global``) an unseeded request draws from its worker's global stream and cannot be repeated.
With ``fresh`` it gets a random seed at admission, as if its client had sent it: the log names it, and the
same text with that ``seed`` is the same speech.
"""

import functools
import logging
import os
import secrets
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rowseed.kernels.philox import SCHEME
from rowseed.vllm_omni.extra_args import SEED_ARG, Parameters, read_row
from rowseed.vllm_omni.seed_report import note_seed

logger = logging.getLogger("vllm.rowseed")

UNSEEDED = "ROWSEED_UNSEEDED"
SEED_BITS = 63  # what the HTTP field `seed` takes, sign apart


@functools.cache
def gives_fresh_seeds() -> bool:
    """Whether unseeded requests get a seed; says once what it does not understand."""
    choice = os.environ.get(UNSEEDED, "global")
    if choice not in ("global", "fresh"):
        logger.warning("%s must be global or fresh, got %r: taken as global", UNSEEDED, choice)
    return choice == "fresh"


def join_generate(generate: Callable) -> Callable:
    """``AsyncOmni.generate`` that reports the seed of its request and, if asked to, makes one.

    It returns the original's own generator: one around it would delay the abort of a request whose client
    left.
    """

    @functools.wraps(generate)
    def generate_with_seed(
        self, prompt, sampling_params=None, request_id="", *, sampling_params_list=None, **kwargs
    ):
        request_id = request_id or f"rowseed-{uuid.uuid4().hex}"
        if sampling_params is None:
            sampling_params_list = _seeded(self, request_id, sampling_params_list)
        return generate(
            self, prompt, sampling_params, request_id, sampling_params_list=sampling_params_list, **kwargs
        )

    return generate_with_seed


def _seeded(client: Any, request_id: str, stages: Any) -> Any:
    """The parameter list of the request's stages, its first with a seed if it may have a fresh one."""
    from vllm.sampling_params import SamplingParams

    if stages is None and gives_fresh_seeds():
        stages = client.resolve_sampling_params_list(None, allow_delta_coercion=True)
    if not isinstance(stages, Sequence) or isinstance(stages, (str, bytes)) or not stages:
        return stages
    talker = stages[0]
    if not isinstance(talker, SamplingParams):
        return stages  # a diffusion stage
    try:
        seed = read_row(getattr(talker, "extra_args", None), Parameters()).seed
    except (TypeError, ValueError):
        return stages  # refused in a moment, by name
    if seed is not None or not gives_fresh_seeds():
        logger.debug("rowseed: request %s: seed %s (RNG scheme %d)", request_id, seed, SCHEME)
        note_seed(seed)
        return stages
    seed = secrets.randbits(SEED_BITS)
    talker = talker.clone()
    talker.extra_args = {**(talker.extra_args or {}), SEED_ARG: seed}
    if talker.seed is None:
        talker.seed = seed  # for vLLM's draw of code 0, where that stays
    logger.info("rowseed: request %s: fresh seed %d (RNG scheme %d)", request_id, seed, SCHEME)
    note_seed(seed)
    return [talker, *stages[1:]]
