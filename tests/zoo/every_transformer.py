"""Every model of transformers for a task whose small configuration works: ``python -m tests.zoo --every causal``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.law import Subject, cast_inputs, run_plain
from tests.zoo.transformers_models import SUBJECTS, build, images, mask_tokens, text

__all__ = ["TASKS", "every_subject"]

# task -> transformers' table of its classes, and inputs
TASKS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", text()),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", mask_tokens()),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", text()),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", images()),
}
MOST_PARAMETERS = 10_000_000
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1}
LATENT = "axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla"
# What a configuration needs besides the sizes that all have.
CHANGES: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in LATENT},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16, **MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_next": {"shared_expert_intermediate_size": 16, **LINEAR_ATTENTION},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
}


def every_subject(task: str) -> Iterator[Subject]:
    """Yield the models of a task that are not in the zoo; those that fail as plain modules are named and left out."""
    from transformers.models.auto import modeling_auto

    mapping, inputs = TASKS[task]
    names = {subject.name for subject in SUBJECTS}
    for kind, heads in getattr(modeling_auto, mapping).items():
        head = heads if isinstance(heads, str) else heads[0]
        name = f"{head} ({kind})"
        if name in names:
            continue
        make = functools.partial(build, head, kind, CHANGES.get(kind, {}))
        try:
            with torch.device("meta"):
                module = make()
            if sum(parameter.numel() for parameter in module.parameters()) > MOST_PARAMETERS:
                print(f"{name}: left out, it stays large")
                continue
            run_plain(make().double(), cast_inputs(inputs(), torch.float64), 0)
        except Exception as error:  # a configuration of these sizes doesn't fit the model
            print(f"{name}: left out, {type(error).__name__}")
            continue
        yield Subject(
            name=name, package="transformers", build=make, inputs=inputs, blocks=blocks_of(module), float32_inside=True
        )


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the classes of the modules that lists hold, without layers such as ``Linear``."""
    blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
    return tuple(dict.fromkeys(type(block).__name__ for block in blocks if next(block.children(), None) is not None))
