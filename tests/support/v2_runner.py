"""vLLM-Omni's V2 runner, for the modules that test it: importing this skips them where there is none."""

import importlib.util
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("vllm_omni.worker_v2") is None:
    pytest.skip("vllm-omni 0.28 has no V2 runner", allow_module_level=True)

from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState  # noqa: F401

CPU = torch.device("cpu")


def make_sampler(max_rows, vocabulary, device=CPU, **kwargs):
    """vLLM's own V2 sampler. On a CPU it would take memory for pinned that is not."""
    uva = buffer_utils.is_uva_available if device.type == "cuda" else lambda: False
    with mock.patch.object(buffer_utils, "is_uva_available", uva):
        states = RequestState(max_rows, 256, 256, 0, vocabulary, device)
        return Sampler(max_rows, vocabulary, device, states, **kwargs)
