"""The plugin: joined once, off, and left alone where vLLM-Omni is not what it expects."""

import importlib
import importlib.abc
import importlib.metadata
import inspect
import logging
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest
from vllm_omni.model_executor.models.registry import OmniModelRegistry
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from rowseed.vllm_omni import plugin, releases

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


@pytest.mark.parametrize("value", ["0", "false", "OFF", " No "])
def test_off(untouched, log, monkeypatch, value):
    monkeypatch.setenv("ROWSEED", value)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.INFO and f"ROWSEED={value}" in record.getMessage()


@pytest.mark.parametrize("value", ["", "1", "True", " on ", "yes"])
def test_on(untouched, monkeypatch, value):
    monkeypatch.setenv("ROWSEED", value)
    plugin.register()
    assert state() != untouched


@pytest.mark.parametrize("value", ["2", "disabled", "null"])
def test_any_other_value_is_refused_by_name(untouched, log, monkeypatch, value):
    monkeypatch.setenv("ROWSEED", value)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.WARNING
    assert (
        "ROWSEED must be one of 0, false, off, no" in record.getMessage()
        and repr(value) in record.getMessage()
    )


@pytest.mark.parametrize("parameters", ["self, a, new", "self, a"])
def test_a_parameter_that_not_all_releases_have_may_be_absent(monkeypatch, parameters):
    monkeypatch.setitem(releases.DIFFERENCES, "Owner.method", releases.Difference(("new",), "0.30.0"))
    target = plugin.Target("module", "Owner", "method", ("self", "a", "new"), None)
    module = SimpleNamespace(Owner=type("Owner", (), {"method": eval(f"lambda {parameters}: None")}))
    assert plugin._unjoined([target], module) == [(target, module.Owner)]
    module.Owner.method = lambda self, new: None
    with pytest.raises(plugin.UnsupportedError, match=r"expected Owner\.method"):
        plugin._unjoined([target], module)


@pytest.mark.parametrize("name", releases.DIFFERENCES)
def test_the_table_of_differences_is_right_for_the_installed_release(name):
    from packaging.version import Version

    modules = {
        "AsyncOmni": "vllm_omni.entrypoints.async_omni",
        "Qwen3TTSTalkerForConditionalGeneration": plugin.UPSTREAM_TALKER,
        "CodePredictorWrapper": "vllm_omni.model_executor.models.common.qwen3_code_predictor",
    }
    owner, method = name.split(".")
    found = inspect.signature(
        getattr(getattr(importlib.import_module(modules[owner]), owner), method)
    ).parameters
    difference = releases.DIFFERENCES[name]
    there = Version(importlib.metadata.version("vllm-omni")) >= Version(difference.since)
    assert all((parameter in found) == there for parameter in difference.parameters)


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
    assert importlib.metadata.version("vllm-omni") in record.getMessage()
    assert "the engine runs as without rowseed" in record.getMessage().lower()


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """A copy of the installed release's metadata with another version, or without any."""

    def rename(version):
        installed = importlib.metadata.distribution("vllm-omni")
        text = installed.read_text("METADATA")
        place = tmp_path / "vllm_omni-renamed.dist-info"
        place.mkdir()
        text = text.replace(
            f"\nVersion: {installed.version}\n", f"\nVersion: {version}\n" if version else "\n", 1
        )
        (place / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return rename


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.31.0", "0.31.0rc1", "dev", "not a version"])
def test_a_release_that_the_tests_do_not_run_on_is_joined_and_named(untouched, log, renamed, version):
    renamed(version)
    plugin.register()
    assert state() != untouched
    (record,) = log
    assert f"vllm-omni {version} (not tested with)" in record.getMessage()


@pytest.mark.parametrize("version", [*releases.TESTED, "0.30.0+cu129"])
def test_a_tested_release_has_no_such_note(untouched, log, renamed, version):
    renamed(version)
    plugin.register()
    assert f"vllm-omni {version}:" in log[0].getMessage()


def test_a_release_without_a_version_is_joined(untouched, log, renamed):
    renamed(None)
    plugin.register()
    assert state() != untouched
    assert "vllm-omni of unknown version (not tested with)" in log[0].getMessage()


@pytest.mark.parametrize(
    "error", [importlib.metadata.PackageNotFoundError("vllm-omni"), OSError("stale"), UnicodeError("bytes")]
)
def test_metadata_that_cannot_be_read_is_an_unknown_version(untouched, log, monkeypatch, error):
    real = importlib.metadata.version

    def version(name):
        if name == "vllm-omni":
            raise error
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    plugin.register()
    assert state() != untouched
    assert "vllm-omni of unknown version (not tested with)" in log[0].getMessage()


@pytest.mark.parametrize("error", [RuntimeError, OSError, ImportError, AttributeError, KeyError, SystemExit])
@pytest.mark.parametrize("module", ["vllm_omni.platforms", "vllm_omni.worker.gpu_model_runner"])
def test_an_import_that_raises_is_one_warning(untouched, log, monkeypatch, module, error):
    class Broken(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == module:
                raise error("on purpose")

    monkeypatch.delitem(sys.modules, module)
    parent, _, child = module.rpartition(".")
    monkeypatch.delattr(sys.modules[parent], child)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.WARNING
    assert f"{error.__name__}: " in record.getMessage() and "on purpose" in record.getMessage()


def test_vllm_omni_without_a_spec_is_joined_all_the_same(untouched, monkeypatch):
    import vllm_omni

    monkeypatch.setattr(vllm_omni, "__spec__", None)
    plugin.register()
    assert state() != untouched


@pytest.mark.parametrize("path", [None, []], ids=["module", "empty package"])
def test_something_else_of_that_name_is_one_warning(untouched, log, monkeypatch, path):
    other = ModuleType("vllm_omni")
    if path is not None:
        other.__path__ = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_omni"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm_omni", other)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.WARNING


def test_plain_vllm_is_left_alone_without_a_word(untouched, log, monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    plugin.register()
    assert state() == untouched
    assert not log


def test_what_fails_halfway_is_undone(untouched, log, monkeypatch):
    def refuse(architecture, model):
        if architecture == plugin.TALKER_ARCHITECTURES[1]:
            raise TypeError("another registry")
        real(architecture, model)

    real = OmniModelRegistry.register_model
    monkeypatch.setattr(OmniModelRegistry, "register_model", refuse, raising=False)
    plugin.register()
    assert state() == untouched
    (record,) = log
    assert record.levelno == logging.WARNING and "another registry" in record.getMessage()


@pytest.mark.parametrize("step", ["_guard_clients", "share_between_processes", "expose_to_prometheus"])
def test_what_seeds_do_not_depend_on_may_fail(untouched, log, monkeypatch, step):
    def fail():
        raise OSError("no space left")

    monkeypatch.setattr(plugin, step, fail)
    plugin.register()
    assert state() != untouched
    (record,) = [record for record in log if record.levelno == logging.WARNING]
    assert (
        "OSError: no space left" in record.getMessage() and "seeds work all the same" in record.getMessage()
    )


def test_a_clients_method_that_was_renamed_is_named_with_what_is_off(log, monkeypatch):
    monkeypatch.setattr(plugin, "on_import", lambda name, then: then(SimpleNamespace()))
    plugin._guard_clients()
    lines = [record.getMessage() for record in log]
    assert len(lines) == len(plugin._client_targets())
    for line, target in zip(lines, plugin._client_targets(), strict=True):
        assert target.name in line and target.lost in line
        assert importlib.metadata.version("vllm-omni") in line


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
