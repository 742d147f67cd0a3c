"""Three calls are as one: no call of a model that others wrote leaves anything for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "d_kv": 8,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "image_size": 16,
    "patch_size": 8, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_labels": 3,
}  # fmt: skip
_OPTIONS = ("output_hidden_states", "output_attentions", "output_router_logits")
_FAMILIES = [
    "LlamaForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "PhimoeForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM",
    "BloomForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM", "MambaForCausalLM", "BertForSequenceClassification",
    "DebertaV2Model", "LongformerModel", "ModernBertModel", "T5ForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration", "BartForConditionalGeneration", "LEDForConditionalGeneration",
    "NllbMoeForConditionalGeneration", "ViTForImageClassification", "BeitModel", "CLIPVisionModel",
    "WhisperForConditionalGeneration", "Wav2Vec2Model",
]  # fmt: skip


def _build(name: str) -> nn.Module:
    cls = getattr(transformers, name)
    default = cls.config_class()
    sizes = {key: value for key, value in _SIZES.items() if isinstance(getattr(default, key, ()), int | None)}
    torch.manual_seed(0)
    model: nn.Module = cls(cls.config_class(**sizes, attn_implementation="eager")).eval()
    return model


def _inputs(model: Any, seed: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (2, 8), generator=draws)
    name, config = model.main_input_name, model.config
    shapes = {"pixel_values": (2, 3, 16, 16), "input_features": (2, 8, 32), "input_values": (2, 4000)}
    inputs: dict[str, Any] = {name: torch.randn(shapes[name], generator=draws) if name in shapes else ids}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    options = [key for key in _OPTIONS if key != "output_router_logits" or hasattr(config, key)]
    return inputs | dict.fromkeys(options, True)


def _flat(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    return [tensor for value in values for tensor in _flat(value)]


def _equal(a: Any, b: Any) -> bool:
    one, two = _flat(a), _flat(b)
    return len(one) == len(two) > 1 and all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def _sizes(root: nn.Module) -> list[Any]:
    """Return how much each module below ``root`` holds: its attributes, and the lengths of those."""
    lengths = [{k: len(v) for k, v in m.__dict__.items() if isinstance(v, dict | list | set)} for m in root.modules()]
    return [(sorted(m.__dict__), each) for m, each in zip(root.modules(), lengths, strict=True)]


def _layers(model: nn.Module) -> list[str]:
    """Return the paths of the layers that the model keeps in a ModuleList."""
    lists = [(path, m) for path, m in model.named_modules() if type(m) is nn.ModuleList]
    return [f"{path}.{name}" for path, m in lists for name, layer in m.named_children() if [*layer.named_children()]]


@pytest.mark.parametrize("name", _FAMILIES)
@torch.no_grad()
def test_three_calls_with_all_outputs_are_as_one(name: str) -> None:
    model = _build(name)
    apply, params, buffers = fs.make_functional(model)
    inputs, before = _inputs(model, 0), (_sizes(model), _sizes(apply.skeleton.template))
    outs = [apply(params, buffers, **inputs) for _ in range(3)]
    assert (_sizes(model), _sizes(apply.skeleton.template)) == before
    assert _equal(outs[0], model(**inputs))
    assert _equal(outs[0], outs[1])
    assert _equal(outs[0], outs[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", _FAMILIES)
@torch.no_grad()
def test_three_sharded_calls_are_as_one_on_each_rank(name: str) -> None:
    model = _build(name)
    apply, params, buffers = fs.make_functional(model)
    before = _sizes(apply.skeleton.template)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, units=_layers(model))
        sharded = fs.fully_shard(apply, plan, mesh)
        shards, inputs = fs.shard(params, plan, mesh), _inputs(model, mesh.rank)
        outs = [sharded(shards, buffers, **inputs) for _ in range(3)]
        assert _equal(outs[0], outs[1])
        assert _equal(outs[0], outs[2])
        torch.testing.assert_close(_flat(outs[0]), _flat(apply(params, buffers, **inputs)))

    fs.simulate(main, world_size=2)
    assert _sizes(apply.skeleton.template) == before


@pytest.mark.filterwarnings("ignore:.*:FutureWarning:transformers")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_each_rank_runs_the_adapters_that_it_names(strategy: str) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_build("LlamaForCausalLM"), lora, adapter_name="first").eval()
    model.add_adapter("second", lora)
    ids = torch.arange(3, 13).view(2, 5)
    names = [["first", "second"], ["second", "__base__"]]  # of the samples of each rank
    meant = [model(ids, adapter_names=rank_names).logits for rank_names in names]
    assert not torch.equal(*meant)
    apply, params, buffers = fs.make_functional(model)

    def logits(mesh: fs.Mesh) -> list[torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=["base_model.model.model.layers.*"], strategy=strategy)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        return [sharded(shards, buffers, ids, adapter_names=names[mesh.rank]).logits for _ in range(3)]

    for calls, rank_logits in zip(fs.simulate(logits, world_size=2), meant, strict=True):
        assert all(torch.equal(call, rank_logits) for call in calls)
