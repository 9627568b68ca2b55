"""What the draw of the V2 runner reads, over vLLM's own sampler."""

from types import SimpleNamespace

import numpy as np
import torch
from code0_runners import CPU, PROMPT_LEN, talker, vllm_config
from v2_runner import OmniModelState, make_sampler

from rowseed.vllm_omni.worker import code0_v2

V, SLOTS = 64, 64


class Runner:
    """vLLM's sampler with the requests of a batch, in slots that are no row numbers."""

    def __init__(
        self, params, frames=0, *, model=None, sampler=None, slots=SLOTS, vocabulary=V, device=CPU, **config
    ):
        rows = len(params)
        self.sampler = make_sampler(slots, vocabulary, device) if sampler is None else sampler
        self.state = object.__new__(OmniModelState)
        self.state.model = talker() if model is None else model
        self.state.vllm_config = vllm_config(slots, **config)
        self.state.device, self.state.max_num_reqs = device, slots
        self.state.intermediate_buffer = SimpleNamespace(buffers=[{} for _ in range(slots)])
        self.slots = np.arange(slots)[::-1][:rows].copy()
        for row, slot in enumerate(self.slots):
            self.sampler.req_states.prompt_len.np[slot] = PROMPT_LEN
            self.sampler.add_request(slot, PROMPT_LEN, params[row])
            self.state.intermediate_buffer.buffers[slot] = {
                "req_id": f"r{row}",
                "sampling_params": params[row],
            }
        self.sampler.apply_staged_writes()
        self.on_device = torch.from_numpy(self.slots).to(device)
        self.unused = torch.zeros_like(self.on_device)
        self.positions = (torch.full((rows,), PROMPT_LEN - 1) + torch.as_tensor(frames)).to(device)
        self.custom = self.state.custom_sampler(self.sampler)

    @property
    def joined(self):
        return isinstance(self.sampler._sample_random, code0_v2.V2Draw)

    def draw(self, logits):
        """vLLM's step from logits [rows, V] on, which it may change: (tokens, processed logits)."""
        slots = self.on_device
        return self.sampler.sample(logits, slots, slots, self.slots, self.positions, self.unused, self.unused)
