"""``vllm.general_plugins`` entry point: joins rowseed to vLLM-Omni, in every process, or says why not.

All or nothing: every target is checked before any is touched. Those that only processes with clients need
are joined when their modules are imported. ``ROWSEED=0`` turns it off.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from rowseed.kernels.philox import SCHEME
from rowseed.vllm_omni.metrics import expose_to_prometheus, share_between_processes
from rowseed.vllm_omni.on_import import on_import

# vLLM's logging configuration drops INFO lines of loggers outside its own tree.
logger = logging.getLogger("vllm.rowseed")

SUPPORTED_RELEASES = ((0, 28, 0), (0, 30, 0))

UPSTREAM_TALKER = "vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker"
TALKER = "rowseed.vllm_omni.model_executor.models.qwen3_tts.talker:SeededTalker"
TALKER_ARCHITECTURES = ("Qwen3TTSForConditionalGeneration", "Qwen3TTSTalkerForConditionalGeneration")

# Runners of these platforms inherit the V1 runner's methods but not its buffers and graphs.
FOREIGN_PLATFORMS = ("npu", "xpu", "musa")

GENERATE = (
    *("self", "prompt", "sampling_params", "request_id", "prompt_text", "lora_request"),
    *("tokenization_kwargs", "sampling_params_list", "output_modalities", "trace_headers", "priority"),
    *("data_parallel_rank", "session_id", "reasoning_ended", "reasoning_parser_kwargs", "arrival_time"),
)


class Target(NamedTuple):
    """A method to replace: where it is, its parameters, what joins it. Some releases lack `optional` ones."""

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    join: Callable[[Callable], Callable]
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.owner}.{self.method}({', '.join(self.parameters)})"


class UnsupportedError(Exception):
    """Why this installation is left alone."""


def register() -> None:
    """Join rowseed to the vLLM-Omni of this process. A second call does nothing."""
    if os.environ.get("ROWSEED") == "0":
        logger.info("rowseed is off (ROWSEED=0)")
        return
    if importlib.util.find_spec("vllm_omni") is None:
        return  # plain vLLM: there is nothing to join
    try:
        version = _supported_version()
        _check_platform()
        methods = _unjoined(_runner_targets())
        architectures = _architectures()
    except (UnsupportedError, ImportError) as reason:
        logger.warning("rowseed is not joined, the engine runs without it: %s", reason)
        return
    if not methods and not architectures:
        return
    _replace(methods)
    _register_talker(architectures)
    _guard_clients()
    share_between_processes()
    expose_to_prometheus()
    logger.info(
        "rowseed %s (RNG scheme %d) joined vllm-omni %s: %s",
        _own_version(),
        SCHEME,
        version,
        ", ".join([*architectures, *(f"{target.owner}.{target.method}" for target, _ in methods)]),
    )


def _supported_version() -> str:
    from packaging.version import Version

    try:
        version = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedError("vllm_omni is there, but no version of it is known") from error
    if Version(version).release not in SUPPORTED_RELEASES:
        known = ", ".join(".".join(map(str, release)) for release in SUPPORTED_RELEASES)
        raise UnsupportedError(f"vllm-omni {version} is not known to work (known: {known})")
    return version


def _own_version() -> str:
    try:
        return importlib.metadata.version("rowseed")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _check_platform() -> None:
    from vllm_omni.platforms import current_omni_platform

    for name in FOREIGN_PLATFORMS:
        if getattr(current_omni_platform, f"is_{name}")():
            raise UnsupportedError(f"the {name.upper()} platform is not supported")


def _runner_targets() -> list[Target]:
    from rowseed.vllm_omni.worker.runner_v1 import join_init_talker_mtp, join_talker_mtp_forward

    runner = ("vllm_omni.worker.gpu_model_runner", "OmniGPUModelRunner")
    forward = ("self", "decode_req_ids", "inputs_embeds", "start_offsets")
    return [
        Target(*runner, "_init_talker_mtp", ("self",), join_init_talker_mtp),
        Target(*runner, "_talker_mtp_forward", forward, join_talker_mtp_forward),
    ]


def _client_targets() -> list[Target]:
    from rowseed.vllm_omni.admission import guard_create_speech, guard_resolve
    from rowseed.vllm_omni.fresh_seeds import join_generate

    resolve = ("self", "sampling_params_list", "allow_delta_coercion")
    speech = ("self", "request", "raw_request")
    entry = "vllm_omni.entrypoints"
    return [
        Target(f"{entry}.omni_base", "OmniBase", "resolve_sampling_params_list", resolve, guard_resolve),
        Target(
            f"{entry}.openai.serving_speech",
            "OmniOpenAIServingSpeech",
            "create_speech",
            speech,
            guard_create_speech,
        ),
        Target(f"{entry}.async_omni", "AsyncOmni", "generate", GENERATE, join_generate, ("session_id",)),
    ]


def _unjoined(targets: list[Target], module: ModuleType | None = None) -> list[tuple[Target, Any]]:
    """The targets that are not joined yet, with their classes, each checked against its signature."""
    found = []
    for target in targets:
        owner = getattr(module or importlib.import_module(target.module), target.owner, None)
        method = getattr(owner, target.method, None)
        if method is None:
            raise UnsupportedError(f"{target.module} has no {target.owner}.{target.method}")
        if hasattr(method, "__rowseed__"):
            continue
        parameters = tuple(inspect.signature(method).parameters)
        absent = set(target.optional).difference(parameters)
        if parameters != tuple(name for name in target.parameters if name not in absent):
            raise UnsupportedError(f"expected {target}, found ({', '.join(parameters)})")
        found.append((target, owner))
    return found


def _guard_clients() -> None:
    for target in _client_targets():

        def guard(module: ModuleType, target: Target = target) -> None:
            try:
                _replace(_unjoined([target], module))
            except UnsupportedError as reason:
                logger.warning("rowseed does not check or report the seeds of requests: %s", reason)

        on_import(target.module, guard)


def _replace(methods: list[tuple[Target, Any]]) -> None:
    for target, owner in methods:
        joined = target.join(getattr(owner, target.method))
        joined.__rowseed__ = True  # type: ignore[attr-defined]
        setattr(owner, target.method, joined)


def _architectures() -> list[str]:
    """Architectures that still give vLLM-Omni's own talker."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    found = []
    for architecture in TALKER_ARCHITECTURES:
        model = OmniModelRegistry.models.get(architecture)
        module = getattr(model, "module_name", None)
        if module == TALKER.partition(":")[0]:
            continue
        if module != UPSTREAM_TALKER:
            raise UnsupportedError(f"{architecture} is expected in {UPSTREAM_TALKER}, found {module}")
        found.append(architecture)
    return found


def _register_talker(architectures: list[str]) -> None:
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    for architecture in architectures:
        OmniModelRegistry.register_model(architecture, TALKER)
