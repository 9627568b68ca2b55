"""The V1 runner's contract, on the real OmniGPUModelRunner: seeds, generators, row streams, parameters."""

import itertools

import numpy as np
import pytest
import torch
from omni_fakes import (
    GROUPS,
    MAX_ROWS,
    GeneratorModel,
    GraphWrapper,
    Model,
    RowStreamModel,
    SeedModel,
    UpstreamGeneratorModel,
    buffers,
    forward,
    make_runner,
    platform_graph_wrapper,
    request,
)
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from rowseed.kernels import streams
from rowseed.kernels.streams import INACTIVE, SEEDED
from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.worker.row_packing import warm_up_sizes
from rowseed.vllm_omni.worker.runner_v1 import join_talker_mtp_forward

GENERATOR_MODELS = [GeneratorModel, UpstreamGeneratorModel]
by_name = pytest.mark.parametrize("make_model", GENERATOR_MODELS, ids=lambda model: model.__name__)


def seeds(*values):
    names = "abcdefgh"
    return {names[i]: None if seed is None else {"tts_local_seed": seed} for i, seed in enumerate(values)}


def generators(call):
    return call.kwargs.get("generator"), call.kwargs.get("generators")


# Where the seed comes from


@pytest.mark.parametrize("model", [SeedModel, GeneratorModel, RowStreamModel], ids=lambda m: m.__name__)
def test_a_bare_sampling_seed_never_counts(model):
    runner = make_runner(model(), {"a": None}, frames=[0])
    runner.requests["a"] = request(None, seed=42)
    forward(runner)
    (call,) = runner.model.calls
    assert generators(call) == (None, None)
    if model is RowStreamModel:
        assert call.kwargs["streams"][1, 2] == 0


def test_without_a_declared_key_no_seed_is_read():
    model = Model()
    model.talker_mtp_accepts_generators = True
    runner = make_runner(model, seeds(42, 43))
    forward(runner)
    (call,) = model.calls
    assert call.rows == 2
    assert generators(call) == (None, None)


def test_the_declared_key_is_the_one_that_is_read():
    model = GeneratorModel()
    model.talker_mtp_seed_extra_arg = "my_seed"
    runner = make_runner(model, {"a": {"my_seed": 5}, "b": {"tts_local_seed": 6}})
    forward(runner)
    _, (first, second) = generators(model.calls[0])
    assert first.initial_seed() == 5
    assert second is None


def test_a_class_of_vllm_omni_that_is_silent_keeps_its_seed():
    class FishSpeech(Model):
        pass

    FishSpeech.__module__ = "vllm_omni.model_executor.models.fish_speech.fish_speech_slow_ar"
    runner = make_runner(FishSpeech(), seeds(7))
    forward(runner)
    assert FishSpeech.talker_mtp_seed_extra_arg == "tts_local_seed"
    assert generators(runner.model.calls[0])[0].initial_seed() == 7


def test_any_class_with_an_mtp_keeps_its_seed_once_the_runner_has_initialised_it():
    class Elsewhere(Model):
        pass

    class OptedOut(Model):
        talker_mtp_seed_extra_arg = None

    for model_class, expected in ((Elsewhere, "tts_local_seed"), (OptedOut, None)):
        runner = make_runner(model_class(), {})
        runner._init_talker_mtp()
        assert model_class.talker_mtp_seed_extra_arg == expected
    assert not hasattr(Model, "talker_mtp_seed_extra_arg")


# Generators


@by_name
def test_generators_one_batched_call_with_none_for_unseeded_rows(make_model):
    runner = make_runner(make_model(), seeds(11, None, 22))
    codes, embeds = forward(runner)
    (call,) = runner.model.calls
    assert call.rows == 3
    one, several = generators(call)
    assert one is None
    assert [g and g.initial_seed() for g in several] == [11, None, 22]
    assert codes["c"].tolist() == [[42] * GROUPS]
    assert torch.equal(embeds[:3], runner.talker_mtp_inputs_embeds.gpu[:3] + 1)


