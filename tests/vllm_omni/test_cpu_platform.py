"""The CPU platform stands in where nothing else is there, and nowhere else."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_omni")

import vllm.platforms
import vllm_omni.platforms
from vllm import envs

from rowseed.vllm_omni.platforms import cpu

OURS = "rowseed.vllm_omni.platforms.cpu:platform_plugin"


def point(name: str, value: str, plugin) -> SimpleNamespace:
    """An entry point whose `load` gives `plugin`, or raises it."""

    def load():
        if isinstance(plugin, Exception):
            raise plugin
        return plugin

    return SimpleNamespace(name=name, value=value, load=load)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend a vLLM build, vLLM-Omni's own detections, installed plugins and VLLM_PLUGINS."""

    def pretend(*, cpu_build: bool = True, builtin=None, points=(), allowed: list[str] | None = None) -> None:
        monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: cpu_build))
        builtin_plugins = {"cuda": builtin or (lambda: None)}
        monkeypatch.setattr(vllm_omni.platforms, "builtin_omni_platform_plugins", builtin_plugins)
        every = [point("rowseed_cpu", OURS, cpu.platform_plugin), *points]
        monkeypatch.setattr(cpu, "entry_points", lambda group: every)
        monkeypatch.setattr(envs, "VLLM_PLUGINS", allowed, raising=False)

    return pretend


def test_stands_in_on_a_cpu_build_with_nothing_else(machine) -> None:
    machine()
    assert cpu.platform_plugin() == "rowseed.vllm_omni.platforms.cpu_platform.CpuOmniPlatform"


def test_not_on_a_build_for_accelerators(machine) -> None:
    machine(cpu_build=False)
    assert cpu.platform_plugin() is None


def test_not_where_vllm_omni_finds_an_accelerator(machine) -> None:
    machine(builtin=lambda: "vllm_omni.platforms.cuda.platform.CudaOmniPlatform")
    assert cpu.platform_plugin() is None


def test_not_beside_another_plugin_that_claims_the_machine(machine) -> None:
    other = point("other", "other:plugin", lambda: "other.Platform")
    machine(points=[other])
    assert cpu.platform_plugin() is None
    machine(points=[other], allowed=["rowseed_cpu"])
    assert cpu.platform_plugin() is not None


@pytest.mark.parametrize("plugin", [lambda: None, lambda: 1 / 0, ImportError("broken")])
def test_plugins_that_are_not_there_or_broken_do_not_count(machine, plugin) -> None:
    machine(points=[point("other", "other:plugin", plugin)])
    assert cpu.platform_plugin() is not None


def test_a_fault_is_one_warning_and_no_platform(machine, log, monkeypatch) -> None:
    machine()
    for error in (ImportError("gone"), RuntimeError("wrong"), OSError("no such file"), SystemExit(1)):

        def is_cpu(error=error):
            raise error

        monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=is_cpu))
        assert cpu.platform_plugin() is None
        record = log.pop()
        assert record.levelno == logging.WARNING and type(error).__name__ in record.getMessage()
    assert not log


def test_a_class_that_cannot_be_made_is_no_platform(machine, log, monkeypatch) -> None:
    from rowseed.vllm_omni.platforms import cpu_platform

    def refuse(self):
        raise TypeError("a new abstract method")

    machine()
    monkeypatch.setattr(cpu_platform.CpuOmniPlatform, "__init__", refuse)
    assert cpu.platform_plugin() is None
    assert "a new abstract method" in log[0].getMessage()


def test_runners_take_vllm_omnis_methods_before_the_cpus() -> None:
    worker = pytest.importorskip("rowseed.vllm_omni.platforms.cpu_worker")
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

    for runner in (worker.CPUARModelRunner, worker.CPUGenerationModelRunner):
        order = [runner.__mro__.index(base) for base in (OmniGPUModelRunner, CPUModelRunner, GPUModelRunner)]
        assert order == sorted(order)


def test_the_v2_runner_is_refused_by_name() -> None:
    worker = pytest.importorskip("rowseed.vllm_omni.platforms.cpu_worker")
    stage = object.__new__(worker.CPUARWorker)
    stage.use_v2_model_runner = True
    with pytest.raises(RuntimeError, match="model_runner must be v1 on a CPU, got v2"):
        stage.init_device()
