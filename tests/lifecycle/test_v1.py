"""The V1 runner's life, against each request alone, and two ways of counting frames that must not pass."""

import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from lifecycle import BOUNDED
from lifecycle_v1 import V1Lifecycle

from rowseed.vllm_omni.worker import code0_v1, runner_v1

TestV1Lifecycle = V1Lifecycle.TestCase
TestV1Lifecycle.settings = BOUNDED


def counted_by_calls():
    """Offsets as a generator keeps them: how often the request was drawn for."""
    calls_of = weakref.WeakKeyDictionary()

    def frames(input_batch, request_ids):
        calls = calls_of.setdefault(input_batch, {})
        for name in request_ids:
            calls[name] = calls.get(name, -1) + 1
        return np.array([calls[name] for name in request_ids])

    return frames


def read_at_the_mtp_row(input_batch, request_ids):
    """The counts of the first rows of the batch, prefill rows included."""
    rows = slice(len(request_ids))
    return (input_batch.num_computed_tokens_cpu - input_batch.num_prompt_tokens)[rows].astype(np.int64)


BROKEN = {"calls": counted_by_calls, "rows": lambda: read_at_the_mtp_row}


@pytest.mark.parametrize("make_frames", BROKEN.values(), ids=BROKEN)
def test_the_machine_rejects(make_frames):
    with mock.patch.object(runner_v1, "_scheduled_frames", make_frames()), pytest.raises(AssertionError):
        run_state_machine_as_test(
            V1Lifecycle, settings=settings(BOUNDED, phases=(Phase.generate,), report_multiple_bugs=False)
        )


def test_the_machine_rejects_code_0_at_the_residual_codes_position():
    """The frame that the step reads, not the one that its token begins: right for neither, off by a step."""

    def frames(runner, rows):
        batch = runner.input_batch
        return (batch.num_computed_tokens_cpu - batch.num_prompt_tokens)[:rows].astype(np.int64)

    with mock.patch.object(code0_v1, "_next_frames", frames), pytest.raises(AssertionError):
        run_state_machine_as_test(
            V1Lifecycle, settings=settings(BOUNDED, phases=(Phase.generate,), report_multiple_bugs=False)
        )
