"""The table of docs/how-many-gpus.md: the fewest GPUs on which a model trains.

    python -m website.gpus           # writes the table into the page, in minutes
    python -m website.gpus t5 yi     # prints the rows of models whose names contain these words

Configurations are those of the models' cards, with transformers' defaults for the rest.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from funcshard._utils.process_state import without_collection
from funcshard.checkpoint import default_units, module_of_config
from funcshard.estimate import Profile, Report, Space, load_hardware
from funcshard.planning import PRECISIONS, plan_within, trace

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-many-gpus.md"
GPUS = {"a100-40gb": "A100 40 GB", "a100-80gb": "A100 80 GB", "h100": "H100 80 GB", "b200": "B200"}
MARGIN = 3 * 2**30  # that of plan_run
SEQ = 4096
MOST = 4096  # GPUs

LLAMA3 = {"num_key_value_heads": 8, "vocab_size": 128256}
QWEN = {"vocab_size": 152064, "num_key_value_heads": 8}
MISTRAL = {"num_key_value_heads": 8, "vocab_size": 131072, "head_dim": 128}
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
WHISPER = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
    "vocab_size": 51866,
}  # fmt: skip

# Name: model_type, hidden size, size of the MLP, layers, heads, other fields, tokens of a sample.
MODELS: dict[str, tuple[str, int, int, int, int, dict[str, Any], int]] = {
    "BERT large": ("bert", 1024, 4096, 24, 16, {}, 512),
    "Qwen2.5 0.5B": ("qwen2", 896, 4864, 24, 14, {"num_key_value_heads": 2, "tie_word_embeddings": True}, SEQ),
    "Llama 3.2 1B": ("llama", 2048, 8192, 16, 32, {**LLAMA3, "tie_word_embeddings": True}, SEQ),
    "Whisper large v3": ("whisper", 0, 0, 0, 0, WHISPER, 448),
    "SmolLM2 1.7B": ("llama", 2048, 8192, 24, 32, {"vocab_size": 49152, "tie_word_embeddings": True}, SEQ),
    "Llama 3.2 3B": ("llama", 3072, 8192, 28, 24, {**LLAMA3, "tie_word_embeddings": True}, SEQ),
    "Phi-3 mini": ("phi3", 3072, 8192, 32, 32, {"vocab_size": 32064}, SEQ),
    "Mistral 7B": ("mistral", 4096, 14336, 32, 32, {**MISTRAL, "vocab_size": 32768}, SEQ),
    "OLMo 2 7B": ("olmo2", 4096, 11008, 32, 32, {"vocab_size": 100352}, SEQ),
    "Qwen2.5 7B": ("qwen2", 3584, 18944, 28, 28, {**QWEN, "num_key_value_heads": 4}, SEQ),
    "Llama 3.1 8B": ("llama", 4096, 14336, 32, 32, LLAMA3, SEQ),
    "Qwen3 8B": ("qwen3", 4096, 12288, 36, 32, {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}, SEQ),
    "Gemma 2 9B": ("gemma2", 3584, 14336, 42, 16, {"num_key_value_heads": 8, "head_dim": 256}, SEQ),
    "T5 v1.1 XXL": ("t5", 0, 0, 24, 64, {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_decoder_layers": 24,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 512),
    "Mistral Nemo 12B": ("mistral", 5120, 14336, 40, 32, MISTRAL, SEQ),
    "Llama 2 13B": ("llama", 5120, 13824, 40, 40, {}, SEQ),
    "Phi-4": ("phi3", 5120, 17920, 40, 40, {"num_key_value_heads": 10, "vocab_size": 100352}, SEQ),
    "Qwen3 14B": ("qwen3", 5120, 17408, 40, 40, {"num_key_value_heads": 8, "head_dim": 128}, SEQ),
    "GPT-NeoX 20B": ("gpt_neox", 6144, 24576, 44, 64, {"vocab_size": 50432}, 2048),
    "Mistral Small 24B": ("mistral", 5120, 32768, 40, 32, MISTRAL, SEQ),
    "Gemma 2 27B": ("gemma2", 4608, 36864, 46, 32, {"num_key_value_heads": 16, "head_dim": 128}, SEQ),
    "Qwen3 30B-A3B": ("qwen3_moe", 2048, 6144, 48, 32, {**MOE, "num_key_value_heads": 4, "head_dim": 128}, SEQ),
    "Qwen2.5 32B": ("qwen2", 5120, 27648, 64, 40, QWEN, SEQ),
    "Yi 34B": ("llama", 7168, 20480, 60, 56, {"num_key_value_heads": 8, "vocab_size": 64000}, SEQ),
    "Falcon 40B": ("falcon", 8192, 32768, 60, 128, {"num_kv_heads": 8, "new_decoder_architecture": True}, 2048),
    "Mixtral 8x7B": ("mixtral", 4096, 14336, 32, 32, {"num_key_value_heads": 8}, SEQ),
    "Llama 3.1 70B": ("llama", 8192, 28672, 80, 64, LLAMA3, SEQ),
    "Qwen2.5 72B": ("qwen2", 8192, 29568, 80, 64, QWEN, SEQ),
    "Mixtral 8x22B": ("mixtral", 6144, 16384, 56, 48, {"num_key_value_heads": 8, "vocab_size": 32768}, SEQ),
    "Llama 3.1 405B": ("llama", 16384, 53248, 126, 128, LLAMA3, SEQ),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    """Return a model on the meta device."""
    model_type, hidden, inner, layers, heads, others, _ = MODELS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = {name: size for name, size in sizes.items() if size} | {"model_type": model_type, **others}
    if model_type == "t5":
        config |= {"num_layers": layers, "num_heads": heads}
    with tempfile.TemporaryDirectory() as folder, without_collection():
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        return module_of_config(file)


def fewest(profile: Profile, gpu: str, units: list[str], parameters: int) -> Report | None:
    """Return the estimate of the smallest power of 2 of GPUs on which a step fits."""
    hardware = load_hardware(gpu)
    budget = hardware.memory - MARGIN
    count = 1
    while count <= MOST:
        # Note: weights and AdamW's states take 12 bytes a parameter, so fewer GPUs can't hold them.
        if 12 * parameters <= count * budget:
            space = Space(meshes=((1, count),), strategies=("full_shard",), kept=0, remat=8)
            best = plan_within(
                budget, profile, ranks=count, hardware=hardware, optimizer="adamw_fused", units=units, space=space
            )
            if best.fits:
                return best.report
        count *= 2
    return None


def rows(names: list[str]) -> Iterator[str]:
    """Yield a row of the table for each model."""
    for name in names:
        module, seq = model_of(name), MODELS[name][-1]
        parameters = sum(param.numel() for param in module.parameters())
        profile = trace(module, 1, seq, precision=PRECISIONS["bf16"])
        cells = [name, f"{parameters / 1e9:.3g}", f"{seq:,}"]
        for gpu in GPUS:
            report = fewest(profile, gpu, default_units(module, ends=True), parameters)
            cells.append("–")
            if report is not None:
                remat = "" if not report.options["remat"] else " r"
                cells[-1] = f"**{report.plan.world_size:,}**{remat}<br>{seq / report.step_time:,.0f}"
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the table, or print some rows."""
    words = sys.argv[1:]
    chosen = [name for name in MODELS if not words or any(word.lower() in name.lower() for word in words)]
    lines = []
    for row in rows(chosen):
        print(row, flush=True)
        lines.append(row)
    if not words:
        before, _, rest = PAGE.read_text().partition("<!-- table: begin -->\n")
        after = rest.partition("<!-- table: end -->")[2]
        header = f"| model | billions | tokens | {' | '.join(GPUS.values())} |\n|---|--:|--:|{'--:|' * len(GPUS)}\n"
        PAGE.write_text(before + "<!-- table: begin -->\n" + header + "\n".join(lines) + "\n<!-- table: end -->" + after)


if __name__ == "__main__":
    main()
