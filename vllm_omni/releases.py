"""vLLM-Omni's releases: which the tests run on, and what is not the same in all of them.

Nothing here decides whether rowseed joins: what is there decides that (``rowseed.vllm_omni.plugin``).
"""

import importlib.metadata
from typing import NamedTuple

TESTED = ("0.28.0", "0.30.0")


class Difference(NamedTuple):
    """Parameters of a method that releases before ``since`` lack."""

    parameters: tuple[str, ...]
    since: str


DIFFERENCES = {
    "AsyncOmni.generate": Difference(("session_id",), "0.30.0"),
    "Qwen3TTSTalkerForConditionalGeneration.talker_mtp": Difference(("sample_uniforms",), "0.30.0"),
    "CodePredictorWrapper.forward": Difference(("sample_uniforms",), "0.30.0"),
}


def installed() -> str | None:
    """The installed vLLM-Omni's version as its metadata has it, or None where there is none to be read."""
    try:
        version = importlib.metadata.version("vllm-omni")
    except Exception:  # no metadata at all, or a file that cannot be read or decoded
        return None
    return version if isinstance(version, str) else None


def describe(version: str | None) -> str:
    """``vllm-omni 0.31.0 (not tested with)``: how log lines name a release."""
    if version is None:
        return "vllm-omni of unknown version (not tested with)"
    return f"vllm-omni {version}" + ("" if _public(version) in TESTED else " (not tested with)")


def _public(version: str) -> str:
    """Without the local label that a build may carry (``0.30.0+cu129``)."""
    return version.partition("+")[0]
