"""Plans of whole runs: of every architecture, with figures that agree with an estimate of the plan."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.__main__ import main
from funcshard.estimate import load_hardware

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
           "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "decoder_start_token_id": 1}  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

# By model_type: fields beside SIZES, and the repeated blocks.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "model.layers."),
    "mistral": ({}, "model.layers."),
    "qwen2": ({}, "model.layers."),
    "qwen3": ({"head_dim": 8}, "model.layers."),
    "gemma2": ({"head_dim": 8}, "model.layers."),
    "phi3": ({}, "model.layers."),
    "olmo2": ({}, "model.layers."),
    "granite": ({}, "model.layers."),
    "cohere": ({}, "model.layers."),
    "mixtral": ({"num_local_experts": 4}, "model.layers."),
    "qwen3_moe": ({**EXPERTS, "head_dim": 8}, "model.layers."),
    "gpt2": (GPT, "transformer.h."),
    "gpt_neox": ({}, "gpt_neox.layers."),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "model.decoder.layers."),
    "bloom": ({"n_layer": 3, "n_head": 4}, "transformer.h."),
    "falcon": ({"num_kv_heads": 4}, "transformer.h."),
    "bert": ({}, "bert.encoder.layer."),
    "roberta": ({}, "roberta.encoder.layer."),
    "t5": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}, "encoder.block."),
    "bart": (SEQ2SEQ, "model.encoder.layers."),
    "whisper": ({**SEQ2SEQ, "max_source_positions": 16, "max_target_positions": 16}, "model.encoder.layers."),
    "vit": (IMAGE, "vit.layers."),
    "wav2vec2": ({"apply_spec_augment": False, "conv_dim": [8] * 7}, "encoder.layers."),
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(model_type: str = "llama", **fields: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **SIZES, **MODELS.get(model_type, ({}, ""))[0], **fields}))
        return path

    return write


@pytest.mark.nightly(one_in=12)
@pytest.mark.parametrize("model_type", MODELS)
def test_every_architecture_is_planned_from_its_config_alone(model_type: str, config: Any) -> None:
    run = fs.plan_run(config(model_type), gpus=8, seq=16 if model_type != "wav2vec2" else 800, batch=2)
    assert run.fits
    assert run.parameters == sum(leaf.numel for leaf in run.plan.leaves) > 0
    assert any(path.startswith(MODELS[model_type][1]) for unit in run.plan.unit_list for path in unit.paths)
    assert run.report.events == fs.predict_events(run.plan, run.report.schedule) or run.remat
    assert 0 < run.peak_bytes < run.reserved_bytes <= run.budget
    assert run.report.flops > 0


@pytest.mark.nightly
def test_the_command_prints_the_figures_of_plan_run_and_one_screen(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tie_word_embeddings=False)
    argv = ["plan", str(path), "--gpus", "16", "--gpu", "h100", "--seq", "32"]
    assert main([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run = fs.plan_run(path, gpus=16, gpu="h100", seq=32)
    names = ("parameters", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second")
    assert {name: printed[name] for name in names} == {name: getattr(run, name) for name in names}
    assert fs.Plan.from_json(json.dumps(printed["plan"])) == run.plan
    assert run.tokens_per_second == pytest.approx(run.batch * 32 * 16 / run.step_seconds)
    assert main(argv) == 0
    screen = capsys.readouterr().out
    assert screen.count("\n") < 60
    for words in ("It fits: ", "binds", "tokens per second", "MFU", "all_gather", "activations", "400 Gb/s per GPU"):
        assert words in screen


def test_the_command_answers_again_from_its_cache_unless_something_changed(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = config(), []

    class Run:
        fits, plan, report = True, None, None
        to_json = _repr_html_ = __str__ = lambda self: f"answer {len(runs)}"

    def plan_run(*args: Any, **keywords: Any) -> Any:
        runs.append(args)
        return Run()

    def answer(*options: str) -> str:
        assert main(["plan", str(path), "--gpus", "2", *options]) == 0
        return capsys.readouterr().out.strip()

    monkeypatch.setattr(fs, "plan_run", plan_run)
    assert [answer(), answer(), answer("--json"), answer("--gpu", "h100")] == ["answer 1"] * 4
    page = tmp_path / "page.html"
    assert [answer("--html", str(page)) for _ in range(2)] == ["answer 2"] * 2  # which has pictures too
    assert "answer 2" in page.read_text()
    assert [answer("--no-cache"), answer("--seq", "8"), answer("--gpu", "a100")] == ["answer 3", "answer 4", "answer 5"]
    config(vocab_size=97)
    assert [answer(), answer()] == ["answer 6"] * 2
    cache = tmp_path / "cache" / "funcshard"
    for text in ("", "[]", '{"text": 1, "json": "", "html": "", "fits": true}'):
        for file in cache.iterdir():
            file.write_text(text)
        answer()
    assert len(runs) == 9
    monkeypatch.setenv("XDG_CACHE_HOME", str(config()))  # a file, which can't be a folder
    assert [answer(), answer()] == ["answer 10", "answer 11"]


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize(
    "given", [{}, {"precision": "fp32", "budget": "3MiB", "batch": 4}], ids=["as found", "a small budget"]
)
def test_the_script_of_a_run_trains_with_its_plan(given: dict[str, Any], config: Any) -> None:
    path = config(tie_word_embeddings=False)
    run = fs.plan_run(path, gpus=2, seq=16, **given)
    namespace: dict[str, Any] = {}
    exec(run.code(), namespace)
    batch = torch.arange(run.batch * 16).view(run.batch, 16) % 96
    batches = [{"input_ids": batch, "labels": batch, "use_cache": False}] * 3

    def train(mesh: fs.Mesh) -> Any:
        torch.manual_seed(0)
        first, _ = namespace["main"](mesh, batches[:1])
        torch.manual_seed(0)
        last, plan = namespace["main"](mesh, batches)
        return first["loss"].item(), last["loss"].item(), plan

    for first, last, plan in fs.simulate(train, namespace["MESH"]):
        assert last < first
        assert plan == run.plan


@pytest.mark.nightly
def test_a_plan_fits_if_its_reserved_memory_does_and_less_memory_costs_time(config: Any) -> None:
    path = config(num_hidden_layers=6)
    rich = fs.plan_run(path, gpus=2, seq=64, batch=8)
    poor = fs.plan_run(path, gpus=2, seq=64, batch=8, budget=int(0.7 * rich.reserved_bytes))
    assert poor.fits
    assert poor.reserved_bytes <= poor.budget < rich.reserved_bytes
    assert poor.step_seconds >= rich.step_seconds
    none = fs.plan_run(path, gpus=2, seq=64, batch=1, budget="100KiB")
    assert not none.fits
    assert none.reserved_bytes > none.budget
    assert "It doesn't fit" in str(none)
    assert main(["plan", str(path), "--gpus", "2", "--budget", "100KiB"]) == 1


def test_a_plan_whose_pools_hold_more_than_is_in_use_fits_only_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(6)))
    options: Any = {"gpus": 2, "seq": 1, "batch": 512, "inputs": lambda batch, seq: (torch.empty(batch, 64),)}
    rich = fs.plan_run(net, **options)
    estimating = importlib.import_module("funcshard.estimate.estimating")
    band = estimating.reserved_band
    monkeypatch.setattr(estimating, "reserved_band", lambda pools, memory: band(pools * 5 // 4, memory))
    tight = fs.plan_run(net, **options, budget=rich.reserved_bytes)
    assert tight.fits
    assert tight.reserved_bytes <= tight.budget
    assert tight.remat


def test_adapters_alone_have_gradients_and_optimizer_state(config: Any) -> None:
    pytest.importorskip("peft")
    path = config(tie_word_embeddings=False)
    options: Any = {"gpus": 2, "seq": 16, "batch": 1}
    lora = {"r": 2, "targets": ["q_proj", "v_proj"]}
    run = fs.plan_run(path, **options, lora=lora)
    buffers = [buffer for unit in run.plan.unit_list for buffer in unit.buffers]
    assert sum(buffer.numel for buffer in buffers if buffer.trainable) == 3 * 2 * (32 + 32 + 32 + 16)
    assert {buffer.dtype for buffer in buffers if not buffer.trainable} == {"bfloat16"}
    assert run.peak_bytes < fs.plan_run(path, **options).peak_bytes
    packed = fs.plan_run(path, **options, lora={**lora, "base": "nf4"})
    packed_leaves = [
        leaf.path for unit in packed.plan.unit_list for buffer in unit.buffers if buffer.packing for leaf in buffer.leaves
    ]
    assert len(packed_leaves) == 3 * 7
    assert {path.split(".")[1] for path in packed_leaves} == {"layers"}
    assert packed.parameters == run.parameters
    assert packed.report.by_category["shards"] < run.report.by_category["shards"]
    with pytest.raises(ValueError, match="base of lora must be 'nf4', 'int8' or 'fp8'"):
        fs.plan_run(path, **options, lora={**lora, "base": "int4"})
    with pytest.raises(ValueError, match="found \\['query'\\]: pass some of down_proj, "):
        fs.plan_run(path, **options, lora={"r": 2, "targets": ["query"]})


@pytest.mark.parametrize(
    ("loads", "base"), [(True, {}), (False, {}), (True, {"base": "int8"})], ids=["a folder", "a module", "in 8 bits"]
)
def test_the_script_of_adapters_begins_at_the_model_and_trains(loads: bool, base: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    lora = {"r": 2, "targets": ["q_proj", "v_proj"], **base}
    run = fs.plan_run(tmp_path if loads else model, gpus=2, seq=16, batch=2, precision="fp32", lora=lora)
    namespace: dict[str, Any] = {}
    exec(run.code(), namespace)
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    expected = model(**batch).loss.item()

    def train(mesh: fs.Mesh, steps: int) -> float:
        more = () if loads else (copy.deepcopy(model),)
        metrics, plan = namespace["main"](mesh, [batch] * steps, *more)
        assert plan == run.plan
        return metrics["loss"].item()

    first, last = (fs.simulate(lambda mesh, n=n: train(mesh, n), namespace["MESH"])[0] for n in (1, 5))
    assert first == pytest.approx(expected, rel=1e-2 if base else 1e-5)
    assert last < first


def test_the_tensor_axis_cuts_as_transformers_does_and_its_collectives_take_time(config: Any) -> None:
    path = config(tie_word_embeddings=False)
    run = fs.plan_run(path, gpus=4, seq=16, batch=1, tensor=2)
    hidden, logits = 16 * 32 * 2, 16 * 96 * 2  # bytes
    sums = 2 * (1 + 2 * 3)  # after the embedding, attention and MLP, and in backward
    assert run._of_model == {
        ("all_reduce", "tensor"): [sums, sums * hidden],
        ("all_gather", "tensor"): [1, logits // 2],
        ("reduce_scatter", "tensor"): [1, logits // 2],
    }
    assert 0 < run.tensor_seconds < run.step_seconds
    assert run.samples_per_second == pytest.approx(2 / run.step_seconds)
    assert run.tokens_per_second == pytest.approx(16 * run.samples_per_second)
    assert "1 × 2 × 2" in str(run)
    assert run.peak_bytes < fs.plan_run(path, gpus=2, seq=16, batch=1).peak_bytes
    # Under torch's stand-in for ranks, the script cuts the model by transformers itself.
    namespace: dict[str, Any] = {}
    exec(run.code(), namespace)
    ids = torch.zeros(1, 16, dtype=torch.long)
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = fs.init_mesh(namespace["MESH"], device="cpu")
        _, plan = namespace["main"](mesh, [{"input_ids": ids, "labels": ids, "use_cache": False}])
    finally:
        dist.destroy_process_group()
    buffers = [
        [
            (unit.name, unit.strategy, buffer.key, buffer.numel, buffer.local)
            for unit in which.unit_list
            for buffer in unit.buffers
        ]
        for which in (plan, run.plan)
    ]
    assert buffers[0] == buffers[1]


def test_preferences_need_a_frozen_reference(config: Any) -> None:
    path = config(tie_word_embeddings=False)
    options: Any = {"gpus": 2, "seq": 16, "batch": 2}
    run = fs.plan_run(path, **options, dpo=True)
    plain = fs.plan_run(path, **{**options, "batch": 4})
    assert run.parameters == plain.parameters
    assert run.report.tokens == plain.report.tokens == 4 * 16
    assert run.report.flops == pytest.approx(plain.report.flops * 4 / 3, rel=0.05)
    shards = run.report.by_category["shards"]
    assert shards == pytest.approx(1.5 * plain.report.by_category["shards"], rel=0.01)  # half as many bytes
    assert run.report.by_category["optimizer"] == plain.report.by_category["optimizer"]
    assert "examples/dpo.py" in run.code()
    with pytest.raises(ValueError, match="dpo needs a decoder of transformers"):
        fs.plan_run(config("bert"), **options, dpo=True)


def test_two_encoders_get_images_and_tokens(config: Any) -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96}
    vision = {**text, **IMAGE}
    run = fs.plan_run(config("siglip", architectures=["SiglipModel"], text_config=text, vision_config=vision), gpus=2)
    assert run.report.flops > 0
    assert not any("tokens only" in note for note in run.notes)
    assert {path.partition(".")[0] for unit in run.plan.unit_list for path in unit.paths} >= {"text_model", "vision_model"}


def test_a_module_of_your_own_takes_your_inputs_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    run = fs.plan_run(Net(), gpus=4, seq=5, inputs=lambda batch, seq: {"x": torch.empty(batch, seq, 8)})
    assert run.fits
    assert run.tokens_per_second == 0 < run.samples_per_second
    assert "def main(mesh, batches, model):" in run.code()


@pytest.mark.parametrize(
    ("fields", "keywords", "words"),
    [
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, {}, "is no configuration that transformers takes"),
        ({"model_type": "mine"}, {}, "has model type `mine` but Transformers does not recognize"),
        ({"architectures": ["MyLlama"]}, {}, "found ['MyLlama']: pass the model itself"),
        ({"num_attention_heads": "many"}, {}, "is no configuration that"),
        ({}, {"budget": "90GiB"}, "budget must be at most the 79.2 GiB of h100-8x400gbps; found 90.0 GiB"),
        ({}, {"precision": "fp8"}, "precision must be"),
        ({}, {"tensor": 3}, "tensor must divide the 8 gpus; found 3"),
        ({}, {"tensor": 4}, "tensor must divide num_key_value_heads; found 4 and 2: pass a divisor"),
        (
            {"intermediate_size": 49},
            {"tensor": 2},
            "tensor must divide dimension 0 of 'model.layers.0.mlp.gate_proj.",
        ),
        ({"model_type": "gpt2"}, {"tensor": 2}, "found GPT2LMHeadModel, which has none: pass tensor=1"),
        ({}, {"tensor": 2, "lora": {"r": 2, "targets": ["q_proj"]}}, "lora can't be planned with tensor or dpo yet"),
        ({}, {"inputs": lambda batch, seq: (torch.empty(1, 1),)}, "the model failed on its inputs ("),
    ],
    ids=[
        "custom code",
        "unknown",
        "unknown class",
        "damage",
        "budget",
        "precision",
        "ranks",
        "heads",
        "columns",
        "no tp_plan",
        "adapters",
        "inputs",
    ],
)
def test_what_cannot_be_planned_is_an_error(
    fields: dict[str, Any], keywords: dict[str, Any], words: str, config: Any
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        fs.plan_run(config(**{"model_type": "llama", **fields}), gpus=8, seq=16, **keywords)


def test_the_interval_of_the_time_is_wider_where_it_was_not_fitted(config: Any) -> None:
    path = config()
    options: Any = {"gpus": 8, "seq": 16, "batch": 1}
    run = fs.plan_run(path, **options, gpu="b200")
    assert run.step_range == (0.7 * run.step_seconds, 1.5 * run.step_seconds)
    assert any("This one has another GPU, a short step, so" in note for note in run.notes)
    long_run = fs.plan_run(path, **options, gpu=slow("h100"))
    assert long_run.step_range == (0.85 * long_run.step_seconds, 1.2 * long_run.step_seconds)
    assert not any("This one has" in note for note in long_run.notes)
    assert "experts, a short step" in str(fs.plan_run(config("mixtral"), **options).notes)


def slow(gpu: str) -> Any:
    """Return a GPU on which even a small step isn't short."""
    return dataclasses.replace(load_hardware(gpu), kernel_overhead=0.01)


@pytest.mark.nightly
def test_the_notes_say_what_the_plan_does_with_the_dtype_of_the_files(config: Any) -> None:
    notes = fs.plan_run(config(torch_dtype="bfloat16"), gpus=2, seq=128, batch=1).notes
    assert any("says bfloat16" in note and "float32 parameters" in note for note in notes)
    assert any("128 tokens are more than the 64 positions" in note for note in notes)
    eager = fs.plan_run(config(attn_implementation="eager"), gpus=2, seq=16, batch=1).notes
    assert [any("Attention is eager" in note for note in found) for found in (notes, eager)] == [False, True]
    lean = fs.plan_run(config(torch_dtype="bfloat16"), gpus=2, seq=16, batch=1, precision="bf16-params")
    assert {buffer.dtype for unit in lean.plan.unit_list for buffer in unit.buffers} == {"bfloat16"}
