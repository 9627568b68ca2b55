"""The machine that drives the V1 runner: its real ``_update_states``, ``InputBatch`` and joined MTP step."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from lifecycle import (
    CODE0_LOGITS,
    GROUPS,
    HIDDEN,
    MAX_ROWS,
    MAX_TOKENS,
    STAGE,
    VOCABULARY,
    GraphWrapper,
    Lifecycle,
    Talker,
    bucket,
)
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm_omni.platforms import current_omni_platform
from vllm_omni.worker import gpu_model_runner
from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

from rowseed.vllm_omni.worker import runner_v1


class Buffer:
    def __init__(self, *shape, dtype=torch.float32):
        self.gpu = self.cpu = torch.zeros(*shape, dtype=dtype)


def make_runner(graph):
    """OmniGPUModelRunner with what ``_update_states`` and ``_talker_mtp_forward`` read."""
    runner = object.__new__(OmniGPUModelRunner)
    runner.model, runner.device = Talker(), torch.device("cpu")
    runner.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(subtalker_sampling_params=STAGE._asdict()),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_rank=0, use_sequence_parallel_moe=False, is_moe_model=False
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={}, static_all_moe_layers=[], fast_moe_cold_start=False
        ),
    )
    runner.requests, runner.model_intermediate_buffer, runner.num_prompt_logprobs = {}, {}, {}
    runner.encoder_cache, runner.late_interaction_runner = {}, mock.Mock()
    runner.speculative_config, runner.use_async_spec_decode, runner.is_pooling_model = None, False, False
    runner.uses_mrope, runner._may_reorder_batch = False, lambda _: None
    runner.omni_prefix_cache, runner.uses_xdrope_dim = None, 0  # vllm-omni 0.28 reads them
    runner.input_batch = InputBatch(
        max_num_reqs=MAX_ROWS,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        device=runner.device,
        vocab_size=VOCABULARY,
        block_sizes=[MAX_TOKENS],
        kernel_block_sizes=[MAX_TOKENS],
        max_num_blocks_per_req=[1],
    )
    runner.sampler = Sampler()
    runner.query_start_loc = Buffer(MAX_ROWS + 1, dtype=torch.int32)
    runner.talker_mtp_input_ids = Buffer(MAX_ROWS, dtype=torch.int32)
    for name in ("talker_mtp_inputs_embeds", "last_talker_hidden", "text_step"):
        setattr(runner, name, Buffer(MAX_ROWS, HIDDEN))
    runner.has_talker_mtp, runner.talker_mtp = True, runner.model.talker_mtp
    if graph:
        runner.talker_mtp = GraphWrapper(runner.model.talker_mtp)
    runner._determine_batch_execution_and_padding = lambda num_tokens, **_: (
        CUDAGraphMode.NONE,
        BatchDescriptor(num_tokens=bucket(num_tokens)),
        False,
        None,
        None,
    )
    return runner


class V1Lifecycle(Lifecycle):
    def start(self, graph):
        self.patches = ExitStack()
        last_rank = SimpleNamespace(is_last_rank=True)
        self.patches.enter_context(mock.patch.object(gpu_model_runner, "get_pp_group", lambda: last_rank))
        self.patches.enter_context(
            mock.patch.object(
                type(current_omni_platform), "get_graph_wrapper_cls", classmethod(lambda _: GraphWrapper)
            )
        )
        self.runner = make_runner(graph)
        self.runner.use_async_scheduling = self.asynchronous
        runner_v1._bind(self.runner)
        self.code0_lines = None

    def stop(self):
        self.patches.close()

    def talker(self):
        return self.runner.model

    def run_step(self, scheduled):
        runner = self.runner
        new = [r for r in scheduled if not r.known_to_runner]
        cached = [r for r in scheduled if r.known_to_runner]
        runner._update_states(
            SchedulerOutput(
                scheduled_new_reqs=[
                    NewRequestData(
                        req_id=r.name,
                        prompt_token_ids=[1] * r.prompt_len,
                        mm_features=[],
                        sampling_params=r.sampling_params(),
                        pooling_params=None,
                        block_ids=([0],),
                        num_computed_tokens=r.computed,
                        lora_request=None,
                    )
                    for r in new
                ],
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=[r.name for r in cached],
                    resumed_req_ids={r.name for r in cached if r.preempted},
                    new_token_ids=[],
                    all_token_ids={
                        r.name: [1] * r.prompt_len + r.outputs for r in cached if not r.scheduled_before
                    },
                    new_block_ids=[([0],) if r.preempted else None for r in cached],
                    num_computed_tokens=[r.computed for r in cached],
                    num_output_tokens=[len(r.outputs) for r in cached],
                ),
                num_scheduled_tokens={r.name: tokens for r, tokens in scheduled.items()},
                total_num_scheduled_tokens=sum(scheduled.values()),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                num_common_prefix_blocks=[0],
                finished_req_ids=set(self.finished),
                free_encoder_mm_hashes=[],
            )
        )
        rows = self._preprocess({r.name: r for r in scheduled}, scheduled)
        if scheduled:
            self._sample({r.name: r for r in scheduled}, scheduled)
        return rows

    def _preprocess(self, by_name, scheduled):
        """What the runner's ``_preprocess`` does around the MTP: pack the decode rows, skip prefill rows."""
        runner, batch = self.runner, self.runner.input_batch
        assert set(batch.req_ids) == set(by_name)
        rows, offsets, at = [], [], 0
        for index, name in enumerate(batch.req_ids):
            request = by_name[name]
            is_prefill = batch.num_computed_tokens_cpu[index] < len(runner.requests[name].prompt_token_ids)
            if scheduled[request] == 1 and not is_prefill:
                runner.talker_mtp_input_ids.gpu[len(rows)] = request.key
                runner.last_talker_hidden.gpu[len(rows)] = request.frame
                rows.append(request)
                offsets.append(at)
            at += scheduled[request]
        before = self.streams().global_offset
        self.expected_lines = self._lines_to_send(rows)
        runner._talker_mtp_forward([r.name for r in rows], torch.zeros(max(at, MAX_ROWS), HIDDEN), offsets)
        self.mtp_advanced = self.streams().global_offset - before
        return rows

    def _lines_to_send(self, rows):
        """0 if code 0 of the same frames was the last to be packed, and they have had no codes since."""
        if not rows:
            return 0
        packed, self.code0_lines = self.code0_lines, None
        same = packed == [r.line(r.row().seed, r.frame) for r in rows]
        return 0 if same else super().lines_packed(rows)

    def advanced(self, before):
        return self.mtp_advanced

    def lines_packed(self, rows):
        return self.expected_lines

    def _sample(self, by_name, scheduled):
        """What ``_prepare_inputs`` leaves for the sampler, then vLLM's own step; every code 0 is checked.

        Chunks of a prompt are sampled too, as vLLM does before it throws their tokens away.
        """
        runner, batch = self.runner, self.runner.input_batch
        requests = [by_name[name] for name in batch.req_ids]
        tokens = torch.tensor([0] + [scheduled[r] for r in requests], dtype=torch.int32)
        runner.query_start_loc.cpu[: len(tokens)] = tokens.cumsum(0)
        frames = [r.computed + scheduled[r] - r.prompt_len for r in requests]
        logits = CODE0_LOGITS[[r.key for r in requests], frames]
        before = [generator.get_state() for generator in batch.generators.values()]
        generators = list(batch.generators.values())
        sampled = runner._sample(logits, None).sampled_token_ids[:, 0].tolist()
        assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, before, strict=True))
        if all(r.greedy for r in requests):
            return
        assert not batch.generators  # of a row whose token is thrown away it would be rewound
        header = runner.sampler.topk_topp_sampler.rows.streams.tensor[0].tolist()
        self.check_code0(sampled, requests, frames, header)
        self.code0_lines = [r.line(r.code0_seed(), frame) for r, frame in zip(requests, frames, strict=True)]

    def codes(self, request):
        codes = self.runner.model_intermediate_buffer[request.name]["codes"]["audio"]
        assert codes.shape == (1, GROUPS)
        return codes[0].tolist()

    def sampled(self, request, token):
        """As the runner's bookkeeping does: cached at once, -1 where the host does not know it yet."""
        batch, state = self.runner.input_batch, self.runner.requests[request.name]
        index = batch.req_id_to_index[request.name]
        batch.token_ids_cpu[index, batch.num_tokens_no_spec[index]] = token
        batch.num_tokens_no_spec[index] += 1
        state.output_token_ids.append(token)

    def swap_rows(self, i, j):
        """As an attention backend that sorts the batch does."""
        count = self.runner.input_batch.num_reqs
        if max(i, j) < count and i != j:
            self.runner.input_batch.swap_states(i, j)

    def held(self):
        runner = self.runner
        return [
            *runner.requests,
            *runner.model_intermediate_buffer,
            *getattr(runner, "_talker_mtp_generators", ()),
        ]
