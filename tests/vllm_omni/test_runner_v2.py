"""The V2 runner, whose methods stay as they are: SeededTalker in the real OmniModelState."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_fakes import GraphWrapper, platform_graph_wrapper
from talkers import UpstreamTalker, make_talker, request_params
from v2_runner import OmniModelState
from vllm.config import CUDAGraphMode

from rowseed.kernels.streams import SEEDED
from rowseed.vllm_omni.model_executor.models.qwen3_tts.code_predictor import SeededCodePredictor

SLOTS, PROMPT_LEN = 8, 4


def config(hidden, full_graphs):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS, max_num_batched_tokens=64),
        model_config=SimpleNamespace(
            max_model_len=256,
            get_inputs_embeds_size=lambda: hidden,
            dtype=torch.float32,
            enable_prompt_embeds=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            enforce_eager=True,
            multimodal_config=None,
            is_multimodal_model=False,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, use_sequence_parallel_moe=False, is_moe_model=False
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL if full_graphs else CUDAGraphMode.NONE,
            static_forward_context={},
            static_all_moe_layers=[],
            fast_moe_cold_start=False,
            cudagraph_capture_sizes=[1, 2, 4, 8],
            cudagraph_num_of_warmups=1,
        ),
        observability_config=None,
    )


class Runner:
    """Feeds the real model state one decode step at a time; slots are rows."""

    def __init__(self, talker, full_graphs=False):
        self.talker = talker
        self.state = OmniModelState(
            config(talker.mtp_hidden_size, full_graphs), talker, None, torch.device("cpu")
        )
        self.frames = np.zeros(SLOTS, np.int64)

    def add(self, slot, request_id, frame=0, **extra_args):
        params = request_params(**extra_args)
        new = SimpleNamespace(req_id=request_id, mm_features=None, sampling_params=params)
        self.state.intermediate_buffer.add_request(slot, new)
        hidden = torch.linspace(-1, 1, self.talker.mtp_hidden_size)
        self.state.intermediate_buffer.buffers[slot] |= {"text": ["x"], "hidden_states": {"last": hidden}}
        self.frames[slot] = frame

    def step(self, slots, bucket=None):
        """Decode one frame of the requests in ``slots``; returns {slot: codes}."""
        n = len(slots)
        ids = torch.full((n,), 5)
        batch = SimpleNamespace(
            num_reqs=n,
            num_tokens=n,
            idx_mapping_np=np.array(slots),
            query_start_loc=torch.arange(n + 1, dtype=torch.int32),
            query_start_loc_np=np.arange(n + 1),
            num_scheduled_tokens=np.ones(n, np.int32),
            num_computed_tokens_np=PROMPT_LEN + self.frames[slots],
            input_ids=ids,
        )
        # The real prompt_len has .np; num_computed_tokens lives on the device, and the batch's array is read.
        states = SimpleNamespace(
            prompt_len=SimpleNamespace(np=np.full(SLOTS, PROMPT_LEN)), num_computed_tokens=object()
        )
        inputs = {"input_ids": ids, "inputs_embeds": self.state._static_inputs_embeds[:n]}
        descriptor = SimpleNamespace(num_tokens=bucket, cg_mode=CUDAGraphMode.FULL)
        with torch.inference_mode():
            self.state.run_preprocess(batch, inputs, states, (lambda rows: descriptor) if bucket else None)
        self.frames[slots] += 1
        buffers = self.state.intermediate_buffer.buffers
        return {slot: buffers[slot]["codes"]["audio"].tolist() for slot in slots}

    def packed(self, rows):
        return self.talker.talker_mtp_row_streams.tensor[1 : rows + 1].tolist()


@pytest.fixture
def talker():
    return make_talker(bind=SLOTS)


def test_no_noise_buffer_and_no_generators(talker, monkeypatch):
    with platform_graph_wrapper(monkeypatch):
        runner = Runner(talker, full_graphs=True)
        assert runner.state._mtp_sample_uniforms is None
        theirs = Runner(make_talker(cls=UpstreamTalker), full_graphs=True)
        assert theirs.state._mtp_sample_uniforms is not None
        runner.add(0, "a", tts_local_seed=1)
        runner.step([0], bucket=1)
    assert runner.state._mtp_generators == {}


def test_seeds_and_offsets_are_packed_in_row_order(talker):
    runner = Runner(talker)
    runner.add(0, "a", frame=2, tts_local_seed=11)
    runner.add(1, "b", frame=0)
    runner.add(2, "c", frame=9, tts_local_seed=-1, tts_local_offset=100)
    runner.step([2, 0, 1])
    assert runner.packed(3) == [[-1, 109, SEEDED], [11, 2, SEEDED], [0, 0, 0]]
    runner.step([0, 1])
    assert runner.packed(2) == [[11, 3, SEEDED], [0, 1, 0]]


def test_a_request_alone_and_in_any_batch_has_equal_codes(talker):
    alone = Runner(talker)
    alone.add(0, "a", tts_local_seed=7)
    expected = [alone.step([0])[0] for _ in range(3)]
    crowd = Runner(talker)
    crowd.add(3, "a", tts_local_seed=7)
    crowd.add(0, "b", tts_local_seed=8)
    crowd.add(5, "c")
    first = crowd.step([0, 3, 5])
    assert [first[3], crowd.step([3])[3], crowd.step([5, 3])[3]] == expected
    assert first[0] != expected[0]
    assert len({str(codes) for codes in expected}) == 3


def test_seeded_batches_use_the_graph_with_padding(talker, monkeypatch):
    eager = Runner(talker)
    for slot in range(3):
        eager.add(slot, f"r{slot}", tts_local_seed=slot)
    expected = eager.step([0, 1, 2])
    with platform_graph_wrapper(monkeypatch):
        runner = Runner(talker, full_graphs=True)
        assert isinstance(runner.state._mtp_runner, GraphWrapper)
        for slot in range(3):
            runner.add(slot, f"r{slot}", tts_local_seed=slot)
        assert runner.step([0, 1, 2], bucket=4) == expected
        assert runner.state._mtp_runner.calls == 1
    assert talker.talker_mtp_row_streams.tensor[0, 2] == 3


def test_loading_warms_the_mtp(talker, monkeypatch):
    calls = []
    monkeypatch.setattr(UpstreamTalker, "load_weights", lambda self, weights: {"loaded"})
    monkeypatch.setattr(type(talker.code_predictor), "forward", _recording(calls))
    assert talker.load_weights(iter(())) == {"loaded"}
    assert calls == [1]
    talker._use_v2_model_runner = False  # the V1 runner warms it once the graphs' buffers are bound
    talker.load_weights(iter(()))
    assert calls == [1]


def _recording(calls):
    forward = SeededCodePredictor.forward

    def recorded(self, layer0_code, **kwargs):
        calls.append(layer0_code.shape[0])
        return forward(self, layer0_code, **kwargs)

    return recorded


def test_a_reused_id_starts_again(talker):
    runner = Runner(talker)
    runner.add(0, "a", tts_local_seed=7)
    first = [runner.step([0])[0] for _ in range(2)]
    runner.state.remove_request("a")
    runner.add(0, "a", tts_local_seed=7)
    assert [runner.step([0])[0] for _ in range(2)] == first


def test_a_requests_own_parameters_go_to_its_row(talker):
    runner = Runner(talker)
    runner.add(0, "a", tts_local_seed=7)
    runner.add(1, "b", tts_local_seed=7, subtalker_do_sample=False)
    runner.add(2, "c", tts_local_seed=7, subtalker_top_k=1)
    codes = runner.step([0, 1, 2])
    assert codes[1] == codes[2] != codes[0]


def test_a_bad_value_that_got_here_makes_its_row_unseeded(talker, log):
    runner = Runner(talker)
    runner.add(0, "v2-bad", tts_local_seed="abc")
    runner.add(1, "v2-good", tts_local_seed=5)
    runner.step([0, 1])
    assert runner.packed(2) == [[0, 0, 0], [5, 0, SEEDED]]
    (line,) = [record.getMessage() for record in log]
    assert "v2-bad" in line and "'abc'" in line


def test_bad_logits_are_named_and_counted(talker, log):
    runner = Runner(talker)
    for slot, name in enumerate(("v2-fine", "v2-nan")):
        runner.add(slot, name, tts_local_seed=7)
    runner.state.intermediate_buffer.buffers[1]["hidden_states"]["last"] *= torch.nan
    runner.step([0, 1])
    assert not log, "the V2 runner has no hook between its MTP and its forward pass"
    last = torch.arange(2)
    talker.postprocess_batch_mrv2(
        hidden_states=torch.zeros(2, talker.mtp_hidden_size), last_token_indices=last
    )
    (line,) = [record.getMessage() for record in log]
    assert "v2-nan met NaN logits" in line
