"""Names the requests whose rows the sampler flagged, without waiting for the device."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rowseed.vllm_omni.metrics import counters

logger = logging.getLogger("vllm.rowseed")

KINDS = {1: "nan", 2: "inf", 4: "dead", 8: "parameter"}
"""Bits of the sampler's status word: NaN or +inf among the logits, nothing alive, a bad parameter."""

_RING = 4


class Once:
    """Whether a request is met for the first time; remembers only those that were asked about."""

    KEPT = 1024

    def __init__(self) -> None:
        self._met: set[str] = set()

    def first(self, request_id: str) -> bool:
        if request_id in self._met:
            return False
        if len(self._met) >= self.KEPT:
            self._met.clear()
        self._met.add(request_id)
        return True


class _Copy(NamedTuple):
    request_ids: list[str]
    status: torch.Tensor  # int32 [max_rows, codebooks], pinned
    copied: torch.cuda.Event


class FlaggedRows:
    """One log line a request, counters by kind.

    A frame's status words are copied to the host behind it, and read at a later frame, once they are there.
    """

    def __init__(self) -> None:
        self._pending: deque[_Copy] = deque()
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._once = Once()

    def push(self, request_ids: Sequence[str], status: torch.Tensor) -> None:
        """Look at a frame's status, int32 [at least len(request_ids), codebooks], now or once it has come."""
        rows = len(request_ids)
        if status.device.type == "cpu":
            self._report(request_ids, status[:rows].numpy())
            return
        self.poll()
        if len(self._pending) == _RING:
            self._pending[0].copied.synchronize()
            self.poll()
        host, copied = self._free.pop() if self._free else (None, None)
        if host is None or host.shape != status.shape or copied is None:
            host = torch.empty(status.shape, dtype=status.dtype, device="cpu", pin_memory=True)
            copied = torch.cuda.Event()
        host[:rows].copy_(status[:rows], non_blocking=True)
        copied.record()
        self._pending.append(_Copy(list(request_ids), host, copied))

    def poll(self) -> None:
        """Report the frames whose copies have arrived."""
        while self._pending and self._pending[0].copied.query():
            request_ids, host, copied = self._pending.popleft()
            self._report(request_ids, host[: len(request_ids)].numpy())
            self._free.append((host, copied))

    def _report(self, request_ids: Sequence[str], status: np.ndarray) -> None:
        if not status.any():
            return
        words = np.bitwise_or.reduce(status, axis=1)
        for row in np.flatnonzero(words):
            kinds = [kind for bit, kind in KINDS.items() if words[row] & bit]
            for kind in kinds:
                counters().count_flagged(kind)
            if self._once.first(request_ids[row]):
                logger.warning(
                    "rowseed: request %s met %s; its codes stay in range, other requests are not touched",
                    request_ids[row],
                    " and ".join(_WORDS[kind] for kind in kinds),
                )


_WORDS = {
    "nan": "NaN logits",
    "inf": "+inf logits",
    "dead": "logits with nothing to draw",
    "parameter": "a temperature or top_p out of range",
}


def look_at_flags(model: Any, request_ids: Sequence[str]) -> None:
    """After the MTP of one step: ``model.talker_mtp_status``, where the model has one."""
    status = getattr(model, "talker_mtp_status", None)
    if status is not None:
        model.talker_mtp_flagged_rows.push(request_ids, status)
