"""What the draws of both runners read: the batch and its requests, over vLLM's own samplers."""

from types import SimpleNamespace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.worker import code0_v1

PROMPT_LEN, MAX_LEN = 3, 64
CPU = torch.device("cpu")


def vllm_config(max_rows=64, **others):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        **others,
    )


def talker(**others):
    declared = {"talker_mtp_seed_extra_arg": "tts_local_seed", "talker_mtp_accepts_row_streams": True}
    return SimpleNamespace(**declared, **others)


def light_v1(params, frames=0, *, bind=True, sampler=None, device=CPU, **others):
    """A V1 runner with a row for each of `params`, at these frames; only its draw can be called."""
    rows = len(params)
    names = [f"r{row}" for row in range(rows)]
    runner = SimpleNamespace(
        model=talker(talker_mtp_row_streams=RowStreams(rows, device)),
        sampler=Sampler() if sampler is None else sampler,
        vllm_config=vllm_config(rows),
        speculative_config=None,
        requests={name: SimpleNamespace(sampling_params=p) for name, p in zip(names, params, strict=True)},
        query_start_loc=SimpleNamespace(cpu=torch.arange(rows + 1, dtype=torch.int32)),
        input_batch=SimpleNamespace(
            num_reqs=rows,
            req_ids=names,
            num_prompt_tokens=np.full(rows, PROMPT_LEN, np.int32),
            num_computed_tokens_cpu=np.full(rows, PROMPT_LEN - 1, np.int32) + np.asarray(frames, np.int32),
        ),
    )
    for name, value in others.items():
        setattr(runner, name, value)
    if bind:
        code0_v1.bind(runner)
    return runner


def batch_v1(params, vocabulary, outputs=()):
    """As `light_v1`, with a real InputBatch: the whole sampler can be called. Not bound."""
    config = vllm_config(len(params))
    processors = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    batch = InputBatch(
        max_num_reqs=len(params),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_LEN,
        device=CPU,
        vocab_size=vocabulary,
        block_sizes=[MAX_LEN],
        kernel_block_sizes=[MAX_LEN],
        max_num_blocks_per_req=[1],
        logitsprocs=LogitsProcessors([made(config, CPU, False) for made in processors]),
    )
    runner = light_v1(params, len(outputs), bind=False, input_batch=batch)
    for name, request in runner.requests.items():
        batch.add_request(
            CachedRequestState(
                req_id=name,
                prompt_token_ids=[1, 2, 3],
                mm_features=[],
                sampling_params=request.sampling_params,
                generator=None,
                block_ids=([0],),
                num_computed_tokens=PROMPT_LEN + len(outputs) - 1,
                output_token_ids=list(outputs),
            )
        )
    batch.refresh_metadata()
    return runner


def seeded(*seeds, **params):
    """One SamplingParams a seed, None for none; seeds as the HTTP field sets them."""
    return [
        SamplingParams(seed=seed, extra_args=None if seed is None else {"tts_local_seed": seed}, **params)
        for seed in seeds
    ]


def draw_v1(runner, logits, k=None, p=None, generators=None):
    """Tokens, a list."""
    generators = {} if generators is None else generators
    return runner.sampler.topk_topp_sampler(logits.clone(), generators, k, p)[0].tolist()
