"""The V2 runner's life, against each request alone, and an order of rows that must not pass."""

from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from lifecycle import BOUNDED
from lifecycle_v2 import V2Lifecycle

from rowseed.vllm_omni.model_executor.models.qwen3_tts import talker
from rowseed.vllm_omni.worker import code0_v2

TestV2Lifecycle = V2Lifecycle.TestCase
TestV2Lifecycle.settings = BOUNDED


def test_the_machine_rejects_rows_packed_in_another_order():
    pack = talker.pack_rows

    def reversed_rows(model, requests, frames, defaults, **kwargs):
        return pack(model, requests[::-1], frames[::-1], defaults, **kwargs)

    with mock.patch.object(talker, "pack_rows", reversed_rows), pytest.raises(AssertionError):
        run_state_machine_as_test(
            V2Lifecycle, settings=settings(BOUNDED, phases=(Phase.generate,), report_multiple_bugs=False)
        )


def test_the_machine_rejects_code_0_at_the_position_that_a_row_read():
    draw = code0_v2.V2Draw.__call__

    def late(self, logits, expanded, slots, positions, *rest):
        return draw(self, logits, expanded, slots, positions - 1, *rest)

    with mock.patch.object(code0_v2.V2Draw, "__call__", late), pytest.raises(AssertionError):
        run_state_machine_as_test(
            V2Lifecycle, settings=settings(BOUNDED, phases=(Phase.generate,), report_multiple_bugs=False)
        )
