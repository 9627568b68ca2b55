"""Counters of a process: what is counted, logged a minute, and written for other processes to read."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time

import prometheus_client
import pytest

from rowseed.vllm_omni import metrics


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.delenv("ROWSEED_STATS_DIR", raising=False)
    counters = metrics.Counters()
    yield counters
    if counters._at_exit is not None:
        counters._at_exit.cancel()


def test_counts(fresh):
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


def counts_of(pid, seeded, refused=0, **flagged):
    return {"pid": pid, "rows": {"seeded": seeded, "unseeded": 1}, "refused": refused, "flagged": flagged}


def test_one_api_server_adds_up_the_files_of_the_others(fresh, monkeypatch, tmp_path):
    """Its own counts, two workers', one of which has ended; not those of an earlier run."""
    monkeypatch.setenv("ROWSEED_STATS_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "_counters", fresh)
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 3600)
    fresh.count_refused()
    others = counts_of(1, 5, nan=2), counts_of(2, 7, nan=1, inf=4), counts_of(3, 9)
    for counts in (*others, counts_of(os.getpid(), 100)):
        (tmp_path / f"rowseed-{counts['pid']}.json").write_text(json.dumps(counts))
    os.utime(tmp_path / "rowseed-3.json", (1, 1))
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.SharedCounts())
    value = registry.get_sample_value
    assert value("rowseed_rows_total", {"kind": "seeded"}) == 12
    assert value("rowseed_rows_total", {"kind": "unseeded"}) == 2
    assert value("rowseed_refused_requests_total") == 1
    assert value("rowseed_flagged_rows_total", {"kind": "nan"}) == 3
    assert value("rowseed_flagged_rows_total", {"kind": "inf"}) == 4
    assert value("rowseed_info", {"scheme": "1"}) == 1
    fresh._writer.cancel()


