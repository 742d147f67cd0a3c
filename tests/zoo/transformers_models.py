"""Models of transformers, small, from configurations alone, and adapters of peft around one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.law import Subject

__all__ = ["ADAPTERS", "SUBJECTS"]

TOKENS = 60
# Whatever a configuration calls its sizes: those that it has are set.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "vision_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "state_size", "time_step_rank"), 4),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size", "eos_token_id"), 2),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("patch_size", "num_mel_bins"), 8),
    "vocab_size": 64,
    "hidden_dim": 48,
    "image_size": 16,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "experts_implementation": "eager",  # grouped products have no float64
}


def small_config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a family with small sizes."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    aliases = getattr(config_class, "attribute_map", {})
    known = set(config_class().to_dict()) | {"experts_implementation"}
    sizes = {key: value for key, value in SIZES.items() if key in known and key not in aliases}
    config = config_class(**sizes | changes)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    return config


def build(head: str, kind: str, changes: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, head)(small_config(kind, **changes))


def tokens() -> torch.Tensor:
    return torch.randint(3, TOKENS, (2, 8))


def text(**more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        ids = tokens()
        return {"input_ids": ids, "labels": ids.clone(), "output_hidden_states": True, **more}

    return make


def images(size: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "output_hidden_states": True}


def subject(kind: str, head: str, inputs: Callable[[], dict[str, Any]], blocks: str, **changes: Any) -> Subject:
    return Subject(
        name=f"{head} ({kind})",
        package="transformers",
        build=functools.partial(build, head, kind, changes),
        inputs=inputs,
        blocks=tuple(blocks.split()),
        float32_inside=True,
    )


def mask_tokens(**more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        attention_mask = torch.ones(2, 8, dtype=torch.long)
        attention_mask[0, 6:] = 0
        return text(**more)() | {"attention_mask": attention_mask}

    return make


def audio() -> dict[str, Any]:
    labels = tokens()
    return {"input_features": torch.randn(2, 8, 64), "labels": labels, "output_hidden_states": True}


def wave() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 800), "output_hidden_states": True}


ATTENTION = {"output_attentions": True}
ROUTER = {"output_router_logits": True}
EAGER = {"attn_implementation": "eager"}

# (family, class, inputs, classes of blocks, changes of the configuration)
CAUSAL = (
    ("llama", "LlamaForCausalLM", text(**ATTENTION), "LlamaDecoderLayer", EAGER),
    ("mixtral", "MixtralForCausalLM", text(**ROUTER), "MixtralDecoderLayer", {}),
    ("qwen2", "Qwen2ForCausalLM", mask_tokens(), "Qwen2DecoderLayer", {}),
    ("qwen3", "Qwen3ForCausalLM", text(**ATTENTION), "Qwen3DecoderLayer", EAGER),
    ("qwen3_moe", "Qwen3MoeForCausalLM", text(**ROUTER), "Qwen3MoeDecoderLayer", {}),
    ("qwen2_moe", "Qwen2MoeForCausalLM", text(**ROUTER), "Qwen2MoeDecoderLayer", {"shared_expert_intermediate_size": 16}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", text(), "DeepseekV3DecoderLayer", {"num_key_value_heads": 4}),
    ("olmoe", "OlmoeForCausalLM", text(**ROUTER), "OlmoeDecoderLayer", {}),
    ("gemma2", "Gemma2ForCausalLM", text(**ATTENTION), "Gemma2DecoderLayer", EAGER),
    ("gemma3_text", "Gemma3ForCausalLM", text(), "Gemma3DecoderLayer", {}),
    ("phi", "PhiForCausalLM", text(), "PhiDecoderLayer", {}),
    ("gpt2", "GPT2LMHeadModel", text(**ATTENTION), "GPT2Block", EAGER),
    ("gpt_neox", "GPTNeoXForCausalLM", text(), "GPTNeoXLayer", {}),
    ("gpt_oss", "GptOssForCausalLM", text(**ROUTER), "GptOssDecoderLayer", {}),
    ("opt", "OPTForCausalLM", text(), "OPTDecoderLayer", {}),
    ("bloom", "BloomForCausalLM", text(), "BloomBlock", {}),
    ("falcon", "FalconForCausalLM", text(), "FalconDecoderLayer", {}),
    ("mpt", "MptForCausalLM", text(), "MptBlock", {}),
    ("mamba", "MambaForCausalLM", text(), "MambaBlock", {}),
    ("phimoe", "PhimoeForCausalLM", text(**ROUTER), "PhimoeDecoderLayer", {}),
    ("rwkv", "RwkvForCausalLM", text(), "RwkvBlock", {}),
    ("lfm2", "Lfm2ForCausalLM", text(), "Lfm2DecoderLayer", {}),
    ("xlnet", "XLNetLMHeadModel", text(), "XLNetLayer", {}),
    ("modernbert-decoder", "ModernBertDecoderForCausalLM", text(), "ModernBertDecoderLayer", {}),
)
MASKED = (
    ("bert", "BertForMaskedLM", mask_tokens(**ATTENTION), "BertLayer", EAGER),
    ("albert", "AlbertForMaskedLM", text(), "AlbertLayer", {}),
    ("distilbert", "DistilBertForMaskedLM", text(), "TransformerBlock", {}),
    ("deberta-v2", "DebertaV2ForMaskedLM", text(), "DebertaV2Layer", {}),
    ("modernbert", "ModernBertForMaskedLM", text(), "ModernBertEncoderLayer", {}),
    ("esm", "EsmForMaskedLM", text(), "EsmLayer", {"mask_token_id": 4}),
    ("longformer", "LongformerForMaskedLM", text(), "LongformerLayer", {"attention_window": [4, 4]}),
    ("convbert", "ConvBertForMaskedLM", text(), "ConvBertLayer", {}),
    ("fnet", "FNetForMaskedLM", text(), "FNetLayer", {}),
)
ENCODER_DECODER = (
    ("t5", "T5ForConditionalGeneration", text(**ATTENTION), "T5Block", EAGER),
    ("bart", "BartForConditionalGeneration", text(**ATTENTION), "BartEncoderLayer BartDecoderLayer", EAGER),
    ("led", "LEDForConditionalGeneration", text(), "LEDEncoderLayer LEDDecoderLayer", {"attention_window": [4, 4]}),
    ("nllb-moe", "NllbMoeForConditionalGeneration", text(), "NllbMoeEncoderLayer NllbMoeDecoderLayer", {}),
    ("switch_transformers", "SwitchTransformersForConditionalGeneration", text(**ROUTER), "SwitchTransformersBlock", {}),
    ("whisper", "WhisperForConditionalGeneration", audio, "WhisperEncoderLayer WhisperDecoderLayer", {}),
)
VISION = (
    ("vit", "ViTForImageClassification", images(), "ViTLayer", {}),
    ("dinov2", "Dinov2ForImageClassification", images(), "Dinov2Layer", {}),
    ("swinv2", "Swinv2ForImageClassification", images(32), "Swinv2Layer", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    }),
    ("beit", "BeitForImageClassification", images(), "BeitLayer", {"use_relative_position_bias": True}),
    ("resnet", "ResNetForImageClassification", images(32), "ResNetBasicLayer", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
    }),
    ("convnext", "ConvNextForImageClassification", images(32), "ConvNextLayer", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2,
    }),
)  # fmt: skip
SPEECH = (
    ("wav2vec2", "Wav2Vec2Model", wave, "Wav2Vec2EncoderLayer", {
        "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 2], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
        "layerdrop": 0.0,
    }),
)  # fmt: skip
SUBJECTS = tuple(subject(*row[:4], **row[4]) for row in (*CAUSAL, *MASKED, *ENCODER_DECODER, *VISION, *SPEECH))


def adapted(config_name: str, options: dict[str, Any]) -> nn.Module:
    import peft

    base = build("LlamaForCausalLM", "llama", {})
    config = getattr(peft, config_name)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(base, config)


TARGETS = {"target_modules": ["q_proj", "v_proj"]}
CONFIGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LoRA", "LoraConfig", {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False, **TARGETS}),
    ("DoRA", "LoraConfig", {"r": 2, "use_dora": True, "init_lora_weights": False, **TARGETS}),
    ("IA3", "IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("LoHa", "LoHaConfig", {"r": 2, "init_weights": False, **TARGETS}),
    ("LoKr", "LoKrConfig", {"r": 2, "init_weights": False, **TARGETS}),
    ("prompt tuning", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    ("prefix tuning", "PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ("VeRA", "VeraConfig", {"r": 2, **TARGETS}),
    ("BOFT", "BOFTConfig", {"boft_block_size": 4, **TARGETS}),
    ("OFT", "OFTConfig", {"oft_block_size": 4, **TARGETS}),
)
ADAPTERS = tuple(
    Subject(
        name=f"{name} on Llama",
        package="peft",
        build=functools.partial(adapted, config_name, options),
        inputs=text(),
        blocks=("LlamaDecoderLayer",),
        float32_inside=True,
    )
    for name, config_name, options in CONFIGS
)
