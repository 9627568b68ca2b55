"""tools/setup.py: which device, when it works again, and what it leaves alone."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, working in a folder of its own, installing nothing."""
    spec = importlib.util.spec_from_file_location("rowseed_setup", ROOT / "tools" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("numpy\n")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.venv, "create", lambda *_, **__: None)
    monkeypatch.setenv("ROWSEED_DEVICE", "cpu")
    module.installed = []
    monkeypatch.setattr(module, "install", lambda environment, device: module.installed.append(device))
    return module


def test_a_second_run_installs_nothing_and_a_changed_requirement_does(setup: ModuleType) -> None:
    setup.main([])
    setup.main([])
    assert setup.installed == ["cpu"]
    (setup.ROOT / "requirements" / "cpu.txt").write_text("numpy==2.3.5\n")
    setup.main([])
    assert setup.installed == ["cpu", "cpu"]


def test_another_release_gets_an_environment_of_its_own(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("omni-0.28.0", "triton-3.6.0"):
        (setup.ROOT / "requirements" / f"{name}.txt").write_text("numpy==2.3.5\n")
    others: list[tuple[object, ...]] = []
    monkeypatch.setattr(setup, "install_before", lambda *what: others.append(what))
    for _ in range(2):
        setup.main(["--omni", "0.28.0", "--triton", "3.6.0"])
    assert setup.installed == ["cpu"]
    assert others == [
        ("omni-0.28.0.txt", setup.ROOT / ".venv-0.28.0", setup.ROOT / ".venv"),
        ("triton-3.6.0.txt", setup.ROOT / ".venv-triton-3.6.0", setup.ROOT / ".venv"),
    ]
    with pytest.raises(SystemExit):
        setup.main(["--omni", "0.27.0"])
    assert "invalid choice: '0.27.0'" in capsys.readouterr().err
    monkeypatch.setenv("ROWSEED_DEVICE", "nvidia")
    setup.main(["--omni", "0.28.0"])
    assert len(others) == 2
    assert "on a CPU only" in capsys.readouterr().out


def test_a_failed_run_is_started_afresh(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(environment: Path, device: str) -> None:
        (setup.ROOT / ".venv" / "half").touch()
        raise setup.subprocess.CalledProcessError(1, ["pip"])

    with monkeypatch.context() as patch:
        patch.setattr(setup, "install", fail)
        with pytest.raises(SystemExit, match="Set-up failed: pip returned 1"):
            setup.main([])
    setup.main([])
    assert setup.installed == ["cpu"]
    assert not (setup.ROOT / ".venv" / "half").exists()


def test_an_environment_of_someone_elses_is_not_touched(setup: ModuleType) -> None:
    (setup.ROOT / ".venv").mkdir()
    (setup.ROOT / ".venv" / "theirs").touch()
    with pytest.raises(SystemExit, match="was not made by this script"):
        setup.main([])
    assert (setup.ROOT / ".venv" / "theirs").exists()


def test_the_device_is_the_drivers_or_the_one_asked_for(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROWSEED_DEVICE", "nvidia")
    assert setup.find_device() == "nvidia"
    monkeypatch.setenv("ROWSEED_DEVICE", "tpu")
    with pytest.raises(SystemExit, match="ROWSEED_DEVICE must be one of cpu, nvidia, got 'tpu'"):
        setup.find_device()
    monkeypatch.delenv("ROWSEED_DEVICE")
    monkeypatch.setattr(setup, "NVIDIA_DRIVER_FILES", (str(tmp_path / "absent"),))
    assert setup.find_device() == "cpu"
    monkeypatch.setattr(setup, "NVIDIA_DRIVER_FILES", (str(tmp_path),))
    assert setup.find_device() == "nvidia"


def test_the_links_lead_to_the_two_folders(setup: ModuleType) -> None:
    for name in ("kernels", "vllm_omni"):
        (setup.ROOT / name).mkdir()
    setup.link_import_root()
    setup.link_import_root()
    for name in ("kernels", "vllm_omni"):
        assert (setup.ROOT / ".ide" / "rowseed" / name).resolve() == setup.ROOT / name


def test_every_requirement_is_pinned() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            assert not line or line.startswith("#") or "==" in line, f"{path.name}: {line}"


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_another_python_is_told_which_are_accepted_before_anything_is_made(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(setup.sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"Python 3\.11, 3\.12, 3\.13 are accepted"):
        setup.main([])
    assert not setup.installed
    assert not (setup.ROOT / ".venv").exists()


def test_the_pythons_of_the_set_up_are_those_of_readme_and_pyproject(setup: ModuleType) -> None:
    first = setup.PYTHONS[0]
    assert f'requires-python = ">={first[0]}.{first[1]}"' in (ROOT / "pyproject.toml").read_text()
    names = [f"{major}.{minor}" for major, minor in setup.PYTHONS]
    assert f"Python {', '.join(names[:-1])} or {names[-1]}" in (ROOT / "README.md").read_text()


def test_classifiers_name_the_same_pythons(setup: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert named == [f"{major}.{minor}" for major, minor in setup.PYTHONS]


def test_the_oldest_triton_that_is_tested_is_the_floor(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "ROOT", ROOT)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (line.partition(";")[0].split(">=")[1] for line in dependencies if line.startswith("triton"))
    assert f"{floor}.0" == setup.releases("triton")[0]
