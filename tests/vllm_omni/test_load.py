"""The talker that the registry names: ours where upstream's class is what it expects, else upstream's own."""

import importlib.metadata
import logging

import pytest
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as upstream

from rowseed.vllm_omni import plugin
from rowseed.vllm_omni.model_executor.models.qwen3_tts import load
from rowseed.vllm_omni.model_executor.models.qwen3_tts.talker import SeededTalker

UPSTREAM = upstream.Qwen3TTSTalkerForConditionalGeneration


def changed(self, something, else_):
    pass


def test_the_installed_release_gets_the_seeded_talker(log):
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    for architecture in plugin.TALKER_ARCHITECTURES:
        assert OmniModelRegistry.models[architecture].load_model_cls() is SeededTalker
    assert not log


@pytest.mark.parametrize("replacement", [changed, None], ids=["changed", "gone"])
@pytest.mark.parametrize(
    "owner, method", [*((UPSTREAM, name) for name in load.PARAMETERS), (None, "forward")]
)
def test_another_method_gives_upstreams_own_talker_and_names_it(log, monkeypatch, owner, method, replacement):
    monkeypatch.setattr(owner or getattr(upstream, load.PREDICTOR), method, replacement)
    assert load.SeededTalker is UPSTREAM
    (record,) = log
    assert record.levelno == logging.WARNING
    assert f".{method}" in record.getMessage()
    assert importlib.metadata.version("vllm-omni") in record.getMessage()


def test_a_predictor_that_was_renamed_gives_upstreams_own_talker(log, monkeypatch):
    monkeypatch.delattr(upstream, load.PREDICTOR)
    assert load.SeededTalker is UPSTREAM
    assert load.PREDICTOR in log[0].getMessage()


def test_no_other_name_is_there():
    with pytest.raises(AttributeError, match="has no attribute 'Talker'"):
        _ = load.Talker
