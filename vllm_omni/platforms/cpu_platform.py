"""The CPU platform's class; `rowseed.vllm_omni.platforms.cpu` decides whether it stands in."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


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
