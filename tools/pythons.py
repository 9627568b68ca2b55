"""Set up every Python that is accepted, each in its own environment, and try it: golden rows, one request.

Each is `python3.N` on the path, or one of pyenv's. Prints the seconds that its set-up took; exits with 1 if
one is missing or fails.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))  # PYTHONSAFEPATH leaves this folder out

from setup import PYTHONS, python_of  # noqa: E402

REQUEST = '{"text": "One seeded sentence.", "language": "English", "seed": 7}\n'


def find(name: str) -> str | None:
    """An interpreter of this version that starts, or None. pyenv's stand-ins on the path may not."""
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for python in (shutil.which(f"python{name}"), *sorted(versions.glob(f"{name}.*/bin/python{name}"))):
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return str(python)
    return None


def attempt(name: str) -> str:
    """What came out, as a line; raises CalledProcessError where a command fails."""
    python = find(name)
    if python is None:
        return f"Python {name}: there is no python{name} on the path or in pyenv"
    environment = ROOT / f".venv-{name}"
    start = time.monotonic()
    subprocess.run([python, "tools/setup.py", "--environment", environment.name], cwd=ROOT, check=True)
    seconds = time.monotonic() - start
    inside = str(python_of(environment))
    subprocess.run([inside, "-m", "pytest", "-q", "tests/kernels", "-k", "golden"], cwd=ROOT, check=True)
    out = ROOT / "out" / f"python-{name}"
    out.mkdir(parents=True, exist_ok=True)
    requests = out.with_suffix(".jsonl")
    requests.write_text(REQUEST)
    serve = [inside, "examples/serve.py", "--requests", str(requests), "--out", str(out)]
    subprocess.run(serve, cwd=ROOT, check=True)
    return f"Python {name}: set up in {seconds:.0f} s, golden rows and a served request passed"


def main() -> int:
    os.environ["PYTHONSAFEPATH"] = "1"
    lines = []
    for major, minor in PYTHONS:
        name = f"{major}.{minor}"
        try:
            lines.append(attempt(name))
        except subprocess.CalledProcessError as error:
            lines.append(f"Python {name}: {' '.join(map(str, error.cmd))} returned {error.returncode}")
    print("\n".join(lines))
    return 0 if all(line.endswith("passed") for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
