"""What the model registry names: the seeded talker, or vLLM-Omni's own where that is not what ours expects.

Ours overrides methods of upstream's class, whose module is too slow to import for a check in every process.
So it is checked here, when the model is loaded; the engine then starts either way.
"""

import inspect
import logging
from typing import Any

from rowseed.vllm_omni import releases

logger = logging.getLogger("vllm.rowseed")

OWNER = "Qwen3TTSTalkerForConditionalGeneration"
PREDICTOR = "Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM"
PARAMETERS = {
    "talker_mtp": (
        *("self", "input_ids", "input_embeds", "last_talker_hidden", "text_step", "do_sample", "temperature"),
        *("top_k", "top_p", "generator", "generators", "sample_uniforms", "kwargs"),
    ),
    "load_weights": ("self", "weights"),
    "_build_stacked_codec_embed": ("self",),
}
FORWARD = (
    *("self", "layer0_code", "layer0_embed", "last_talker_hidden", "do_sample", "temperature", "top_k"),
    *("top_p", "generator", "generators", "sample_uniforms"),
)


def __getattr__(name: str) -> Any:
    if name != "SeededTalker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as upstream

    try:
        _check(upstream)
        from rowseed.vllm_omni.model_executor.models.qwen3_tts.talker import SeededTalker
    except (Exception, SystemExit) as error:  # an import may raise anything
        logger.warning(
            "rowseed's talker does not fit %s. vLLM-Omni's own is loaded, with its own seeds (%s: %s)",
            releases.describe(releases.installed()),
            type(error).__name__,
            error,
        )
        return upstream.Qwen3TTSTalkerForConditionalGeneration
    return SeededTalker


def _check(upstream: Any) -> None:
    for method, expected in PARAMETERS.items():
        _check_method(getattr(upstream, OWNER), f"{OWNER}.{method}", expected)
    _check_method(getattr(upstream, PREDICTOR), "CodePredictorWrapper.forward", FORWARD)


def _check_method(owner: type, name: str, expected: tuple[str, ...]) -> None:
    method = getattr(owner, name.partition(".")[2], None)
    if method is None:
        raise TypeError(f"{name} is gone")
    found = tuple(inspect.signature(method).parameters)
    difference = releases.DIFFERENCES.get(name)
    optional = set(difference.parameters) if difference else set()
    if found != tuple(part for part in expected if part in found or part not in optional):
        raise TypeError(f"expected {name}({', '.join(expected)}), found ({', '.join(found)})")
