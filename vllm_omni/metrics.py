"""What this process sampled, refused and flagged: plain counters, a log line a minute, Prometheus counters.

``ROWSEED_STATS_DIR``: a directory that gets one small JSON file per process (``rowseed-<pid>.json``), written
at most once a second and at exit, so that a driver can read what its worker processes did.
"""

import atexit
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.rowseed")

LOG_EVERY_S = 60.0
WRITE_EVERY_S = 1.0


class Counters:
    """Counts of one process. Rows are counted once per frame, whatever their number of codebooks."""

    def __init__(self) -> None:
        self.seeded = 0
        self.unseeded = 0
        self.refused = 0
        self.flagged: dict[str, int] = {}
        self._logged = (time.monotonic(), 0, 0)
        self._lock = threading.Lock()
        self._writer: threading.Timer | None = None
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
        self._log_rows()
        self._write_soon()

    def count_refused(self) -> None:
        """One request whose seed or parameters were refused."""
        self.refused += 1
        if self._prometheus is not None:
            self._prometheus["refused"].inc()
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

    def _log_rows(self) -> None:
        then, seeded, unseeded = self._logged
        now = time.monotonic()
        if now - then < LOG_EVERY_S:
            return
        self._logged = (now, self.seeded, self.unseeded)
        logger.info(
            "rowseed: %d seeded and %d unseeded rows in the last %.0f s (%d and %d since start)",
            self.seeded - seeded,
            self.unseeded - unseeded,
            now - then,
            self.seeded,
            self.unseeded,
        )

    def _write_soon(self) -> None:
        directory = os.environ.get("ROWSEED_STATS_DIR")
        if not directory or self._writer is not None:
            return
        with self._lock:
            if self._writer is None:
                self._writer = threading.Timer(WRITE_EVERY_S, self._write, args=(directory,))
                self._writer.daemon = True
                self._writer.start()
                atexit.unregister(self._write)
                atexit.register(self._write, directory)

    def _write(self, directory: str) -> None:
        self._writer = None
        path = Path(directory) / f"rowseed-{os.getpid()}.json"
        partial = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.snapshot()))
            partial.replace(path)
        except OSError as error:
            logger.warning("rowseed: cannot write %s: %s", path, error)


_registered: dict[str, Any] = {}


def _prometheus_counters() -> dict[str, Any] | None:
    try:
        from prometheus_client import Counter
    except ModuleNotFoundError:
        return None
    if not _registered:
        _registered.update(
            rows=Counter("rowseed_rows", "Rows sampled, one per request and frame", ["kind"]),
            refused=Counter("rowseed_refused_requests", "Requests refused for a bad seed or parameter"),
            flagged=Counter("rowseed_flagged_rows", "Rows whose logits or parameters were flagged", ["kind"]),
        )
    return _registered


_counters: Counters | None = None


def counters() -> Counters:
    """This process's counters, made at first use (prometheus_client is imported then, not before)."""
    global _counters
    if _counters is None:
        _counters = Counters()
    return _counters
