"""What was sampled, refused and flagged: counts a process, a log line a minute, vLLM's Prometheus endpoint.

Rows are sampled in worker processes, the endpoint is the API server's. With ``PROMETHEUS_MULTIPROC_DIR``
(vLLM sets it for two or more API servers) prometheus_client carries the counters across. Without it, each
process writes one small JSON file (``rowseed-<pid>.json``, at most once a second and at exit) into the folder
``ROWSEED_STATS_DIR``, which the first process makes if nobody named one; a collector in the API server adds
the files up. A forked process starts at nothing; one that is killed loses its last second.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from rowseed.kernels.philox import SCHEME

logger = logging.getLogger("vllm.rowseed")

LOG_EVERY_S = 60.0
WRITE_EVERY_S = 1.0
STATS_DIR = "ROWSEED_STATS_DIR"

ROWS = "rowseed_rows", "Rows sampled, one per request and frame"
REFUSED = "rowseed_refused_requests", "Requests refused for a bad seed or parameter"
FLAGGED = "rowseed_flagged_rows", "Rows whose logits or parameters were flagged"

_started = time.time()


class Counters:
    """Counts of one process. Rows are counted once per frame, whatever their number of codebooks."""

    def __init__(self) -> None:
        self.seeded = 0
        self.unseeded = 0
        self.refused = 0
        self.flagged: dict[str, int] = {}
        self._logged = (time.monotonic(), self.snapshot())
        self._lock = threading.Lock()
        self._writer: threading.Timer | None = None
        self._at_exit: Finalize | None = None
        self._made_folder = False
        self._prometheus = _prometheus_counters()

    def count_rows(self, seeded: int, unseeded: int) -> None:
        """Rows handed to the sampler for one frame."""
        self.seeded += seeded
        self.unseeded += unseeded
        if self._prometheus is not None:
            rows = self._prometheus["rows"]
            if seeded:
                rows.labels(kind="seeded").inc(seeded)
            if unseeded:
                rows.labels(kind="unseeded").inc(unseeded)
        self._log()
        self._write_soon()

    def count_refused(self) -> None:
        """One request whose seed or parameters were refused."""
        self.refused += 1
        if self._prometheus is not None:
            self._prometheus["refused"].inc()
        self._log()
        self._write_soon()

    def count_flagged(self, kind: str, rows: int = 1) -> None:
        """Rows that met something of ``kind``: nan, inf, dead, parameter (the sampler's status word)."""
        self.flagged[kind] = self.flagged.get(kind, 0) + rows
        if self._prometheus is not None:
            self._prometheus["flagged"].labels(kind=kind).inc(rows)
        self._write_soon()

    def snapshot(self) -> dict[str, Any]:
        """The counts as JSON-ready values."""
        return {
            "pid": os.getpid(),
            "rows": {"seeded": self.seeded, "unseeded": self.unseeded},
            "refused": self.refused,
            "flagged": dict(self.flagged),
        }

    def _log(self) -> None:
        then, before = self._logged
        now = time.monotonic()
        if now - then < LOG_EVERY_S:
            return
        counts = self.snapshot()
        self._logged = (now, counts)
        flagged = {
            kind: rows - before["flagged"].get(kind, 0)
            for kind, rows in counts["flagged"].items()
            if rows > before["flagged"].get(kind, 0)
        }
        logger.info(
            "rowseed: %d seeded and %d unseeded rows (flagged: %s), %d requests refused in the last %.0f s;"
            " %d and %d rows, %d refused since start",
            counts["rows"]["seeded"] - before["rows"]["seeded"],
            counts["rows"]["unseeded"] - before["rows"]["unseeded"],
            ", ".join(f"{rows} {kind}" for kind, rows in flagged.items()) or "none",
            counts["refused"] - before["refused"],
            now - then,
            counts["rows"]["seeded"],
            counts["rows"]["unseeded"],
            counts["refused"],
        )

    def _write_soon(self) -> None:
        directory = os.environ.get(STATS_DIR)
        if not directory or self._writer is not None:
            return
        with self._lock:
            if self._writer is None:
                self._writer = threading.Timer(WRITE_EVERY_S, self._write, args=(directory,))
                self._writer.daemon = True
                self._writer.start()
                if self._at_exit is not None:
                    self._at_exit.cancel()
                # Not atexit, which processes that multiprocessing forks do not run, and others inherit.
                self._at_exit = Finalize(None, self._write, args=(directory,), exitpriority=0)

    def _write(self, directory: str) -> None:
        self._writer = None
        path = Path(directory) / f"rowseed-{os.getpid()}.json"
        partial = path.with_suffix(".tmp")
        try:
            if not self._made_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._made_folder = True
            partial.write_text(json.dumps(self.snapshot()))
            partial.replace(path)
        except FileNotFoundError:
            return  # the process that made the folder has ended and taken it along
        except OSError as error:
            logger.warning("rowseed: cannot write %s: %s", path, error)


def share_between_processes() -> None:
    """Name a folder for the counts of this process and those that it will start, where none is named.

    It is removed when this process ends.
    """
    if STATS_DIR in os.environ or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="rowseed-")
    os.environ[STATS_DIR] = folder
    # After the last write, which is at priority 0, and in this process alone.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


