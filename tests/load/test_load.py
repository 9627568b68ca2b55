"""The short form of ``soak.py``: the real server, a few requests of every kind. The full one: `make soak`."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed")
sys.path.append(str(Path(__file__).parent))


@pytest.mark.engine
def test_a_server_keeps_its_promises_under_mixed_requests(tmp_path):
    from soak import soak

    report = soak(24, log=tmp_path / "server.log", limit_s=450, fresh=True)
    report.check()
    assert all(report.kinds.values()), report.kinds
