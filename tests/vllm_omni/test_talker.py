"""SeededTalker.talker_mtp: codes from streams, upstream's handling of everything around them."""

import pytest
import torch
from omni_fakes import GraphWrapper, forward, make_runner, platform_graph_wrapper
from talkers import UpstreamTalker, make_talker, mtp_inputs

from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.model_executor.models.qwen3_tts import talker as module
from rowseed.vllm_omni.model_executor.models.qwen3_tts.code_predictor import SeededCodePredictor
from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame_graphs import FrameGraphs

GREEDY = {"do_sample": False}
IDS = [5, 63, 1]
EOS = 70  # past the 64 codes


@pytest.fixture(scope="module")
def talker():
    return make_talker()


def streams(seeds, offsets, padded=None):
    return RowStreams(16, "cpu", global_seed=1).pack(seeds, offsets, padded)


def upstream_mtp(talker, inputs, **kwargs):
    """vLLM-Omni's own method, with its own predictor code, over the same weights."""
    generator = torch.Generator().manual_seed(0)  # its presence keeps SeededCodePredictor on upstream's way
    return UpstreamTalker.talker_mtp(talker, *inputs, generator=generator, **kwargs)


def test_declarations():
    assert module.SeededTalker.talker_mtp_seed_extra_arg == "tts_local_seed"
    assert module.SeededTalker.talker_mtp_accepts_row_streams
    assert module.SeededTalker.talker_mtp_accepts_generators
    assert module.SeededTalker.mtp is module.SeededTalker.talker_mtp
    assert module.SeededTalker.get_mtp_seed(None) is None


def test_greedy_frame_equals_upstreams(talker):
    inputs = mtp_inputs(talker, IDS)
    embeds, codes = talker.talker_mtp(*inputs, **GREEDY, streams=streams([None] * 3, [0] * 3))
    their_embeds, their_codes = upstream_mtp(talker, inputs, **GREEDY)
    assert torch.equal(codes, their_codes)
    assert codes[:, 0].tolist() == IDS
    torch.testing.assert_close(embeds, their_embeds, atol=1e-5, rtol=1e-5)


def test_bfloat16_frame_has_upstreams_dtypes():
    talker = make_talker(dtype=torch.bfloat16)
    inputs = mtp_inputs(talker, IDS)
    embeds, codes = talker.talker_mtp(*inputs, **GREEDY, streams=streams([None] * 3, [0] * 3))
    their_embeds, their_codes = upstream_mtp(talker, inputs, **GREEDY)
    assert (embeds.dtype, embeds.shape) == (their_embeds.dtype, their_embeds.shape)
    assert (codes.dtype, codes.shape) == (their_codes.dtype, their_codes.shape)


def test_an_invalid_layer0_code_zeroes_its_frame_as_upstream_does(talker):
    inputs = mtp_inputs(talker, [5, EOS, 63])
    embeds, codes = talker.talker_mtp(*inputs, streams=streams([1, 2, 3], [0] * 3))
    assert codes[1].tolist() == [0] * codes.shape[1]
    assert codes[0].any() and codes[2].any()
    their_embeds, their_codes = upstream_mtp(talker, inputs, **GREEDY)
    assert their_codes[1].tolist() == codes[1].tolist()
    torch.testing.assert_close(embeds[1], their_embeds[1], atol=1e-5, rtol=1e-5)


def test_embeddings_are_those_of_the_codes(talker):
    inputs = mtp_inputs(talker, IDS)
    embeds, codes = talker.talker_mtp(*inputs, streams=streams([1, 2, 3], [4, 5, 6]))
    tables = talker.code_predictor.get_input_embeddings()
    residual = sum(table.weight.detach()[codes[:, i + 1]] for i, table in enumerate(tables))
    expected = inputs[1] + inputs[3] + residual
    torch.testing.assert_close(embeds, expected, atol=1e-5, rtol=1e-5)


def test_a_rows_codes_depend_on_its_own_stream_alone(talker):
    def codes(seeds, offsets, ids=IDS):
        return talker.talker_mtp(*mtp_inputs(talker, ids), streams=streams(seeds, offsets))[1]

    both = codes([7, 8, None], [3, 4, 5])
    assert torch.equal(codes([7], [3], IDS[:1])[0], both[0])
    assert torch.equal(codes([7, None, 9], [3, 0, 0])[0], both[0])
    assert not torch.equal(codes([6], [3], IDS[:1])[0], both[0])
    assert not torch.equal(codes([7], [2], IDS[:1])[0], both[0])


def test_top_p_works_and_parameters_of_the_call_count_where_none_are_bound(talker):
    inputs = mtp_inputs(talker, IDS)
    packed = streams([1, 2, 3], [0] * 3)
    greedy = talker.talker_mtp(*inputs, **GREEDY, streams=packed)[1]
    assert torch.equal(talker.talker_mtp(*inputs, top_p=0.0, streams=packed)[1], greedy)
    assert torch.equal(talker.talker_mtp(*inputs, top_k=1, streams=packed)[1], greedy)
    assert torch.equal(talker.talker_mtp(*inputs, temperature=0.0, streams=packed)[1], greedy)
    assert not torch.equal(talker.talker_mtp(*inputs, temperature=5.0, top_k=0, streams=packed)[1], greedy)