class SharedCounts:
    """Prometheus collector of the counts of this process and of all that write into its folder."""

    def __init__(self) -> None:
        self._named: set[Path] = set()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

        counts = [counters().snapshot(), *self._others()]
        yield InfoMetricFamily("rowseed", "Recipe of the random numbers", value={"scheme": str(SCHEME)})
        rows = CounterMetricFamily(*ROWS, labels=["kind"])
        for kind in ("seeded", "unseeded"):
            rows.add_metric([kind], sum(count["rows"][kind] for count in counts))
        yield rows
        yield CounterMetricFamily(*REFUSED, value=sum(count["refused"] for count in counts))
        flagged = CounterMetricFamily(*FLAGGED, labels=["kind"])
        for kind in sorted({kind for count in counts for kind in count["flagged"]}):
            flagged.add_metric([kind], sum(count["flagged"].get(kind, 0) for count in counts))
        yield flagged

    def _others(self) -> Iterator[dict[str, Any]]:
        """Files of processes that ended stay, so that sums never fall; an earlier run's do not count."""
        for path in Path(os.environ.get(STATS_DIR, os.devnull)).glob("rowseed-*.json"):
            try:
                if path.stem != f"rowseed-{os.getpid()}" and path.stat().st_mtime >= _started:
                    yield _counts_in(path)
            except OSError:
                continue
            except Exception as error:  # whatever else is in that folder must not end the endpoint
                if path not in self._named:
                    logger.warning("rowseed: %s is not counted: %s: %s", path, type(error).__name__, error)
                    self._named.add(path)


def _counts_in(path: Path) -> dict[str, Any]:
    """``Counters.snapshot`` of another process; an error of some kind if the file holds anything else."""
    counts = json.loads(path.read_text("utf-8"))
    return {
        "rows": {kind: int(counts["rows"][kind]) for kind in ("seeded", "unseeded")},
        "refused": int(counts["refused"]),
        "flagged": {kind: int(rows) for kind, rows in counts["flagged"].items()},
    }


_exposed = False


def expose_to_prometheus() -> None:
    """Put everybody's counts on the endpoint of this process, the API server; once."""
    global _exposed
    if _exposed or "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError:
        return
    REGISTRY.register(SharedCounts())  # type: ignore[arg-type]
    _exposed = True


_registered: dict[str, Any] = {}


def _prometheus_counters() -> dict[str, Any] | None:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return None
    try:
        from prometheus_client import Counter
    except ModuleNotFoundError:
        return None
    if not _registered:
        _registered.update(
            rows=Counter(*ROWS, ["kind"]), refused=Counter(*REFUSED), flagged=Counter(*FLAGGED, ["kind"])
        )
    return _registered


_counters: Counters | None = None


def _forget_the_parents() -> None:
    global _counters
    _counters = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)


def counters() -> Counters:
    """This process's counters, made at first use (prometheus_client is imported then, not before)."""
    global _counters
    if _counters is None:
        _counters = Counters()
    return _counters