@by_name
def test_generators_a_batch_of_one_takes_a_single_generator(make_model):
    runner = make_runner(make_model(), seeds(11))
    forward(runner)
    one, several = generators(runner.model.calls[0])
    assert one.initial_seed() == 11
    assert several is None


@by_name
def test_generators_are_not_passed_when_no_row_is_seeded(make_model):
    runner = make_runner(make_model(), seeds(None, None))
    forward(runner)
    (call,) = runner.model.calls
    assert call.rows == 2
    assert generators(call) == (None, None)


@by_name
def test_generators_live_as_long_as_their_request(make_model):
    runner = make_runner(make_model(), seeds(11, 22))
    forward(runner)
    forward(runner, ["b", "a"])
    forward(runner, ["a"])
    first, second, third = (generators(call) for call in runner.model.calls)
    assert second[1] == [first[1][1], first[1][0]]
    assert third[0] is first[1][0]
    del runner.requests["b"]
    forward(runner, ["a"])
    assert list(runner._talker_mtp_generators) == ["a"]
    runner.requests["b"] = request({"tts_local_seed": 22})
    forward(runner, ["a", "b"])
    assert generators(runner.model.calls[-1])[1][1] is not first[1][1]


@by_name
def test_seeded_generators_leave_a_graph_that_would_not_see_them(make_model, monkeypatch):
    runner = make_runner(make_model(), seeds(11, None), bucket=4)
    runner.talker_mtp = GraphWrapper(runner.model.talker_mtp)
    with platform_graph_wrapper(monkeypatch):
        forward(runner)
        assert runner.talker_mtp.calls == 0
        assert runner.model.calls[0].rows == len(generators(runner.model.calls[0])[1]) == 2
        runner.requests["a"] = request(None)
        forward(runner)
    assert runner.talker_mtp.calls == 1
    assert runner.model.calls[1].rows == 4


@by_name
@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1])
def test_generators_get_the_seed_as_it_was_given(make_model, seed):
    runner = make_runner(make_model(), seeds(seed))
    forward(runner)
    expected = torch.Generator().manual_seed(seed).initial_seed()
    assert generators(runner.model.calls[0])[0].initial_seed() == expected


def test_where_vllm_omnis_method_is_right_it_runs_on_the_runner_itself(monkeypatch):
    seen = []
    upstream = OmniGPUModelRunner._talker_mtp_forward.__wrapped__
    joined = join_talker_mtp_forward(lambda self, *args: seen.append(self) or upstream(self, *args))
    monkeypatch.setattr(OmniGPUModelRunner, "_talker_mtp_forward", joined)
    runner = make_runner(UpstreamGeneratorModel(), seeds(1, None))
    forward(runner)
    runner.requests["a"] = request({"tts_local_seed": "abc"})
    forward(runner)
    assert seen[0] is runner
    assert seen[1] is not runner


# Row by row


def test_one_generator_leaves_a_graph_that_would_not_see_it(monkeypatch):
    runner = make_runner(SeedModel(), seeds(11, 22), bucket=4)
    runner.talker_mtp = GraphWrapper(runner.model.talker_mtp)
    with platform_graph_wrapper(monkeypatch):
        forward(runner)
        assert runner.talker_mtp.calls == 0
        assert [call.rows for call in runner.model.calls] == [1, 1]
        assert [generators(call)[0].initial_seed() for call in runner.model.calls] == [11, 22]
        runner.requests = {"a": request(None), "b": request(None)}
        forward(runner)
    assert runner.talker_mtp.calls == 1


