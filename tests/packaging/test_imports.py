"""The two top-level folders have the names of other people's packages, and hide neither."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *options: str, path: Path | None = None, cwd: Path = ROOT) -> str:
    """Run `code` in a new interpreter; `path` goes before its site-packages."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder with packages named `kernels` and `vllm_omni`, as their distributions install them."""
    for name in ("kernels", "vllm_omni"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'other'\n")
    return tmp_path


@pytest.mark.parametrize("options", [(), ("-P",)], ids=["root on sys.path", "safe path"])
@pytest.mark.parametrize("name", ["kernels", "vllm_omni"])
def test_the_others_packages_win_from_the_root(name: str, options: tuple[str, ...], others: Path) -> None:
    if options and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    assert python(f"import {name}; print({name}.OWNER)", *options, path=others) == "other"


def test_rowseed_is_found_beside_the_others(others: Path) -> None:
    code = "import kernels, rowseed.kernels.streams as s; print(kernels.OWNER, s.__file__)"
    owner, file = python(code, path=others).split(maxsplit=1)
    assert owner == "other"
    assert Path(file).resolve() == ROOT / "kernels" / "streams.py"


def test_the_installed_vllm_omni_wins_from_the_root() -> None:
    pytest.importorskip("vllm_omni")
    code = "import importlib.util as u; print(u.find_spec('vllm_omni').origin)"
    origin = Path(python(code))
    assert origin.name == "__init__.py"
    assert ROOT / "vllm_omni" not in origin.parents


def test_no_init_file_at_the_top_of_either_folder() -> None:
    """With one, `import kernels` from the root would give ours."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "vllm_omni" / "__init__.py").exists()


BLOCKER = """
import sys
import importlib.abc
import sysconfig
from pathlib import Path

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""

INSTALLED_BESIDE = """
{"vllm", "vllm_omni", "transformers", "scipy", "hypothesis", "pytest", "rich", "matplotlib", "pydantic",
 "prometheus_client", "requests", "safetensors", "psutil", "msgspec"}
"""


def test_the_sampler_needs_torch_triton_and_numpy_only() -> None:
    code = BLOCKER.format(blocked=INSTALLED_BESIDE.strip()) + (
        "import torch\n"
        "from rowseed.kernels.sampling import sample\n"
        "from rowseed.kernels.streams import RowStreams\n"
        "streams = RowStreams(2, 'cpu', global_seed=1).pack([7, None], [0, 0])\n"
        "print(sample(torch.zeros(2, 8), streams).shape[0])"
    )
    assert python(code) == "2"


def test_the_blocker_blocks() -> None:
    code = BLOCKER.format(blocked="{'numpy'}") + (
        "try:\n    import rowseed.kernels.streams\n"
        "except ModuleNotFoundError as error:\n    print(error.name)"
    )
    assert python(code).startswith("numpy")


def test_the_sampler_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, rowseed.kernels.sampling, rowseed.kernels.streams, rowseed.kernels.reference\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in ('vllm', 'vllm_omni')))"
    )
    assert python(code) == "[]"
