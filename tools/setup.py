"""Make .venv: vLLM, vLLM-Omni and this project, for the CPU or for an NVIDIA GPU.

Standard library only; `PYTHONS` are accepted. What was installed is stamped with a hash of everything it
was made from, so that a second run does nothing, and a run after a failed one starts afresh.
Set ROWSEED_DEVICE to `cpu` or `nvidia` to choose the device yourself. `--omni 0.28.0` makes .venv-0.28.0 too:
the same packages below another release of vLLM and vLLM-Omni; `--triton 3.6.0` makes .venv-triton-3.6.0,
below another Triton. With `--environment .venv-3.12` that folder is made instead of .venv.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "rowseed.stamp"
# vLLM has wheels for older ones too, but what else speech serving imports has not.
PYTHONS = ((3, 11), (3, 12), (3, 13))
DEVICES = ("cpu", "nvidia")
# Each of these is there when the kernel's NVIDIA driver is (/dev/dxg: inside WSL).
NVIDIA_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")

TORCHVISION_OPERATORS = """

# Added by rowseed's tools/setup.py.
if not _has_ops():
    from torch import library as _library

    _operators = _library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def find_device() -> str:
    """`cpu` or `nvidia`; looks for the driver's files, so that nothing needs to be run."""
    chosen = os.environ.get("ROWSEED_DEVICE")
    if chosen is None:
        return "nvidia" if any(map(os.path.exists, NVIDIA_DRIVER_FILES)) else "cpu"
    if chosen not in DEVICES:
        sys.exit(f"ROWSEED_DEVICE must be one of {', '.join(DEVICES)}, got {chosen!r}")
    return chosen


def fingerprint(device: str) -> str:
    """SHA-256 of what .venv is made from: files, device, interpreter, place."""
    digest = hashlib.sha256(f"{device}\0{sys.version}\0{ROOT}".encode())
    for path in [ROOT / "pyproject.toml", Path(__file__), *sorted((ROOT / "requirements").glob("*.txt"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def pip(environment: Path, *arguments: str) -> None:
    # Python compiles what is imported, once; all of it here would take as long as the rest (the Makefile
    # sees to it that the result is kept).
    command = [python_of(environment), "-m", "pip", "install", "-qq", "--no-compile", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def packages_of(environment: Path) -> Path:
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [python_of(environment), "-c", probe]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def install(environment: Path, device: str) -> None:
    pip(environment, "-r", "requirements/pip.txt")
    if device == "cpu":
        pip(environment, "-r", "requirements/cpu.txt", "-r", "requirements/dev.txt")
        pip(environment, "--no-deps", "-r", "requirements/cpu-no-deps.txt")
        mend_cuda_wheels(environment)
    else:
        pip(environment, "-r", "requirements/nvidia.txt", "-r", "requirements/dev.txt")
    pip(environment, "--no-deps", "--no-build-isolation", "--editable", ".")


def mend_cuda_wheels(environment: Path) -> None:
    """Make torchaudio and torchvision importable beside a torch without CUDA.

    Both are published with extensions that are linked to CUDA only, and vLLM-Omni imports both, though
    speech serving uses nothing of the extensions.
    - torchaudio raises if its extension is there but cannot be loaded, and does without if it is absent.
    - torchvision does without an extension that cannot be loaded, but then describes two operators that
      only the extension declares, and raises. So declare them where it has noticed that it has none.
    """
    packages = packages_of(environment)
    probe = [python_of(environment), "-c", "import torch; print(torch.version.cuda)"]
    if subprocess.run(probe, check=True, capture_output=True, text=True).stdout.strip() == "None":
        for library in packages.glob("torchaudio/lib/*.so"):
            library.unlink()
    with open(packages / "torchvision" / "extension.py", "a") as extension:
        extension.write(TORCHVISION_OPERATORS)


def install_before(requirements: str, environment: Path, main: Path) -> None:
    """Other releases of some packages, before those of the main environment on the path."""
    below = packages_of(main)
    packages = environment / below.relative_to(main)
    # A plain line with the folder's name would leave out its own .pth files, this project's among them.
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    pip(main, "--no-deps", "--target", str(packages), "-r", f"requirements/{requirements}")


def link_import_root() -> None:
    """.ide/rowseed/{kernels,vllm_omni}: the import root as folders, for mypy and editors."""
    root = ROOT / ".ide" / "rowseed"
    root.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "vllm_omni"):
        link = root / name
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", name), target_is_directory=True)


def make(environment: Path, wanted: str, install: "Callable[[], None]", *, with_pip: bool = True) -> None:
    """Make an environment, unless it is stamped with what is wanted."""
    stamp = environment / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    start = time.monotonic()
    print(f"Setting up {environment.name} (some minutes the first time) ...", flush=True)
    if environment.exists():
        if not stamp.exists():
            sys.exit(f"{environment} was not made by this script: remove it, then run make again")
        shutil.rmtree(environment)
    environment.mkdir()
    stamp.write_text("incomplete")
    venv.create(environment, with_pip=with_pip, symlinks=True)
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"Set-up failed: {' '.join(map(str, error.cmd))} returned {error.returncode}")
    stamp.write_text(wanted)
    print(f"Set up in {time.monotonic() - start:.0f} s", flush=True)


def make_beside(main: Path, name: str, wanted: str, requirements: str) -> None:
    other = ROOT / name
    make(other, wanted, lambda: install_before(requirements, other, main), with_pip=False)


def releases(package: str) -> "list[str]":
    """Those that requirements/ has a file for, beside what .venv has."""
    return sorted(path.stem[len(package) + 1 :] for path in (ROOT / "requirements").glob(f"{package}-*.txt"))


# Nothing above and in this signature may need a newer Python than those that shall read the sentence below.
def main(arguments: "Sequence[str]" = ()) -> None:
    if sys.version_info[:2] not in PYTHONS:
        accepted = ", ".join(map("{0[0]}.{0[1]}".format, PYTHONS))
        found = sys.version.split()[0]
        sys.exit(f"Python {accepted} are accepted, this is {found}; name one: make PYTHON=python3.11")
    parser = argparse.ArgumentParser(description="Make .venv")
    parser.add_argument("--omni", choices=releases("omni"), help="also make .venv-OMNI, with that vLLM-Omni")
    parser.add_argument(
        "--triton", choices=releases("triton"), help="also make .venv-triton-TRITON, with that Triton"
    )
    parser.add_argument("--environment", default=".venv", help="the environment's folder")
    options = parser.parse_args(arguments)
    omni, environment = options.omni, ROOT / options.environment
    device = find_device()
    wanted = fingerprint(device)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link_import_root()
        make(environment, wanted, lambda: install(environment, device))
        if omni and device != "cpu":
            print(f"vllm-omni {omni} is tested on a CPU only (ROWSEED_DEVICE=cpu): skipped", flush=True)
        elif omni:
            make_beside(environment, f".venv-{omni}", wanted, f"omni-{omni}.txt")
        if options.triton:
            name = f"triton-{options.triton}"
            make_beside(environment, f".venv-{name}", wanted, f"{name}.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
