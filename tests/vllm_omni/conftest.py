"""The real vLLM-Omni classes, joined by the plugin once for the whole session (its import takes seconds)."""

import logging
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


@pytest.fixture
def log():
    """Records of the project's logger; vLLM's logging configuration decides what reaches caplog."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.rowseed")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)
