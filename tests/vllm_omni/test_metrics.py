"""Counters of a process: what is counted, logged a minute, and written for other processes to read."""

import json
import os

import prometheus_client
import pytest

from rowseed.vllm_omni import metrics


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.delenv("ROWSEED_STATS_DIR", raising=False)
    return metrics.Counters()


def exported(name, **labels):
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


def test_counts_and_prometheus(fresh):
    before = {kind: exported("rowseed_rows_total", kind=kind) for kind in ("seeded", "unseeded")}
    refused, nan = (
        exported("rowseed_refused_requests_total"),
        exported("rowseed_flagged_rows_total", kind="nan"),
    )
    fresh.count_rows(3, 0)
    fresh.count_rows(1, 2)
    fresh.count_refused()
    fresh.count_flagged("nan", 2)
    assert fresh.snapshot() == {
        "pid": os.getpid(),
        "rows": {"seeded": 4, "unseeded": 2},
        "refused": 1,
        "flagged": {"nan": 2},
    }
    assert exported("rowseed_rows_total", kind="seeded") == before["seeded"] + 4
    assert exported("rowseed_rows_total", kind="unseeded") == before["unseeded"] + 2
    assert exported("rowseed_refused_requests_total") == refused + 1
    assert exported("rowseed_flagged_rows_total", kind="nan") == nan + 2


def test_a_line_a_minute_and_none_without_rows(fresh, monkeypatch, log):
    now = [metrics.time.monotonic()]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    fresh.count_rows(1, 1)
    now[0] += metrics.LOG_EVERY_S - 1
    fresh.count_rows(1, 0)
    assert not log
    now[0] += 2
    fresh.count_rows(1, 0)
    (line,) = [record.getMessage() for record in log]
    assert "3 seeded and 1 unseeded rows" in line
    now[0] += metrics.LOG_EVERY_S
    fresh.count_rows(0, 5)
    assert "0 seeded and 5 unseeded" in log[1].getMessage()


def test_the_stats_file_holds_the_last_counts(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("ROWSEED_STATS_DIR", str(tmp_path / "stats"))
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.01)
    fresh.count_rows(2, 0)
    writer = fresh._writer
    fresh.count_rows(0, 1)
    writer.join(timeout=10)
    (path,) = (tmp_path / "stats").iterdir()
    assert path.name == f"rowseed-{os.getpid()}.json"
    assert json.loads(path.read_text()) == fresh.snapshot()
    fresh.count_rows(1, 0)
    fresh._writer.join(timeout=10)
    assert json.loads(path.read_text())["rows"]["seeded"] == 3


def test_a_folder_that_cannot_be_written_is_a_warning(fresh, monkeypatch, tmp_path, log):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROWSEED_STATS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.0)
    fresh.count_rows(1, 0)
    if fresh._writer is not None:
        fresh._writer.join(timeout=10)
    assert any("cannot write" in record.getMessage() for record in log)
