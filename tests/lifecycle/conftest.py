"""The real runner classes, joined by the plugin."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.append(str(Path(__file__).parent / "support"))

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed")


@pytest.fixture(scope="session", autouse=True)
def joined():
    from rowseed.vllm_omni import plugin

    plugin.register()
