"""Status words that are still on their way to the host."""

import torch

from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.worker.flagged_rows import FlaggedRows, _Copy


class Event:
    def __init__(self, there):
        self.there = there

    def query(self):
        return self.there


def frame(request_ids, words, there):
    status = torch.zeros(4, 16, dtype=torch.int32)
    status[: len(words), 7] = torch.tensor(words, dtype=torch.int32)
    return _Copy(request_ids, status, Event(there))


def test_copies_are_reported_once_they_have_come_and_in_order(log):
    rows, before = FlaggedRows(), counters().flagged.get("nan", 0)
    # The last line of the second frame is another frame's, and nobody's.
    first, second = frame(["a"], [1], False), frame(["a", "b"], [1, 0, 4], True)
    rows._pending.extend((first, second))
    rows.poll()
    assert not log and len(rows._pending) == 2 and not rows._free
    first.copied.there = True
    rows.poll()
    assert [record.getMessage() for record in log] == [
        "rowseed: request a met NaN logits; its codes stay in range, other requests are not touched"
    ]
    assert counters().flagged["nan"] == before + 2
    assert not rows._pending and len(rows._free) == 2