def test_several_api_servers_go_through_prometheus_itself(tmp_path):
    """PROMETHEUS_MULTIPROC_DIR: what a worker counts, another process exports."""
    worker = (
        "from rowseed.vllm_omni.metrics import *; share_between_processes(); expose_to_prometheus();"
        "counters().count_rows(3, 1); counters().count_flagged('nan');"
        "import os; assert STATS_DIR not in os.environ"
    )
    server = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess;"
        "r = CollectorRegistry(); multiprocess.MultiProcessCollector(r); print(generate_latest(r).decode())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    environment.pop("ROWSEED_STATS_DIR", None)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", worker], env=environment, check=True)
    out = subprocess.run(
        [sys.executable, "-c", server], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert 'rowseed_rows_total{kind="seeded"} 6.0' in out
    assert 'rowseed_rows_total{kind="unseeded"} 2.0' in out
    assert 'rowseed_flagged_rows_total{kind="nan"} 2.0' in out


def test_the_folder_is_the_first_processs_and_goes_with_it(tmp_path):
    script = (
        "import os, subprocess, sys; from rowseed.vllm_omni.metrics import *; share_between_processes();"
        "folder = os.environ[STATS_DIR]; print(folder);"
        "child = 'from rowseed.vllm_omni.metrics import *; share_between_processes();'"
        "'counters().count_rows(1, 0)';"
        "subprocess.run([sys.executable, '-c', child], check=True); print(len(os.listdir(folder)))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("ROWSEED_STATS_DIR", None)
    folder, files = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert folder.startswith(str(tmp_path)) and files == "1"
    assert list(tmp_path.iterdir()) == []


def test_a_line_a_minute_and_none_without_rows(fresh, monkeypatch, log):
    now = [metrics.time.monotonic()]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    fresh.count_rows(1, 1)
    fresh.count_flagged("nan", 2)
    fresh.count_refused()
    now[0] += metrics.LOG_EVERY_S - 1
    fresh.count_rows(1, 0)
    assert not log
    now[0] += 2
    fresh.count_rows(1, 0)
    (line,) = [record.getMessage() for record in log]
    assert "3 seeded and 1 unseeded rows (flagged: 2 nan), 1 requests refused" in line
    now[0] += metrics.LOG_EVERY_S
    fresh.count_rows(0, 5)
    assert "0 seeded and 5 unseeded rows (flagged: none), 0 requests refused" in log[1].getMessage()


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


def test_a_folder_that_its_owner_removed_stays_away(fresh, monkeypatch, tmp_path, log):
    """A worker that ends after the process that made the folder must not make it again."""
    folder = tmp_path / "stats"
    fresh.count_rows(1, 0)
    fresh._write(str(folder))
    assert len(list(folder.iterdir())) == 1
    shutil.rmtree(folder)
    fresh._write(str(folder))
    assert not folder.exists()
    assert not log


def test_a_folder_that_cannot_be_written_is_a_warning(fresh, monkeypatch, tmp_path, log):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROWSEED_STATS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.0)
    fresh.count_rows(1, 0)
    deadline = time.monotonic() + 10
    while not log and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any("cannot write" in record.getMessage() for record in log)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("end", ["pool", "exit", "later"])
def test_forked_processes_count_their_own(end, tmp_path):
    """4 rows here, then 10 in each of two children: 24 in all, as the parent's endpoint has them.

    The children are multiprocessing's, which end without atexit; those of os.fork, which inherit the
    parent's; and one that is gone without any end after its last second.
    """
    script = f"""
        import multiprocessing, os, sys, time
        import prometheus_client
        from rowseed.vllm_omni import metrics
        from rowseed.vllm_omni.metrics import counters

        def child(end):
            counters().count_rows(9, 0)
            counters().count_rows(0, 1)
            counters().count_refused()
            counters().count_flagged("nan", 2)
            if end == "later":
                time.sleep(metrics.WRITE_EVERY_S + 1)

        counters().count_rows(3, 1)
        counters()._writer.join()  # the writer's thread is not in the children
        counters().count_rows(0, 0)
        if {end!r} == "pool":
            forks = [multiprocessing.get_context("fork").Process(target=child, args=("",)) for _ in range(2)]
            for process in forks:
                process.start()
            for process in forks:
                process.join()
        else:
            forks = []
            for _ in range(2):
                forks.append(os.fork())
                if forks[-1] == 0:
                    child({end!r})
                    os._exit(0) if {end!r} == "later" else sys.exit()
            for pid in forks:
                os.waitpid(pid, 0)
        registry = prometheus_client.CollectorRegistry()
        registry.register(metrics.SharedCounts())
        kinds = dict(kind="seeded"), dict(kind="unseeded")
        rows = [registry.get_sample_value("rowseed_rows_total", kind) for kind in kinds]
        refused = registry.get_sample_value("rowseed_refused_requests_total")
        flagged = registry.get_sample_value("rowseed_flagged_rows_total", dict(kind="nan"))
        print(*rows, refused, flagged, counters().snapshot()["rows"])
    """
    environment = {**os.environ, "ROWSEED_STATS_DIR": str(tmp_path)}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out == "21 3 2 4 {'seeded': 3, 'unseeded': 1}\n"
    files = [json.loads(path.read_text()) for path in tmp_path.glob("rowseed-*.json")]
    assert sorted(file["rows"]["seeded"] for file in files) == [3, 9, 9]


STRANGE_FILES = {
    "empty": b"",
    "truncated": json.dumps(counts_of(1, 5)).encode()[:-9],
    "a list": b"[1, 2]",
    "a number": b"7",
    "of an older version": b'{"pid": 1, "seeded": 5, "unseeded": 1}',
    "without a part": b'{"pid": 1, "rows": {"seeded": 5}, "refused": 0, "flagged": {}}',
    "of other types": b'{"pid": 1, "rows": {"seeded": 5, "unseeded": []}, "refused": 0, "flagged": {}}',
    "not finite": b'{"pid": 1, "rows": {"seeded": 1e999, "unseeded": 1}, "refused": 0, "flagged": {}}',
    "flagged, a list": b'{"pid": 1, "rows": {"seeded": 5, "unseeded": 1}, "refused": 0, "flagged": ["nan"]}',
    "not UTF-8": json.dumps(counts_of(1, 5)).encode("utf-16"),
}


@pytest.mark.parametrize("strange", STRANGE_FILES.values(), ids=STRANGE_FILES)
def test_a_strange_stats_file_is_named_once_and_the_rest_is_counted(
    strange, fresh, monkeypatch, tmp_path, log
):
    monkeypatch.setenv("ROWSEED_STATS_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "_counters", fresh)
    (tmp_path / "rowseed-1.json").write_bytes(strange)
    (tmp_path / "rowseed-2.json").write_text(json.dumps(counts_of(2, 7, refused=3, nan=1)))
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.SharedCounts())
    for _ in range(2):
        assert registry.get_sample_value("rowseed_rows_total", {"kind": "seeded"}) == 7
        assert registry.get_sample_value("rowseed_refused_requests_total") == 3
        assert registry.get_sample_value("rowseed_flagged_rows_total", {"kind": "nan"}) == 1
    (line,) = [record.getMessage() for record in log]
    assert "rowseed-1.json is not counted" in line
