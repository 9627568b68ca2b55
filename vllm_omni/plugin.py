"""``vllm.general_plugins`` entry point: joins rowseed to vLLM-Omni, in every process, or says why not.

What is there decides, whatever the release's number: every target is checked before any is touched, and all
are joined or none. Those that only some processes need are joined when their modules are imported.
vLLM calls a plugin without a guard, so nothing that goes wrong here may leave it: one warning, and the engine
runs as without rowseed. ``ROWSEED=0`` turns it off.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple

from rowseed.kernels.philox import SCHEME
from rowseed.vllm_omni import releases
from rowseed.vllm_omni.metrics import expose_to_prometheus, share_between_processes
from rowseed.vllm_omni.on_import import on_import

# vLLM's logging configuration drops INFO lines of loggers outside its own tree.
logger = logging.getLogger("vllm.rowseed")

ON = ("", "1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")

UPSTREAM_TALKER = "vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker"
TALKER = "rowseed.vllm_omni.model_executor.models.qwen3_tts.load:SeededTalker"
TALKER_ARCHITECTURES = ("Qwen3TTSForConditionalGeneration", "Qwen3TTSTalkerForConditionalGeneration")

# Runners of these platforms inherit the V1 runner's methods but not its buffers and graphs.
FOREIGN_PLATFORMS = ("npu", "xpu", "musa")

# What is off without a target that stands alone.
UNCHECKED = "bad seeds are not refused at admission"
UNBATCHED = "seeds and extra_params of speech batches are dropped"
UNSTREAMED = "the WebSocket's seeds are not all checked or reported"
UNREPORTED = "requests' seeds are not reported, and ROWSEED_UNSEEDED=fresh gives none"
VLLMS_CODE0 = "codebook 0 is drawn by vLLM on the V2 runner"

GENERATE = (
    *("self", "prompt", "sampling_params", "request_id", "prompt_text", "lora_request"),
    *("tokenization_kwargs", "sampling_params_list", "output_modalities", "trace_headers", "priority"),
    *("data_parallel_rank", "session_id", "reasoning_ended", "reasoning_parser_kwargs", "arrival_time"),
)


class Target(NamedTuple):
    """A method, or a module's function (no owner), to replace: where it is, its parameters, what joins it.

    `lost` says what is off where a target that stands alone is not joined. Parameters that some releases lack
    are listed in `releases.DIFFERENCES`.
    """

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]
    join: Callable[[Callable], Callable]
    lost: str = ""

    @property
    def name(self) -> str:
        return f"{self.owner or self.module.rpartition('.')[2]}.{self.method}"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"


class UnsupportedError(Exception):
    """Why this installation is left alone."""


def register() -> None:
    """Join rowseed to the vLLM-Omni of this process. A second call does nothing, and none raises."""
    try:
        if _wanted():
            _register()
    except (Exception, SystemExit) as error:  # an import may raise anything
        release = releases.describe(releases.installed())
        logger.warning(
            "rowseed is not joined to %s. The engine runs as without rowseed, with vLLM-Omni's own seeds: %s",
            release,
            _reason(error),
        )


def _wanted() -> bool:
    choice = os.environ.get("ROWSEED", "")
    asked = choice.strip().lower()
    if asked in OFF:
        logger.info("rowseed is off (ROWSEED=%s)", choice)
        return False
    if asked not in ON:
        raise UnsupportedError(
            f"ROWSEED must be one of {', '.join(OFF)} or {', '.join(ON[1:])}, got {choice!r}"
        )
    return True


def _register() -> None:
    if not _has_vllm_omni():
        return  # plain vLLM: there is nothing to join
    _check_platform()
    methods = _unjoined(_runner_targets())
    architectures = _architectures()
    if not methods and not architectures:
        return
    _join(methods, architectures)
    logger.info(
        "rowseed %s (RNG scheme %d) joined %s: %s",
        _own_version(),
        SCHEME,
        releases.describe(releases.installed()),
        ", ".join([*architectures, *(target.name for target, _ in methods)]),
    )
    for lost, step in (
        ("bad seeds are not refused at admission, seeds not reported", _guard_clients),
        (VLLMS_CODE0, _join_v2_samplers),
        ("counts of other processes are not on /metrics", share_between_processes),
        ("counts are not on /metrics", expose_to_prometheus),
    ):
        _try(step, lost)


def _has_vllm_omni() -> bool:
    try:
        spec = importlib.util.find_spec("vllm_omni")
    except ValueError:  # imported by hand, without a spec: what can be imported from it decides
        return True
    return spec is not None and spec.origin is not None  # a plain folder of that name is no package


def _try(step: Callable[[], None], lost: str) -> None:
    """Something that the seeds do not depend on."""
    try:
        step()
    except (Exception, SystemExit) as error:
        release = releases.describe(releases.installed())
        logger.warning("rowseed on %s: %s (seeds work all the same): %s", release, lost, _reason(error))


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"


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


def _sampler_targets() -> list[Target]:
    from rowseed.vllm_omni.worker.code0_v2 import join_custom_sampler

    module = "vllm_omni.worker_v2.model_states.omni_model_state"  # not in vllm-omni 0.28
    parameters = ("self", "sampler")
    return [Target(module, "OmniModelState", "custom_sampler", parameters, join_custom_sampler, VLLMS_CODE0)]


def _client_targets() -> list[Target]:
    from rowseed.vllm_omni.admission import guard_resolve
    from rowseed.vllm_omni.fresh_seeds import join_generate
    from rowseed.vllm_omni.seed_report import join_create_speech
    from rowseed.vllm_omni.speech_batch import join_create_speech_batch, join_speech_service
    from rowseed.vllm_omni.speech_stream import (
        guard_build_config,
        join_generate_and_send,
        join_handle_session,
    )

    resolve = ("self", "sampling_params_list", "allow_delta_coercion")
    sentence = ("self", "websocket", "config", "sentence_text", "utterance_index", "sentence_index")
    entry = "vllm_omni.entrypoints"
    speech = (f"{entry}.openai.serving_speech", "OmniOpenAIServingSpeech")
    batch = (*speech, "create_speech_batch", ("self", "batch_request"))
    stream = (f"{entry}.openai.serving_speech_stream", "OmniStreamingSpeechHandler")
    return [
        Target(
            f"{entry}.omni_base",
            "OmniBase",
            "resolve_sampling_params_list",
            resolve,
            guard_resolve,
            UNCHECKED,
        ),
        Target(*speech, "create_speech", ("self", "request", "raw_request"), join_create_speech, UNCHECKED),
        Target(*batch, join_create_speech_batch, UNBATCHED),
        Target(f"{entry}.openai.api_server", "", "Omnispeech", ("request",), join_speech_service, UNBATCHED),
        Target(*stream, "_build_config", ("self", "websocket", "msg"), guard_build_config, UNSTREAMED),
        Target(*stream, "handle_session", ("self", "websocket"), join_handle_session, UNSTREAMED),
        Target(*stream, "_generate_and_send", sentence, join_generate_and_send, UNSTREAMED),
        Target(f"{entry}.async_omni", "AsyncOmni", "generate", GENERATE, join_generate, UNREPORTED),
    ]


def _unjoined(targets: list[Target], module: ModuleType | None = None) -> list[tuple[Target, Any]]:
    """The targets that are not joined yet, with their classes, each checked against its signature."""
    found = []
    for target in targets:
        owner: Any = module or importlib.import_module(target.module)
        if target.owner:
            owner = getattr(owner, target.owner, None)
        method = getattr(owner, target.method, None)
        if method is None:
            raise UnsupportedError(f"{target.module} has no {target.name}")
        if hasattr(method, "__rowseed__"):
            continue
        parameters = tuple(inspect.signature(method).parameters)
        absent = _optional(target).difference(parameters)
        if parameters != tuple(name for name in target.parameters if name not in absent):
            raise UnsupportedError(f"expected {target}, found ({', '.join(parameters)})")
        found.append((target, owner))
    return found


def _optional(target: Target) -> set[str]:
    difference = releases.DIFFERENCES.get(target.name)
    return set(difference.parameters) if difference else set()


def _guard_clients() -> None:
    _join_when_imported(_client_targets())


def _join_v2_samplers() -> None:
    _join_when_imported(_sampler_targets())


def _join_when_imported(targets: list[Target]) -> None:
    for target in targets:

        def join(module: ModuleType, target: Target = target) -> None:
            _try(lambda: _join(_unjoined([target], module), []), target.lost)

        on_import(target.module, join)


def _join(methods: list[tuple[Target, Any]], architectures: list[str]) -> None:
    """Replace the methods and register the talker: all of it, or nothing if anything raises."""
    with ExitStack() as undo:
        for target, owner in methods:
            original = getattr(owner, target.method)
            joined = target.join(original)
            joined.__rowseed__ = True  # type: ignore[attr-defined]
            undo.callback(setattr, owner, target.method, original)
            setattr(owner, target.method, joined)
        if architectures:
            _register_talker(architectures, undo)
        undo.pop_all()


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


def _register_talker(architectures: list[str], undo: ExitStack) -> None:
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    undo.callback(OmniModelRegistry.models.update, dict(OmniModelRegistry.models))
    for architecture in architectures:
        OmniModelRegistry.register_model(architecture, TALKER)