def test_a_model_that_takes_one_generator_goes_row_by_row():
    runner = make_runner(SeedModel(), seeds(11, None, 22))
    before = buffers(runner)
    codes, embeds = forward(runner, start_offsets=[4, 2, 7])
    calls = runner.model.calls
    assert [call.rows for call in calls] == [1, 1, 1]
    assert [g and g.initial_seed() for g, _ in map(generators, calls)] == [11, None, 22]
    assert all(several is None for _, several in map(generators, calls))
    for row, call in enumerate(calls):
        assert all(map(torch.equal, call.inputs, [buffer[row : row + 1] for buffer in before]))
    assert all(map(torch.equal, buffers(runner), before))
    assert [codes[name].tolist() for name in "abc"] == [[[40 + i] * GROUPS] for i in range(3)]
    assert torch.equal(embeds[[4, 2, 7]], before[1][:3] + 1)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_row_by_row_puts_the_buffers_back_after_an_error(call):
    runner = make_runner(SeedModel(fail_at_call=call), seeds(11, None, 22))
    before = buffers(runner)
    with pytest.raises(RuntimeError, match="the MTP failed"):
        forward(runner)
    assert len(runner.model.calls) == call
    assert all(map(torch.equal, buffers(runner), before))


def test_an_unseeded_batch_stays_batched():
    runner = make_runner(SeedModel(), seeds(None, None, None))
    forward(runner)
    assert [call.rows for call in runner.model.calls] == [3]


# Sub-talker parameters


@pytest.mark.parametrize("model", [SeedModel, GeneratorModel, RowStreamModel], ids=lambda m: m.__name__)
@pytest.mark.parametrize("seed", [None, 1])
def test_the_stages_parameters_reach_the_model(model, seed):
    stage = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}
    runner = make_runner(model(), seeds(seed, None), subtalker=stage, frames=[0, 0])
    forward(runner)
    for call in runner.model.calls:
        assert {name: call.kwargs[name] for name in stage} == stage
    if model is RowStreamModel:
        bound = runner.model.talker_mtp_row_parameters
        assert bound.temperature[:2].tolist() == pytest.approx([0.7, 0.7])
        assert bound.top_k[:2].tolist() == [20, 20]
        assert bound.top_p[:2].tolist() == pytest.approx([0.95, 0.95])


def test_a_requests_own_parameters_go_to_its_row():
    requests = {
        "a": {"subtalker_temperature": 0.5, "subtalker_top_k": 7},
        "b": None,
        "c": {"subtalker_do_sample": False, "subtalker_temperature": 0.8},
        "d": {"subtalker_top_p": 0.25, "tts_local_seed": 3},
    }
    runner = make_runner(RowStreamModel(), requests, subtalker={"top_p": 0.95}, frames=[0] * 4)
    forward(runner)
    bound = runner.model.talker_mtp_row_parameters
    assert bound.temperature[:4].tolist() == pytest.approx([0.5, 0.9, 0.0, 0.9])
    assert bound.top_k[:4].tolist() == [7, 50, 50, 50]
    assert bound.top_p[:4].tolist() == pytest.approx([0.95, 0.95, 0.95, 0.25])
    forward(runner, ["b"])
    assert bound.temperature[0].item() == pytest.approx(0.9)  # nothing of request a stays in row 0


# Row streams


def test_row_streams_one_batched_call_with_seeds_and_offsets():
    runner = make_runner(RowStreamModel(), seeds(11, None, -1), frames=[3, 4, 0])
    counted = counters().snapshot()["rows"]
    codes, embeds = forward(runner)
    (call,) = runner.model.calls
    assert call.rows == 3
    assert generators(call) == (None, None)
    packed = call.kwargs["streams"]
    assert packed[0, 2] == 3
    assert packed[1:].tolist() == [[11, 3, SEEDED], [0, 4, 0], [-1, 0, SEEDED]]
    assert not hasattr(runner, "_talker_mtp_generators")
    assert codes["b"].tolist() == [[41] * GROUPS]
    assert torch.equal(embeds[:3], runner.talker_mtp_inputs_embeds.gpu[:3] + 1)
    rows = counters().snapshot()["rows"]
    assert {kind: rows[kind] - counted[kind] for kind in rows} == {"seeded": 2, "unseeded": 1}


