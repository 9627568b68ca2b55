"""Stand-ins for what the real runner classes read: no engine, no weights, no scheduler."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

HIDDEN, GROUPS, MAX_ROWS = 8, 4, 8


class Buffer:
    """vLLM's CpuGpuBuffer, on the CPU."""

    def __init__(self, *shape, dtype=torch.float32):
        self.gpu = self.cpu = torch.zeros(*shape, dtype=dtype)


class Model(nn.Module):
    """A model with an MTP that records its calls; the codes of a row are its input id, GROUPS times."""

    talker_mtp_output_key = ("codes", "audio")

    def __init__(self, fail_at_call=None):
        super().__init__()
        self.calls = []
        self.fail_at_call = fail_at_call

    def talker_mtp(self, ids, embeds, hidden, text, **kwargs):
        inputs = [ids.clone(), embeds.clone(), hidden.clone(), text.clone()]
        self.calls.append(SimpleNamespace(rows=ids.shape[0], inputs=inputs, kwargs=kwargs))
        if self.fail_at_call == len(self.calls):
            raise RuntimeError("the MTP failed")
        streams = kwargs.get("streams")
        if streams is not None:
            self.calls[-1].kwargs = kwargs | {"streams": streams.clone()}
        return embeds + 1, ids.reshape(-1, 1).expand(-1, GROUPS).long()


class SeedModel(Model):
    talker_mtp_seed_extra_arg = "tts_local_seed"


class GeneratorModel(SeedModel):
    talker_mtp_accepts_generators = True


class UpstreamGeneratorModel(SeedModel):
    talker_mtp_accepts_per_row_generators = True


class RowStreamModel(SeedModel):
    talker_mtp_accepts_row_streams = True


class GraphWrapper:
    """Stands for CUDAGraphWrapper: passes the call on, and counts."""

    def __init__(self, runnable, vllm_config=None, runtime_mode=None):
        self.runnable, self.calls = runnable, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.runnable(*args, **kwargs)


def request(extra_args=None, **params):
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args, **params))


def fake_vllm_config(subtalker=None, data_parallel_rank=0):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            subtalker_sampling_params=subtalker, hf_text_config=SimpleNamespace(hidden_size=HIDDEN)
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=data_parallel_rank,
            use_sequence_parallel_moe=False,
            is_moe_model=False,
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={},
            static_all_moe_layers=[],
            fast_moe_cold_start=False,
            cudagraph_mode=CUDAGraphMode.NONE,
            max_cudagraph_capture_size=MAX_ROWS,
        ),
    )


def make_runner(
    model, requests, *, subtalker=None, frames=None, prompt_len=10, bucket=None, rank=0, hidden=HIDDEN
):
    """A bare OmniGPUModelRunner whose MTP buffers hold distinct rows.

    Args:
        requests: {request id: extra_args or None}.
        frames: frames that the scheduler has counted for each request; None leaves the counts out.
        bucket: the padded size that the dispatcher answers.
    """
    runner = object.__new__(OmniGPUModelRunner)
    runner.model, runner.talker_mtp, runner.has_talker_mtp = model, model.talker_mtp, True
    runner.vllm_config = fake_vllm_config(subtalker, rank)
    runner.compilation_config = runner.vllm_config.compilation_config
    runner.model_config = runner.vllm_config.model_config
    runner.max_num_reqs, runner.dtype, runner.device = MAX_ROWS, torch.float32, torch.device("cpu")
    runner._make_buffer = lambda *shape, dtype, numpy=True: Buffer(*shape, dtype=dtype)
    runner._determine_batch_execution_and_padding = lambda **kwargs: (
        CUDAGraphMode.NONE,
        BatchDescriptor(num_tokens=bucket or kwargs["num_tokens"]),
        False,
        None,
        None,
    )
    runner.talker_mtp_input_ids = Buffer(MAX_ROWS, dtype=torch.int32)
    runner.talker_mtp_input_ids.gpu.copy_(torch.arange(MAX_ROWS) + 40)
    for name in ("talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"):
        buffer = Buffer(MAX_ROWS, hidden)
        buffer.gpu.copy_(torch.arange(MAX_ROWS * hidden).view(MAX_ROWS, hidden) + len(name) * 1000)
        setattr(runner, name, buffer)
    runner.requests = {name: request(extra_args) for name, extra_args in requests.items()}
    runner.model_intermediate_buffer = {}
    ids = list(requests)
    runner.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(ids)})
    if frames is not None:
        runner.input_batch.num_prompt_tokens = np.full(len(ids), prompt_len, np.int32)
        runner.input_batch.num_computed_tokens_cpu = np.asarray(frames, np.int32) + prompt_len
    runner.query_start_loc = SimpleNamespace(cpu=torch.arange(len(ids) + 1))
    return runner


def forward(runner, request_ids=None, start_offsets=None):
    """One call of the joined method; returns the codes of each request."""
    ids = list(runner.requests) if request_ids is None else request_ids
    embeds = torch.zeros(2 * MAX_ROWS, runner.text_step.gpu.shape[1])
    runner._talker_mtp_forward(ids, embeds, start_offsets)
    codes = {name: runner.model_intermediate_buffer[name]["codes"]["audio"] for name in ids}
    return codes, embeds


def buffers(runner):
    names = ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step")
    return [getattr(runner, name).gpu.clone() for name in names]


@contextmanager
def platform_graph_wrapper(monkeypatch):
    """Make GraphWrapper the platform's graph wrapper."""
    from vllm_omni.platforms import current_omni_platform

    wrapper_cls = classmethod(lambda cls: GraphWrapper)
    with monkeypatch.context() as patch:
        patch.setattr(type(current_omni_platform), "get_graph_wrapper_cls", wrapper_cls)
        yield
