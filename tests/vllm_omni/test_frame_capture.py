"""A frame is one CUDA graph: recorded on a CPU for every batch and parameter, captured on a GPU."""

import pytest
import torch
from capture import allocating, differences, record, synchronising
from predictors import TINY
from static_server import ROWS, Server
from talkers import make_talker

from rowseed.vllm_omni.model_executor.models.qwen3_tts import code_predictor
from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame_graphs import FrameGraphs

CODES = TINY["num_code_groups"] - 1


@pytest.fixture(params=[32, 48], ids=["same-size", "projection"])
def server(request, monkeypatch):
    # The packed weights are the CPU's alone and return new tensors; what a GPU runs is recorded here.
    monkeypatch.setattr(code_predictor, "_packs", lambda model: False)
    return Server(request.param)


def test_two_frames_are_one_graph(server):
    server.pack(1)
    server.frame()  # allocates the buffers
    recorded = []
    for step in (2, 3, 4):
        server.pack(step)
        recorded.append(record(server.frame))
    assert differences(recorded[0], recorded[1]) == []
    assert differences(recorded[0], recorded[2]) == []
    assert synchronising(recorded[0]) == []
    # Only what is handed out is new: the caller's own copy of the codes.
    assert allocating(recorded[0]) == ["aten.clone.default"]
    samplers = [operator for operator in recorded[0] if operator.name == "rowseed.sample.default"]
    assert len(samplers) == CODES


def test_talker_mtp_is_one_graph(server):
    """The whole call that a runner captures, with the positional arguments that it captures."""
    talker = make_talker(talker_hidden=server.inputs[1].shape[-1], max_num_seqs=ROWS, bind=ROWS)
    server.streams, server.parameters = talker.talker_mtp_row_streams, talker.talker_mtp_row_parameters
    text = torch.randn(ROWS, server.inputs[1].shape[-1])
    code0, embed, hidden = server.inputs
    recorded = []
    for step in (1, 2, 3):
        server.pack(step)
        text.normal_()
        recorded.append(record(lambda: talker.talker_mtp(code0[:, 0], embed[:, 0], hidden[:, 0], text)))
    assert differences(recorded[1], recorded[2]) == []
    assert synchronising(recorded[1]) == []
    # No second gather, and what the talker allocates does not grow with the codes.
    names = [operator.name for operator in recorded[1]]
    assert not any(name.startswith(("aten.index", "aten.embedding", "aten.gather")) for name in names)
    assert len(allocating(recorded[1])) < 12
    assert names.count("rowseed.sample.default") == CODES


def test_the_recording_sees_a_changed_number(server):
    server.pack(1)
    server.frame()
    cold, hot = (record(lambda t=t: server.frame(temperature=t)) for t in (0.5, 0.6))
    assert len(differences(cold, hot)) == CODES
    elsewhere = server.parameters.temperature.clone()
    assert differences(record(server.frame), record(lambda: server.frame(temperature=elsewhere)))


def test_the_recording_sees_syncs_and_allocations():
    x = torch.zeros(3)
    assert synchronising(record(lambda: x.sum().item())) == ["aten._local_scalar_dense.default"]
    assert synchronising(record(lambda: x[x > 0])) == ["aten.index.Tensor"]
    assert allocating(record(lambda: torch.add(x, 1, out=x))) == []
    assert allocating(record(lambda: x + 1)) == ["aten.add.Tensor"]


def test_no_buffers_while_capturing(server, monkeypatch):
    monkeypatch.setattr(code_predictor, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"not ready for a CUDA graph of 8 rows: call prepare\(8\)"):
        server.frame()
    monkeypatch.undo()
    server.predictor.prepare()
    monkeypatch.setattr(code_predictor, "_capturing", lambda: True)
    server.frame()
    with pytest.raises(RuntimeError, match="a captured frame needs streams"):
        server.predictor(*server.inputs)


def test_own_graphs_are_padded_frames(server):
    """The graphs' bookkeeping, with a stand-in that runs the work again instead of replaying it."""
    captured = []

    def stand_in(run):
        captured.append(run)
        return run

    graphs = FrameGraphs(server.predictor.prepare(), capture=stand_in)
    for step in range(1, 9):
        server.pack(step)
        rows = 1 + (3 * step + 2) % ROWS - (step == 3)  # there, one row fewer than the streams count
        inputs = [tensor[:rows] for tensor in server.inputs]
        parameters = {
            "temperature": server.parameters.temperature[:rows],
            "top_k": server.parameters.top_k[:rows] if step % 2 else 7,
            "top_p": server.parameters.top_p[:rows],
        }
        streams = server.streams.tensor[: rows + 1]
        eager = server.predictor(*inputs, streams=streams, **parameters)
        total = server.predictor.frame_sum.clone()
        flat = [tensor.reshape(rows, -1) for tensor in inputs]
        codes, graphs_total = graphs.run(flat[0][:, 0], *flat[1:], streams, **parameters)
        assert torch.equal(codes, eager)
        assert torch.equal(graphs_total, total)
        filler = server.predictor.prepare().buffers.codes[rows : 1 << (rows - 1).bit_length(), 1:]
        assert not filler.any()
    assert len(captured) == 4  # 1, 2, 4 and 8 rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager(dtype):
    server = Server(48, "cuda", dtype)
    server.predictor._graphs = None
    server.pack(1)
    server.frame()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = server.frame()
    captured_sum = server.predictor.frame_sum
    for step in range(2, 8):
        server.pack(step)
        graph.replay()
        replayed, replayed_sum = captured.clone(), captured_sum.clone()
        assert torch.equal(server.frame(), replayed)
        assert torch.equal(server.predictor.frame_sum, replayed_sum)


@pytest.mark.gpu
def test_own_graphs_equal_eager():
    server = Server(48, "cuda")
    server.pack(1)
    server.predictor.prepare()
    graphs = server.predictor._graphs
    for step in range(2, 8):
        server.pack(step)
        server.predictor._graphs = graphs
        by_graph = server.frame()
        server.predictor._graphs = None
        assert torch.equal(by_graph, server.frame())