def test_row_streams_under_a_padded_graph(monkeypatch):
    runner = make_runner(RowStreamModel(), seeds(11, None, 33), frames=[1, 2, 3], bucket=4)
    runner.talker_mtp = GraphWrapper(runner.model.talker_mtp)
    with platform_graph_wrapper(monkeypatch):
        codes, _ = forward(runner)
    assert runner.talker_mtp.calls == 1
    (call,) = runner.model.calls
    assert call.rows == 4
    assert call.kwargs["streams"].shape == (5, 3)
    bound = runner.model.talker_mtp_row_streams.tensor
    assert bound[0, 2] == 3, "the kernel leaves rows past this number alone"
    assert bound[1:4, 0].tolist() == [11, 0, 33]
    assert set(codes) == {"a", "b", "c"}


def test_row_streams_are_bound_once_and_never_move(monkeypatch):
    runner = make_runner(RowStreamModel(), seeds(1, 2, None), frames=[0, 0, 0])
    runner._init_talker_mtp()
    model = runner.model
    bound = model.talker_mtp_row_streams
    address = bound.tensor.data_ptr()
    assert bound.tensor.shape == (MAX_ROWS + 1, 3)
    warm = model.calls[:]
    assert warm and all(call.kwargs["streams"] is not None for call in warm), "no warm-up at start"
    for names in (["a", "b", "c"], ["c"], ["b", "a"]):
        forward(runner, names)
    assert model.talker_mtp_row_streams is bound
    assert bound.tensor.data_ptr() == address
    assert bound.tensor[1:3, 0].tolist() == [2, 1]


@pytest.mark.parametrize(
    "device, max_rows, sizes",
    [("cpu", 64, [1]), ("cuda", 1, [1]), ("cuda", 8, [1, 2, 4, 8]), ("cuda", 20, [1, 2, 4, 8, 16, 20])],
)
def test_every_bucket_is_warmed_on_a_gpu(device, max_rows, sizes):
    assert warm_up_sizes(max_rows, torch.device(device)) == sizes


def test_replicas_differ_and_a_restart_repeats(monkeypatch):
    def global_seed(rank, made, replica="0"):
        torch.manual_seed(0)
        monkeypatch.setenv("VLLM_OMNI_REPLICA_ID", replica)  # as vLLM-Omni's stage processes do
        monkeypatch.setattr(streams, "_made", itertools.count(made))
        runner = make_runner(RowStreamModel(), {}, rank=rank)
        runner._init_talker_mtp()
        return runner.model.talker_mtp_row_streams.global_seed

    assert global_seed(0, 0) == global_seed(0, 0)
    others = global_seed(1, 0), global_seed(0, 1), global_seed(0, 0, "1"), global_seed(1, 0, "1")
    assert len({global_seed(0, 0), *others}) == 5


# Offsets


def offsets(runner, names=None):
    forward(runner, names)
    packed = runner.model.calls[-1].kwargs["streams"]
    return packed[1 : 1 + int(packed[0, 2]), 1].tolist()


def set_frames(runner, **frames):
    for name, frame in frames.items():
        i = runner.input_batch.req_id_to_index[name]
        runner.input_batch.num_computed_tokens_cpu[i] = runner.input_batch.num_prompt_tokens[i] + frame


def test_the_offset_is_the_scheduled_frame():
    runner = make_runner(RowStreamModel(), seeds(1, 2), frames=[0, 5])
    assert offsets(runner) == [0, 5]
    set_frames(runner, a=1, b=6)
    assert offsets(runner) == [1, 6]
    assert offsets(runner) == [1, 6], "a step that is run again has the same offsets: calls are not counted"


