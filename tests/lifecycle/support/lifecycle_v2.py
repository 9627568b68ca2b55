"""The machine that drives the V2 runner: its real ``OmniModelState`` and the talker's own hook."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from lifecycle import (
    CODE0_LOGITS,
    GROUPS,
    HIDDEN,
    MAX_ROWS,
    MAX_TOKENS,
    VOCABULARY,
    GraphWrapper,
    Lifecycle,
    Talker,
    bucket,
)
from v2_runner import OmniModelState, make_sampler
from vllm.config import CUDAGraphMode
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as upstream
from vllm_omni.platforms import current_omni_platform

from rowseed.vllm_omni.extra_args import stage_parameters
from rowseed.vllm_omni.worker.row_packing import bind_rows


def fake_vllm_config(graph):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_TOKENS),
        model_config=SimpleNamespace(
            max_model_len=MAX_TOKENS,
            get_inputs_embeds_size=lambda: HIDDEN,
            dtype=torch.float32,
            enable_prompt_embeds=False,
            uses_mrope=False,
            uses_xdrope_dim=0,
            enforce_eager=not graph,
            multimodal_config=None,
            is_multimodal_model=False,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, use_sequence_parallel_moe=False, is_moe_model=False
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE,
            static_forward_context={},
            static_all_moe_layers=[],
            fast_moe_cold_start=False,
            cudagraph_capture_sizes=[1, 2, 4],
            cudagraph_num_of_warmups=1,
        ),
        observability_config=None,
    )


class V2Lifecycle(Lifecycle):
    def start(self, graph):
        self.patches = ExitStack()
        wrapper = classmethod(lambda _: GraphWrapper)
        self.patches.enter_context(
            mock.patch.object(type(current_omni_platform), "get_graph_wrapper_cls", wrapper)
        )
        self.patches.enter_context(
            mock.patch.object(
                upstream.Qwen3TTSTalkerForConditionalGeneration,
                "preprocess_decode_batch_mrv2",
                lambda _, **kwargs: self._decode_inputs(**kwargs),
            )
        )
        self.model = Talker()
        defaults = stage_parameters(self.model._subtalker_sampling_params)
        bind_rows(self.model, MAX_ROWS, torch.device("cpu"), rank=0, defaults=defaults)
        self.state = OmniModelState(fake_vllm_config(graph), self.model, None, torch.device("cpu"))
        self.sampler = make_sampler(MAX_ROWS, VOCABULARY)
        self.state.custom_sampler(self.sampler)
        self.slots = {}  # request -> index in the runner's request states
        self.batch = []  # requests in batch order

    def stop(self):
        self.patches.close()

    def talker(self):
        return self.model

    def lines_packed(self, rows):
        return len(rows)  # the hook does not know the padded size

    def _decode_inputs(self, *, input_ids, input_embeds, req_infos):
        """What the talker's own hook returns, with the frame of each request as its hidden state."""
        by_name = {request.name: request for request in self.slots}
        rows = [by_name[info["req_id"]] for info in req_infos]
        hidden = torch.tensor([[float(r.frame)] * HIDDEN for r in rows])
        self.rows = rows
        return input_ids, input_embeds, hidden, torch.zeros(len(rows), HIDDEN), [{} for _ in rows]

    def run_step(self, scheduled):
        for request in [
            r for r in self.slots if r.name in self.finished or r.preempted or r not in self.running
        ]:
            self.state.remove_request(self.slots.pop(request))
            self.batch = [r for r in self.batch if r is not request]
        for request in scheduled:
            if request not in self.slots:
                self.slots[request] = min(set(range(MAX_ROWS)) - set(self.slots.values()))
                params = request.sampling_params()
                self.sampler.req_states.prompt_len.np[self.slots[request]] = request.prompt_len
                self.sampler.add_request(self.slots[request], request.prompt_len, params)
                new = SimpleNamespace(req_id=request.name, mm_features=None, sampling_params=params)
                self.state.add_request(self.slots[request], new)
        self.batch = [r for r in self.batch if r in scheduled] + [r for r in scheduled if r not in self.batch]
        self.rows = []
        if self.batch:
            self._preprocess(scheduled)
            last = torch.zeros(len(self.batch), dtype=torch.long)
            self.model.postprocess_batch_mrv2(hidden_states=torch.zeros(1, HIDDEN), last_token_indices=last)
            self._sample(scheduled)
        return self.rows

    def _preprocess(self, scheduled):
        tokens = np.array([scheduled[r] for r in self.batch], np.int32)
        starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        ids = torch.tensor(np.repeat([r.key for r in self.batch], tokens))
        input_batch = SimpleNamespace(
            num_reqs=len(self.batch),
            num_tokens=len(ids),
            idx_mapping_np=np.array([self.slots[r] for r in self.batch]),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            num_scheduled_tokens=tokens,
            num_computed_tokens_np=np.array([r.computed for r in self.batch], np.int32),
            input_ids=ids,
        )
        prompt_len = np.zeros(MAX_ROWS, np.int32)
        for request, slot in self.slots.items():
            prompt_len[slot] = request.prompt_len
        # The real `num_computed_tokens` lives on the device and cannot be read here: the batch's array is.
        states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_len), num_computed_tokens=None)
        self.state.run_preprocess(
            input_batch,
            {"input_ids": ids.clone(), "inputs_embeds": self.state._static_inputs_embeds[: len(ids)]},
            states,
            lambda rows: SimpleNamespace(num_tokens=bucket(rows), cg_mode=CUDAGraphMode.FULL),
        )

    def _sample(self, scheduled):
        """vLLM's own sampling step, a token for each request; every code 0 is checked."""
        slots = torch.tensor([self.slots[r] for r in self.batch])
        frames = [r.computed + scheduled[r] - r.prompt_len for r in self.batch]
        positions = torch.tensor([r.computed + scheduled[r] - 1 for r in self.batch])
        logits = CODE0_LOGITS[[r.key for r in self.batch], frames]
        self.sampler.apply_staged_writes()
        unused = torch.zeros_like(slots)
        sampled, _ = self.sampler.sample(logits, slots, slots, slots.numpy(), positions, unused, unused)
        header = self.sampler._sample_random.rows.streams.tensor[0].tolist()
        self.check_code0(sampled.tolist(), self.batch, frames, header)

    def codes(self, request):
        codes = self.state.intermediate_buffer.buffers[self.slots[request]]["codes"]["audio"]
        assert codes.shape == (1, GROUPS)
        return codes[0].tolist()

    def swap_rows(self, i, j):
        if max(i, j) < len(self.batch):
            self.batch[i], self.batch[j] = self.batch[j], self.batch[i]

    def held(self):
        buffer = self.state.intermediate_buffer
        return [*buffer.req_id_to_index, *filter(None, buffer.buffers), *self.state._mtp_generators]
