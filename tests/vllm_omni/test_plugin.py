"""The plugin: joined once, off, and left alone where vLLM-Omni is not what it expects."""

import importlib.metadata
import logging
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from vllm_omni.model_executor.models.registry import OmniModelRegistry
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from rowseed.vllm_omni import plugin

METHODS = ("_init_talker_mtp", "_talker_mtp_forward")


@pytest.fixture
def untouched(monkeypatch):
    """vLLM-Omni as it is without the plugin, for one test."""
    for name in METHODS:
        monkeypatch.setattr(OmniGPUModelRunner, name, getattr(OmniGPUModelRunner, name).__wrapped__)
    models = dict(OmniModelRegistry.models)
    models.update({name: _registered(plugin.UPSTREAM_TALKER) for name in plugin.TALKER_ARCHITECTURES})
    monkeypatch.setattr(OmniModelRegistry, "models", models)
    return state()


def _registered(module):
    lazy = type(next(iter(OmniModelRegistry.models.values())))
    return lazy(module, "Qwen3TTSTalkerForConditionalGeneration")


def state():
    methods = [getattr(OmniGPUModelRunner, name) for name in METHODS]
    return methods, [OmniModelRegistry.models[name].module_name for name in plugin.TALKER_ARCHITECTURES]


def test_joins_both_methods_and_the_talker_with_one_line(untouched, log):
    plugin.register()
    methods, modules = state()
    assert all(method.__wrapped__ is before for method, before in zip(methods, untouched[0], strict=True))
    assert set(modules) == {plugin.TALKER.partition(":")[0]}
    (line,) = [record.getMessage() for record in log]
    assert f"vllm-omni {importlib.metadata.version('vllm-omni')}" in line
    assert all(name in line for name in (*METHODS, *plugin.TALKER_ARCHITECTURES))


def test_a_second_call_does_nothing(untouched, log):
    plugin.register()
    once = state()
    log.clear()
    plugin.register()
    assert state() == once
    assert not log


def test_off(untouched, log, monkeypatch):
    monkeypatch.setenv("ROWSEED", "0")
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert "ROWSEED=0" in record.getMessage()


@pytest.mark.parametrize("parameters", ["self, a, new", "self, a"])
def test_a_parameter_that_not_all_releases_have_may_be_absent(parameters):
    target = plugin.Target("module", "Owner", "method", ("self", "a", "new"), None, optional=("new",))
    module = SimpleNamespace(Owner=type("Owner", (), {"method": eval(f"lambda {parameters}: None")}))
    assert plugin._unjoined([target], module) == [(target, module.Owner)]
    module.Owner.method = lambda self, new: None
    with pytest.raises(plugin.UnsupportedError, match=r"expected Owner\.method"):
        plugin._unjoined([target], module)


def changed_method(self, decode_req_ids, inputs_embeds, offsets):
    pass


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("replacement", [changed_method, None], ids=["changed", "gone"])
def test_a_changed_signature_is_named_and_nothing_is_touched(untouched, log, monkeypatch, name, replacement):
    monkeypatch.setattr(OmniGPUModelRunner, name, replacement)
    before = state()
    plugin.register()
    assert state() == before
    (record,) = log
    assert record.levelno == logging.WARNING
    assert f"OmniGPUModelRunner.{name}" in record.getMessage()


@pytest.mark.parametrize("version", ["0.26.0", "0.29.0", "0.30.1", "0.31.2"])
def test_an_unknown_version_is_named_and_nothing_is_touched(untouched, log, monkeypatch, version):
    real = plugin.importlib.metadata.version
    fake = {"vllm-omni": version}
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: fake.get(name) or real(name))
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.WARNING
    assert version in record.getMessage()


def test_a_module_that_is_gone_is_named_and_nothing_is_touched(untouched, log, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_omni.worker.gpu_model_runner", None)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert "vllm_omni.worker.gpu_model_runner" in record.getMessage()


def test_a_talker_that_moved_is_named_and_nothing_is_touched(untouched, log):
    name = plugin.TALKER_ARCHITECTURES[1]
    OmniModelRegistry.models[name] = _registered("vllm_omni.somewhere.else")
    before = state()
    plugin.register()
    assert state() == before
    (record,) = log
    assert name in record.getMessage() and "vllm_omni.somewhere.else" in record.getMessage()


@pytest.mark.parametrize("platform", ["npu", "xpu", "musa"])
def test_foreign_platforms_are_left_alone(untouched, log, monkeypatch, platform):
    from vllm_omni.platforms import current_omni_platform

    monkeypatch.setattr(type(current_omni_platform), f"is_{platform}", lambda self: True)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert platform.upper() in record.getMessage()


def test_vllm_loads_it_before_the_client_modules_and_they_are_guarded_when_imported():
    script = """
        import sys
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        import importlib
        for module, owner, method in (
            ("vllm_omni.entrypoints.omni_base", "OmniBase", "resolve_sampling_params_list"),
            ("vllm_omni.worker.gpu_model_runner", "OmniGPUModelRunner", "_talker_mtp_forward"),
        ):
            fresh = module not in sys.modules
            function = getattr(getattr(importlib.import_module(module), owner), method)
            print(owner, fresh, hasattr(function, "__rowseed__"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "OmniBase True True" in lines
    assert "OmniGPUModelRunner False True" in lines