def test_the_offset_follows_a_row_that_moves_and_a_prompt_in_chunks():
    runner = make_runner(RowStreamModel(), seeds(1, 2), frames=[3, 7])
    batch = runner.input_batch
    batch.req_id_to_index = {"a": 1, "b": 0}
    batch.num_prompt_tokens = np.array([4, 90], np.int32)
    batch.num_computed_tokens_cpu = np.array([4 + 7, 90 + 3], np.int32)
    assert offsets(runner) == [3, 7]
    # While b's prompt is prefilled in chunks beside it, a's frames alone reach the MTP.
    batch.num_computed_tokens_cpu = np.array([2, 90 + 4], np.int32)
    assert offsets(runner, ["a"]) == [4]


def test_the_offset_continues_after_a_preemption():
    runner = make_runner(RowStreamModel(), seeds(1), frames=[5])
    assert offsets(runner) == [5]
    # Preempted: prompt and five frames are computed again as one prefill, then decoding goes on.
    set_frames(runner, a=6)
    assert offsets(runner) == [6]


def test_an_id_that_is_used_again_starts_at_zero():
    runner = make_runner(RowStreamModel(), seeds(1), frames=[9])
    assert offsets(runner) == [9]
    runner.requests["a"] = request({"tts_local_seed": 2})
    set_frames(runner, a=0)
    assert offsets(runner) == [0]
    assert runner.model.talker_mtp_row_streams.tensor[1, 0] == 2


def test_a_base_offset_is_added_modulo_2_64():
    requests = {
        "a": {"tts_local_seed": 1, "tts_local_offset": 100},
        "b": {"tts_local_seed": 1, "tts_local_offset": 2**63 - 1},
        "c": {"tts_local_seed": 1, "tts_local_offset": 2**64 - 1},
    }
    runner = make_runner(RowStreamModel(), requests, frames=[2, 2, 2])
    assert offsets(runner) == [102, -(2**63) + 1, 1]


# Bad values that got past admission


@pytest.mark.parametrize("bad", ["abc", "42", 4.2, True, 2**64, -(2**63) - 1])
@pytest.mark.parametrize("model", [SeedModel, GeneratorModel, RowStreamModel], ids=lambda m: m.__name__)
def test_a_bad_seed_makes_its_own_row_unseeded_and_says_so_once(model, bad, log):
    name = f"bad-{model.__name__}-{bad!r}"
    requests = {name: {"tts_local_seed": bad}, "good": {"tts_local_seed": 5}}
    runner = make_runner(model(), requests, frames=[0, 0])
    forward(runner)
    forward(runner)
    lines = [record.getMessage() for record in log]
    assert len(lines) == 1
    assert name in lines[0]
    assert "tts_local_seed" in lines[0] and repr(bad) in lines[0]
    calls = runner.model.calls
    if model is RowStreamModel:
        assert calls[0].kwargs["streams"][1:].tolist() == [[0, 0, 0], [5, 0, SEEDED]]
    else:
        seen = [generators(call) for call in calls[: len(calls) // 2]]
        flat = [g for one, several in seen for g in (several or [one])]
        assert [g and g.initial_seed() for g in flat] == [None, 5]


def test_bad_parameters_fall_back_to_the_stages():
    bad = {"tts_local_seed": 1, "subtalker_temperature": -1}
    requests = {"bad-parameters": bad, "good": {"tts_local_seed": 2}}
    runner = make_runner(RowStreamModel(), requests, subtalker={"temperature": 0.6}, frames=[0, 0])
    flagged = counters().flagged.get("request", 0)
    forward(runner)
    forward(runner)
    assert counters().flagged["request"] == flagged + 1, "once a request, not once a frame"
    assert runner.model.talker_mtp_row_parameters.temperature[:2].tolist() == pytest.approx([0.6, 0.6])
    flags = runner.model.calls[0].kwargs["streams"][1:, 2].tolist()
    assert flags == [0, SEEDED]
    assert not any(flag & INACTIVE for flag in flags)


def test_no_rows_is_no_call():
    runner = make_runner(RowStreamModel(), {}, frames=[])
    runner._talker_mtp_forward([], torch.zeros(1, 1))
    assert runner.model.calls == []
