"""A complete Qwen3-TTS checkpoint of a few megabytes, made here: no download, equal bytes each time.

It has the real architecture, vocabularies and codebooks (16 of 2048 codes) around a small hidden size, and
random weights: it speaks noise. The codec's decoder is scaled so that the noise is as loud as speech; with
plain initialisation its codebooks are zero and every waveform is silent, whatever the codes.

Usage: python examples/tiny_checkpoint.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (
    Qwen3TTSTokenizerV2Config,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import (
    Qwen3TTSTokenizerV2Model,
)

SEED = 2026
CODEBOOKS = 16
CODES = 2048
HIDDEN = 64
TEXT_VOCAB = 512
CODEC_VOCAB = 3072  # the codes of codebook 0, then the control tokens below
END_OF_SPEECH = 2150

TRANSFORMER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}

CONFIG = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "model_type": "qwen3_tts",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
    "tts_model_size": "0b6",
    "tts_model_type": "custom_voice",
    "talker_config": {
        **TRANSFORMER,
        "vocab_size": CODEC_VOCAB,
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": [8, 4, 4],
            "rope_type": "default",
            "type": "default",
        },
        "num_code_groups": CODEBOOKS,
        "text_hidden_size": HIDDEN,
        "text_vocab_size": TEXT_VOCAB,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": END_OF_SPEECH,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": {"english": 2050, "german": 2053, "chinese": 2055},
        "position_id_per_seconds": 13,
        "spk_id": {"vivian": 3065},
        "spk_is_dialect": {"vivian": False},
        "code_predictor_config": {
            **TRANSFORMER,
            "vocab_size": CODES,
            "num_code_groups": CODEBOOKS,
            "max_position_embeddings": 65536,
        },
    },
    "speaker_encoder_config": {"enc_dim": HIDDEN, "sample_rate": 24000},
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "assistant_token_id": 3,
    "tts_pad_token_id": TEXT_VOCAB - 3,
    "tts_bos_token_id": TEXT_VOCAB - 2,
    "tts_eos_token_id": TEXT_VOCAB - 1,
}

GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "eos_token_id": END_OF_SPEECH,
    "max_new_tokens": 64,
}

CODEC_ENCODER = {
    "model_type": "mimi",
    "hidden_size": 32,
    "num_filters": 4,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 6, 5, 4],
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "codebook_size": CODES,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": CODEBOOKS,
    "num_semantic_quantizers": 1,
    "frame_rate": 12.5,
    "upsample_groups": 32,
    "sampling_rate": 24000,
    "use_causal_conv": True,
    "sliding_window": 250,
    "max_position_embeddings": 8000,
}

CODEC_DECODER = {
    "codebook_size": CODES,
    "semantic_codebook_size": CODES,
    "num_quantizers": CODEBOOKS,
    "num_semantic_quantizers": 1,
    "hidden_size": 32,
    "latent_dim": 32,
    "codebook_dim": 32,
    "decoder_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "max_position_embeddings": 8000,
    "rope_theta": 10000,
}

FEATURE_EXTRACTOR = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
    "chunk_length_s": None,
    "overlap": None,
}


def transformer_shapes(prefix: str, config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3 decoder's layers and last norm."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"{prefix}.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    return shapes


def talker_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the talker's tensors, its code predictor's included, as Qwen publishes them."""
    predictor = config["code_predictor_config"]
    hidden, text = config["hidden_size"], config["text_hidden_size"]
    shapes = {
        "talker.model.codec_embedding.weight": (config["vocab_size"], hidden),
        "talker.model.text_embedding.weight": (config["text_vocab_size"], text),
        "talker.text_projection.linear_fc1.weight": (text, text),
        "talker.text_projection.linear_fc1.bias": (text,),
        "talker.text_projection.linear_fc2.weight": (hidden, text),
        "talker.text_projection.linear_fc2.bias": (hidden,),
        "talker.codec_head.weight": (config["vocab_size"], hidden),
        **transformer_shapes("talker.model", config),
        **transformer_shapes("talker.code_predictor.model", predictor),
    }
    for codebook in range(config["num_code_groups"] - 1):
        codes = (predictor["vocab_size"], hidden)
        shapes[f"talker.code_predictor.model.codec_embedding.{codebook}.weight"] = codes
        shapes[f"talker.code_predictor.lm_head.{codebook}.weight"] = codes
    return shapes


def talker_weights(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights: norms 1, biases 0, the rest normal with sd 1 / sqrt(fan in)."""
    weights = {}
    for name, shape in talker_shapes(config).items():
        if "norm" in name:
            weight = torch.ones(shape)
        elif name.endswith("bias"):
            weight = torch.zeros(shape)
        else:
            weight = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        weights[name] = weight.to(torch.bfloat16)
    return weights


def codec_weights(config: Qwen3TTSTokenizerV2Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights of the codec; codebooks normal, the decoder scaled to speech-loud noise (sd about 0.15)."""
    weights = {
        name: tensor.contiguous().clone()
        for name, tensor in Qwen3TTSTokenizerV2Model(config).state_dict().items()
    }
    for name, tensor in weights.items():
        if name.endswith(("embedding_sum", "embed_sum")):
            weights[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        elif name.startswith("decoder.") and name.endswith("weight") and tensor.ndim >= 2:
            transposed = "transpose" in name.lower()
            fan_in = tensor.shape[0] * tensor[0, 0].numel() if transposed else tensor[0].numel()
            # The last convolution, to one channel, sets the volume.
            gain = 0.02 if tensor.ndim == 3 and tensor.shape[0] == 1 else 1.0
            scaled = torch.randn(tensor.shape, generator=generator) * (gain / fan_in**0.5)
            weights[name] = scaled.to(tensor.dtype)
    return weights


def text_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after Qwen's special tokens; every text can be read."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "assistant"]
    vocab = {token: index for index, token in enumerate(specials)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(character, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "assistant"],
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint to `folder`, unless it is there; returns `folder`."""
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    codec_folder = partial / "speech_tokenizer"
    codec_folder.mkdir(parents=True)
    torch.manual_seed(SEED)  # for the parts of the codec that keep their own initialisation
    generator = torch.Generator().manual_seed(SEED)

    write_json(partial / "config.json", CONFIG)
    write_json(partial / "generation_config.json", GENERATION_CONFIG)
    weights = talker_weights(CONFIG["talker_config"], generator)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    text_tokenizer().save_pretrained(partial)

    codec = Qwen3TTSTokenizerV2Config(encoder_config=CODEC_ENCODER, decoder_config=CODEC_DECODER)
    save_file(codec_weights(codec, generator), codec_folder / "model.safetensors", metadata={"format": "pt"})
    architecture = {"architectures": ["Qwen3TTSTokenizerV2Model"]}
    write_json(codec_folder / "config.json", json.loads(codec.to_json_string(use_diff=False)) | architecture)
    write_json(codec_folder / "preprocessor_config.json", FEATURE_EXTRACTOR)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(make_checkpoint(Path(sys.argv[1])))
