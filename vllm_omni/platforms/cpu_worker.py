"""vLLM-Omni's two stage workers on a CPU: vLLM's CPU worker around vLLM-Omni's V1 runners."""

from vllm.v1.worker import cpu_worker  # first: it prepares shared memory before torch is used
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _CPURunnerMixin:
    """What either runner needs before its own start."""

    def __init__(self, vllm_config, device):
        compilation = vllm_config.compilation_config
        # OmniGPUModelRunner._init_talker_mtp takes max(max_num_reqs, this), and a CPU has no captures.
        if compilation.max_cudagraph_capture_size is None:
            compilation.max_cudagraph_capture_size = 0
        # The GPU runners make events and streams outside the wrapper that CPUModelRunner puts around itself.
        with _torch_cuda_wrapper():
            super().__init__(vllm_config, device)


# In this order vLLM-Omni's methods come before the CPU's, and those before the GPU runner's.
class CPUARModelRunner(_CPURunnerMixin, GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages: the talker."""


class CPUGenerationModelRunner(_CPURunnerMixin, GPUGenerationModelRunner, CPUModelRunner):
    """One-shot stages: codes to waveform."""


class _CPUStageWorker(OmniWorkerMixin, cpu_worker.CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self):
        if self.use_v2_model_runner:
            raise RuntimeError(
                "model_runner must be v1 on a CPU, got v2: set `model_runner: v1` in the deploy config"
            )
        # CPUWorker.init_device names its runner by this module global; it has no other door.
        original = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = self.model_runner_cls
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = original


class CPUARWorker(_CPUStageWorker):
    model_runner_cls = CPUARModelRunner


class CPUGenerationWorker(_CPUStageWorker):
    model_runner_cls = CPUGenerationModelRunner
