"""A frame is one CUDA graph: recorded on a CPU for every batch and parameter, captured on a GPU."""

import pytest
import torch
from capture import allocating, differences, record, synchronising
from predictors import TINY, frame_inputs, make_predictor, randomise

from rowseed.kernels.streams import RowParameters, RowStreams
from rowseed.vllm_omni.model_executor.models.qwen3_tts import code_predictor
from rowseed.vllm_omni.model_executor.models.qwen3_tts.frame_graphs import FrameGraphs

ROWS = 8
CODES = TINY["num_code_groups"] - 1


class Server:
    """A predictor with the static buffers a runner has: its batch of ROWS rows is padded."""

    def __init__(self, talker_hidden: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.predictor = make_predictor(talker_hidden=talker_hidden, max_num_seqs=ROWS, dtype=dtype, **TINY)
        randomise(self.predictor)
        self.predictor.to(device)
        self.inputs = [tensor.to(device) for tensor in frame_inputs(ROWS, talker_hidden, dtype)]
        self.streams = RowStreams(ROWS, device, global_seed=3)
        self.parameters = RowParameters(ROWS, device)

    def pack(self, step: int) -> None:
        """Another frame: other rows, seeds, offsets, parameters and hidden states in the same tensors."""
        rows = 1 + (3 * step + 2) % ROWS
        seeds = [None if (row + step) % 3 == 0 else 100 * step + row for row in range(rows)]
        self.streams.pack(seeds, [step + row for row in range(rows)])
        self.parameters.pack(
            [0.5 + 0.1 * row * step for row in range(rows)],
            [(row * step) % 20 for row in range(rows)],
            [1.0 - 0.1 * ((row + step) % 4) for row in range(rows)],
        )
        for mine, new in zip(
            self.inputs, frame_inputs(ROWS, self.inputs[1].shape[-1], seed=step), strict=True
        ):
            mine.copy_(new)

    def frame(self, **changed):
        arguments = {
            "streams": self.streams.tensor,
            "temperature": self.parameters.temperature,
            "top_k": self.parameters.top_k,
            "top_p": self.parameters.top_p,
        }
        return self.predictor(*self.inputs, **arguments | changed)


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
        rows = 1 + (3 * step + 2) % ROWS
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