def test_generators_go_vllm_omnis_way(talker, monkeypatch):
    seen = []
    original = SeededCodePredictor.forward
    monkeypatch.setattr(
        SeededCodePredictor, "forward", lambda self, **kwargs: seen.append(kwargs) or original(self, **kwargs)
    )
    inputs = mtp_inputs(talker, IDS)
    generators, fresh = ([torch.Generator().manual_seed(seed) for seed in (1, 2, 3)] for _ in range(2))
    first = talker.talker_mtp(*inputs, generators=generators)[1]
    again = talker.talker_mtp(*inputs, generators=fresh)[1]
    assert torch.equal(first, again)
    assert seen[0]["generators"] is generators and "streams" not in seen[0]


def test_the_predictors_class_is_swapped_only_meanwhile():
    before = getattr(module.upstream, module._PREDICTOR)
    with pytest.raises(RuntimeError, match="in between"), module._seeded_code_predictor():
        assert getattr(module.upstream, module._PREDICTOR) is SeededCodePredictor
        raise RuntimeError("in between")
    assert getattr(module.upstream, module._PREDICTOR) is before


def test_stacked_tables_are_shared_with_the_predictor():
    talker = make_talker()
    talker._build_stacked_codec_embed()
    tables = talker.code_predictor.get_input_embeddings()
    assert talker._stacked_codec_embed.data_ptr() == tables[0].weight.data_ptr()
    code0_sum = talker._code0_sum
    with torch.no_grad():
        tables[1].weight[0] += 1
    talker._build_stacked_codec_embed()
    assert talker._code0_sum is code0_sum, "a captured graph reads this address"
    torch.testing.assert_close(code0_sum, sum(table.weight[0] for table in tables))


# Through the V1 runner


def run_v1(talker, requests, frames, *, subtalker=None, bucket=None, ids=None, poison=None):
    runner = make_runner(talker, requests, frames=frames, subtalker=subtalker, hidden=talker.mtp_hidden_size)
    if bucket:
        runner._determine_batch_execution_and_padding = make_runner(
            talker, {}, bucket=bucket
        )._determine_batch_execution_and_padding
        runner.talker_mtp = GraphWrapper(talker.talker_mtp)
    inputs = mtp_inputs(talker, ids or [5] * len(requests))
    if poison is not None:
        inputs[2][poison] = torch.nan
    names = ("talker_mtp_input_ids", "talker_mtp_inputs_embeds", "last_talker_hidden", "text_step")
    for name, rows in zip(names, inputs, strict=True):
        getattr(runner, name).gpu[: len(requests)] = rows.to(getattr(runner, name).gpu.dtype)
    return forward(runner)[0]


def test_v1_alone_and_in_a_padded_graph_batch_give_equal_codes(monkeypatch):
    talker = make_talker(bind=8)
    alone = run_v1(talker, {"a": {"tts_local_seed": 7}}, [3])["a"]
    with platform_graph_wrapper(monkeypatch):
        together = run_v1(
            talker, {"a": {"tts_local_seed": 7}, "b": None, "c": {"tts_local_seed": 8}}, [3, 0, 9], bucket=4
        )
    assert torch.equal(together["a"], alone)
    assert not torch.equal(together["c"], alone)


def test_v1_a_requests_parameters_reach_its_row_alone():
    talker = make_talker(bind=8)
    seed = {"tts_local_seed": 7}
    plain = run_v1(talker, {"a": seed, "b": seed}, [0, 0])
    greedy = run_v1(talker, {"a": seed, "b": seed | {"subtalker_do_sample": False}}, [0, 0])
    again = run_v1(talker, {"a": seed, "b": seed}, [0, 0])
    assert torch.equal(plain["a"], greedy["a"])
    assert not torch.equal(plain["b"], greedy["b"])
    assert torch.equal(plain["b"], again["b"])
    stage = run_v1(talker, {"a": seed, "b": seed}, [0, 0], subtalker={"do_sample": False})
    assert torch.equal(stage["b"], greedy["b"])
    assert not torch.equal(stage["a"], plain["a"])


def test_v1_a_request_with_bad_logits_is_named_once_and_touches_nobody(log):
    talker = make_talker(bind=8)
    seed = {"tts_local_seed": 7}
    clean = run_v1(talker, {"a": seed, "nan": seed, "c": seed}, [0, 0, 0])
    flagged = dict(counters().flagged)
    poison = torch.tensor([False, True, False])
    for _ in range(2):
        dirty = run_v1(talker, {"a": seed, "nan": seed, "c": seed}, [0, 0, 0], poison=poison)
    assert torch.equal(dirty["a"], clean["a"]) and torch.equal(dirty["c"], clean["c"])
    assert dirty["nan"].min() >= 0 and dirty["nan"].max() < 64
    (line,) = [record.getMessage() for record in log]
    assert "request nan met NaN logits" in line
    assert counters().flagged["nan"] == flagged.get("nan", 0) + 2
    assert counters().flagged["dead"] == flagged.get("dead", 0) + 2, "its hidden state was NaN throughout"


def test_loading_under_vllms_default_dtype_changes_nothing():
    plain, loaded = make_talker(), make_talker()
    inputs = mtp_inputs(plain, IDS)
    packed = streams([1, None, 3], [4, 5, 6])
    expected = plain.talker_mtp(*inputs, streams=packed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        frame = loaded.code_predictor.prepare(8)
        loaded._build_stacked_codec_embed()
        graphs = FrameGraphs(frame, capture=lambda run: run)
        seen = loaded.talker_mtp(*inputs, streams=packed)
        rows = [tensor.reshape(3, -1) for tensor in inputs[:3]]
        codes, _ = graphs.run(rows[0][:, 0], rows[1], rows[2], packed, 0.9, 50, 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, seen, expected))
    assert torch.equal(codes, expected[1])
