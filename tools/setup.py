"""Make .venv: vLLM, vLLM-Omni and this project, for the CPU or for an NVIDIA GPU.

Standard library only, Python 3.10 or newer. What was installed is stamped with a hash of everything it
was made from, so that a second run does nothing, and a run after a failed one starts afresh.
Set ROWSEED_DEVICE to `cpu` or `nvidia` to choose the device yourself.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "rowseed.stamp"
PYTHON = VENV / "bin" / "python"
DEVICES = ("cpu", "nvidia")
# Each of these is there when the kernel's NVIDIA driver is (/dev/dxg: inside WSL).
NVIDIA_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")

TORCHVISION_OPERATORS = """

# Added by rowseed's tools/setup.py.
if not _has_ops():
    _operators = torch.library.Library("torchvision", "DEF")
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


def pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "install", "-qq", *arguments], cwd=ROOT, check=True)


def install(device: str) -> None:
    if device == "cpu":
        pip("-r", "requirements/cpu.txt", "-r", "requirements/dev.txt")
        pip("--no-deps", "-r", "requirements/cpu-no-deps.txt")
        mend_cuda_wheels()
    else:
        pip("-r", "requirements/nvidia.txt", "-r", "requirements/dev.txt")
    pip("--no-deps", "--no-build-isolation", "--editable", ".")


def mend_cuda_wheels() -> None:
    """Make torchaudio and torchvision importable beside a torch without CUDA.

    Both are published with extensions that are linked to CUDA only, and vLLM-Omni imports both, though
    speech serving uses nothing of the extensions.
    - torchaudio raises if its extension is there but cannot be loaded, and does without if it is absent.
    - torchvision does without an extension that cannot be loaded, but then describes two operators that
      only the extension declares, and raises. So declare them where it has noticed that it has none.
    """
    probe = "import sysconfig, torch; print(sysconfig.get_path('purelib')); print(torch.version.cuda)"
    answer = subprocess.run([PYTHON, "-c", probe], check=True, capture_output=True, text=True).stdout.split()
    packages, cuda = Path(answer[0]), answer[1]
    if cuda == "None":
        for library in packages.glob("torchaudio/lib/*.so"):
            library.unlink()
    with open(packages / "torchvision" / "extension.py", "a") as extension:
        extension.write(TORCHVISION_OPERATORS)


def link_import_root() -> None:
    """.ide/rowseed/{kernels,vllm_omni}: the import root as folders, for mypy and editors."""
    root = ROOT / ".ide" / "rowseed"
    root.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "vllm_omni"):
        link = root / name
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", name), target_is_directory=True)


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - the one file that an older Python may meet
        sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
    device = find_device()
    wanted = fingerprint(device)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link_import_root()
        if STAMP.exists() and STAMP.read_text() == wanted:
            return
        start = time.monotonic()
        print(f"Setting up .venv for {device} (some minutes the first time) ...", flush=True)
        if VENV.exists():
            if not STAMP.exists():
                sys.exit(f"{VENV} was not made by this script: remove it, then run make again")
            shutil.rmtree(VENV)
        VENV.mkdir()
        STAMP.write_text("incomplete")
        venv.create(VENV, with_pip=True, symlinks=True)
        try:
            install(device)
        except subprocess.CalledProcessError as error:
            sys.exit(f"Set-up failed: {' '.join(map(str, error.cmd))} returned {error.returncode}")
        STAMP.write_text(wanted)
        print(f"Set up in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
