"""SeededTalker without an engine: the real MTP and hooks over a small predictor with random weights."""

from types import SimpleNamespace

import torch
from predictors import make_predictor, randomise
from torch import nn
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_talker as upstream

from rowseed.vllm_omni.extra_args import stage_parameters
from rowseed.vllm_omni.model_executor.models.qwen3_tts.talker import SeededTalker
from rowseed.vllm_omni.worker.row_packing import bind_rows

UpstreamTalker = upstream.Qwen3TTSTalkerForConditionalGeneration


def make_talker(*, cls=SeededTalker, dtype=torch.float32, subtalker=None, bind=0, **predictor):
    """A talker of vocabulary 96 over 64 codes; ``bind``: rows of the stream buffers, 0 for none."""
    torch.manual_seed(0)
    talker = cls.__new__(cls)
    nn.Module.__init__(talker)
    talker.code_predictor = make_predictor(dtype=dtype, **predictor)
    randomise(talker.code_predictor)
    talker.talker_config = talker.code_predictor.talker_config
    hidden = talker.talker_config.hidden_size
    talker.codec = nn.Embedding(talker.talker_config.vocab_size, hidden, dtype=dtype)
    talker.embed_input_ids = talker.codec.forward
    talker.mtp_hidden_size = hidden
    talker._tts_pad_embed = torch.zeros(1, hidden, dtype=dtype)
    talker._embedding_dtype = dtype
    talker._codebook_vocab_size = talker.code_predictor.config.vocab_size
    talker._stacked_codec_embed = None
    talker._subtalker_sampling_params = talker.mtp_sampling_params = subtalker or {}
    talker._silence_ban_frames = 0
    talker._use_v2_model_runner = True
    talker.talker_mtp_output_key = ("codes", "audio")
    talker.talker_mtp_graph_safe = talker.has_preprocess = True
    talker.talker_mtp_accepts_per_row_generators = True
    talker.gpu_resident_buffer_keys = {("codes", "audio"), ("hidden_states", "last")}
    talker.mtp_sample_uniforms = cls is not SeededTalker
    talker.mtp_sample_steps = int(talker.talker_config.num_code_groups) - 1
    talker.mtp_sample_vocab_size = talker._codebook_vocab_size
    if bind:
        bind_rows(talker, bind, torch.device("cpu"), rank=0, defaults=stage_parameters(subtalker))
    return talker.eval()


def mtp_inputs(talker, ids, seed=1):
    """(ids, embeds, hidden, text) of a frame: each row's tensors depend on its position alone."""
    generator = torch.Generator().manual_seed(seed)
    hidden, text = torch.randn(2, 16, talker.mtp_hidden_size, generator=generator)
    ids = torch.as_tensor(ids)
    dtype = talker._embedding_dtype
    return ids, talker.codec(ids).detach(), hidden[: len(ids)].to(dtype), text[: len(ids)].to(dtype)


def request_params(**extra_args):
    return SimpleNamespace(extra_args=extra_args or None)
