"""Code predictors of any size, ours and vLLM-Omni's, with random weights, and what a frame did inside."""

from types import SimpleNamespace

import torch
from torch import Tensor
from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
    Qwen3TTSTalkerCodePredictorConfig,
    Qwen3TTSTalkerConfig,
)
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code_predictor_vllm import (
    Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM as TheirCodePredictor,
)
from vllm_omni.platforms import current_omni_platform

from rowseed.kernels.sampling import Gather
from rowseed.vllm_omni.model_executor.models.qwen3_tts.code_predictor import SeededCodePredictor

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_code_groups": 6,
}
REAL = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_code_groups": 16,
}

try:
    current_omni_platform.supports_torch_inductor()
except NotImplementedError:  # no platform plugin: the fallback platform leaves this one question open
    type(current_omni_platform).supports_torch_inductor = classmethod(lambda cls: False)


def make_predictor(
    cls: type = SeededCodePredictor,
    *,
    talker_hidden: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_num_seqs: int = 8,
    **config: object,
) -> SeededCodePredictor:
    config = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, **(config or TINY)}
    predictor_config = Qwen3TTSTalkerCodePredictorConfig(**config)
    talker_config = Qwen3TTSTalkerConfig(
        code_predictor_config=predictor_config.to_dict(),
        vocab_size=96,
        hidden_size=talker_hidden or predictor_config.hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_code_groups=predictor_config.num_code_groups,
        text_hidden_size=48,
    )
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(stage_connector_config=None),
    )
    predictor = cls(vllm_config=vllm_config, config=predictor_config, talker_config=talker_config)
    return predictor.to(dtype).eval()


def randomise(predictor: SeededCodePredictor, seed: int = 0) -> None:
    """Norm weights off one and embeddings of varied size, so that no weight can be forgotten unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in predictor.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))


def frame_inputs(rows: int, hidden: int, dtype: torch.dtype = torch.float32, seed: int = 1, vocab: int = 64):
    generator = torch.Generator().manual_seed(seed)
    code0 = torch.randint(0, vocab, (rows, 1), generator=generator)
    embed, talker = torch.randn(2, rows, 1, hidden, generator=generator).to(dtype).unbind()
    return code0, embed, talker


def teacher_forced(predictor: SeededCodePredictor, inputs: tuple[Tensor, ...], codes: Tensor) -> Tensor:
    """Our logits [B, Q - 1, V] where the codes are the given int64 [B, Q]."""
    logits_of = []

    def force(codebook: int, logits: Tensor, out: Tensor, gather: Gather) -> None:
        logits_of.append(logits.float().clone())
        out.copy_(codes[:, codebook])
        gather.total.add_(gather.table[codes[:, codebook]].float())
        if gather.next_table is not None:
            gather.next_input.copy_(gather.next_table[codes[:, codebook]])

    rows = codes.shape[0]
    code0, embed, hidden = (tensor.reshape(rows, -1) for tensor in inputs)
    with torch.inference_mode():
        predictor.prepare(rows).run(code0[:, 0], embed, hidden, force)
    return torch.stack(logits_of, 1)


def their_teacher_forced(predictor: TheirCodePredictor, inputs: tuple[Tensor, ...], codes: Tensor) -> Tensor:
    """vLLM-Omni's logits for the same: its transformer once over the whole sequence."""
    rows = codes.shape[0]
    _, embed, hidden = (tensor.reshape(rows, -1) for tensor in inputs)
    embeddings = predictor.model.codec_embedding
    with torch.inference_mode():
        residual = [table(codes[:, i + 1]) for i, table in enumerate(embeddings[:-1])]
        x = predictor.small_to_mtp_projection(torch.stack((hidden, embed, *residual), 1))
        positions = torch.arange(x.shape[1], device=x.device).expand(rows, -1)
        y = predictor.model.forward(x, positions)
        return torch.stack([head(y[:, i + 1]) for i, head in enumerate(predictor.lm_head)], 1).float()
