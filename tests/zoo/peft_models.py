"""Adapters of peft around models of transformers."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from tests.zoo.law import Subject
from tests.zoo.transformers_models import build, text

__all__ = ["SUBJECTS"]


def adapted(config_name: str, options: dict[str, Any]) -> nn.Module:
    import peft

    base = build("LlamaForCausalLM", "llama", {})
    config = getattr(peft, config_name)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(base, config)


TARGETS = {"target_modules": ["q_proj", "v_proj"]}
CONFIGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LoRA", "LoraConfig", {"r": 2, "lora_dropout": 0.1, "init_lora_weights": False, **TARGETS}),
    ("DoRA", "LoraConfig", {"r": 2, "use_dora": True, "init_lora_weights": False, **TARGETS}),
    ("rank-stabilised LoRA", "LoraConfig", {"r": 2, "use_rslora": True, **TARGETS}),
    ("IA3", "IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("LoHa", "LoHaConfig", {"r": 2, "init_weights": False, **TARGETS}),
    ("LoKr", "LoKrConfig", {"r": 2, "init_weights": False, **TARGETS}),
    ("prompt tuning", "PromptTuningConfig", {"num_virtual_tokens": 3}),
    ("prefix tuning", "PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ("p-tuning", "PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
    ("VeRA", "VeraConfig", {"r": 2, **TARGETS}),
    ("BOFT", "BOFTConfig", {"boft_block_size": 4, **TARGETS}),
    ("OFT", "OFTConfig", {"oft_block_size": 4, **TARGETS}),
)
SUBJECTS = tuple(
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
