"""A CPU platform for vLLM-Omni, which has none: for trying things out and for tests, not for speed.

It stands in only where nothing else is there: vLLM is a CPU build, and none of vLLM-Omni's own platforms
and no other plugin claims the machine.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def platform_plugin() -> str | None:
    """The platform's qualified name, or None where an accelerator or another platform plugin exists.

    Entry point of the group `vllm_omni.platform_plugins`; runs once a process.
    """
    from vllm import envs, platforms
    from vllm_omni.platforms import builtin_omni_platform_plugins
    from vllm_omni.plugins import OMNI_PLATFORM_PLUGINS_GROUP

    if not platforms.current_platform.is_cpu():
        return None
    plugins = list(builtin_omni_platform_plugins.values())
    for point in entry_points(group=OMNI_PLATFORM_PLUGINS_GROUP):
        allowed = envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS
        if allowed and point.value != f"{__name__}:{platform_plugin.__name__}":
            plugins.append(lambda point=point: point.load()())
    if any(_claims_machine(plugin) for plugin in plugins):
        return None
    return f"{__name__}.{CpuOmniPlatform.__name__}"


def _claims_machine(plugin: Callable[[], str | None]) -> bool:
    # vLLM-Omni takes a plugin that raises for one that is not there; so do we.
    try:
        return plugin() is not None
    except Exception:
        return False


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with the questions that vLLM-Omni asks besides. Memory in bytes."""

    _omni_enum = OmniPlatformEnum.OOT
    # vLLM-Omni writes a stage's `devices` there; a CPU has only one.
    device_control_env_var = "ROWSEED_CPU_VISIBLE_DEVICES"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "rowseed.vllm_omni.platforms.cpu_worker.CPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "rowseed.vllm_omni.platforms.cpu_worker.CPUGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        # A compiler run at every start costs more than a tiny model's eager steps.
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total
