"""Reports about requests that end, come back or are interrupted, as short scripts for the state machines."""

import pytest
from lifecycle import ExtraArgs
from lifecycle_v1 import V1Lifecycle


@pytest.fixture(params=["V1", "V2"])
def machine(request):
    if request.param == "V1":
        machine = V1Lifecycle()
    else:
        from lifecycle_v2 import V2Lifecycle  # skips where there is no V2 runner

        machine = V2Lifecycle()
    machine.begin(graph=False, asynchronous=False)
    yield machine
    machine.teardown()


def packed_offsets(machine, steps, chunk=4):
    """Runs single steps; the offset of row 0 in each that drew codes."""
    offsets = []
    for _ in range(steps):
        machine.step(chunk=chunk, steps=1, paused=None)
        streams = machine.predictor().streams
        if streams is not None:
            offsets.append(streams[1, 1].item())
    return offsets


def seeded(seed):
    return ExtraArgs(tts_local_seed=seed)


def test_an_id_aborted_at_frame_5_starts_at_frame_0_when_it_is_new(machine):
    machine.admit(name="r1", prompt_len=3, args=seeded(1))
    assert packed_offsets(machine, 6) == [0, 1, 2, 3, 4]
    machine.finish_or_abort(index=0)
    machine.admit(name="r1", prompt_len=2, args=seeded(2))
    assert packed_offsets(machine, 4) == [0, 1, 2]
    assert machine.predictor().streams[1, 0] == 2


@pytest.mark.parametrize(("chunk", "rest"), [(4, [6, 7, 8]), (3, [7, 8])])
def test_a_request_preempted_at_frame_6_continues_its_stream(machine, chunk, rest):
    """Its 9 tokens are computed again in chunks of 4, 4, 1 or of 3, 3, 3.

    A chunk of several tokens draws no codes: that is the frame that vLLM-Omni loses. The offset skips it too.
    """
    machine.admit(name="r1", prompt_len=2, args=seeded(9))
    assert packed_offsets(machine, 7) == [0, 1, 2, 3, 4, 5]
    machine.preempt(index=0)
    assert packed_offsets(machine, 5, chunk) == rest
    assert machine.predictor().streams[1, 0] == 9
