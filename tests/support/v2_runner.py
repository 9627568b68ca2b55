"""vLLM-Omni's V2 runner, for the modules that test it: importing this skips them where there is none."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm_omni.worker_v2") is None:
    pytest.skip("vllm-omni 0.28 has no V2 runner", allow_module_level=True)

from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState  # noqa: F401
