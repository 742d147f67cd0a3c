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
from funcshard.checkpoint import module_of_config
from funcshard.estimate import load_hardware
from funcshard.planning.model_inputs import _model_inputs, default_seq, text_config
from funcshard.planning.planned_model import _fuse_scans, _without_layerdrop
from funcshard.planning.tasks import PRECISIONS
from tests.demo.test_plan_command import printed

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

EXPERTS_OF_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEAD = {"head_dim": 8}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
SOUND: dict[str, Any] = {"apply_spec_augment": False, "conv_dim": [8] * 7}

LAYERS = "model.layers."

# By model_type: fields beside SIZES, and the repeated blocks.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys([
        "llama", "mistral", "qwen2", "phi3", "olmo2", "granite", "cohere", "olmo", "olmo3", "phi", "cohere2", "starcoder2",
        "stablelm", "nemotron", "persimmon", "smollm3", "exaone4", "lfm2", "diffllama", "apertus",
    ], ({}, LAYERS)),
    **dict.fromkeys(["qwen3", "gemma2", "gemma", "glm", "glm4", "ernie4_5", "seed_oss", "helium"], (HEAD, LAYERS)),
    **dict.fromkeys(["mixtral", "phimoe"], ({"num_local_experts": 4}, LAYERS)),
    **dict.fromkeys(["qwen2_moe", "olmoe"], (EXPERTS, LAYERS)),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], ({**EXPERTS_OF_DEEPSEEK, **LATENT}, LAYERS)),
    **dict.fromkeys(["gpt2", "gpt_bigcode"], (GPT, "transformer.h.")),
    **dict.fromkeys(["t5", "mt5"], (T5, "encoder.block.")),
    **dict.fromkeys(["bart", "pegasus", "m2m_100"], (SEQ2SEQ, "model.encoder.layers.")),
    **{name: ({}, f"{name}.encoder.layer.") for name in ("bert", "roberta", "mpnet")},
    **{name: ({}, f"{name}.layers.") for name in ("gpt_neox", "biogpt")},
    **{name: (IMAGE, f"{name}.layers.") for name in ("vit", "deit", "beit")},
    "qwen3_moe": ({**EXPERTS, **HEAD}, LAYERS),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "model.decoder.layers."),
    "bloom": ({"n_layer": 3, "n_head": 4}, "transformer.h."),
    "falcon": ({"num_kv_heads": 4}, "transformer.h."),
    "whisper": ({**SEQ2SEQ, "max_source_positions": 16, "max_target_positions": 16}, "model.encoder.layers."),
    "wav2vec2": (SOUND, "encoder.layers."),
    "gemma3_text": ({**HEAD, "sliding_window": 8}, LAYERS),
    "dots1": ({**EXPERTS_OF_DEEPSEEK, **HEAD}, LAYERS),
    "mamba": ({"state_size": 8}, "backbone.layers."),
    "mamba2": ({**HEAD, "num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}, "backbone.layers."),
    "jamba": ({"num_experts": 2, "mamba_d_state": 8}, LAYERS),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}, "transformer.blocks."),
    "gptj": ({**GPT, "rotary_dim": 8}, "transformer.h."),
    "gpt_oss": ({**LOCAL_EXPERTS, **HEAD}, LAYERS),
    "granitemoe": (LOCAL_EXPERTS, LAYERS),
    "llama4_text": ({"num_local_experts": 4, **HEAD, "intermediate_size_mlp": 48}, LAYERS),
    "xglm": ({"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48}, LAYERS),
    "modernbert": ({"global_attn_every_n_layers": 2, "local_attention": 8}, LAYERS),
    "deberta-v2": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "deberta.encoder.layer."),
    "electra": ({"embedding_size": 32}, "electra.encoder.layer."),
    "albert": ({"embedding_size": 16}, "albert.encoder.albert_layer_groups."),
    "distilbert": ({"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}, "distilbert.transformer.layer."),
    "esm": ({"token_dropout": False, "mask_token_id": 3}, "esm.encoder.layer."),
    "longt5": ({**T5, "local_radius": 8}, "encoder.block."),
    "resnet": ({"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [2] * 4}, "resnet.encoder.stages."),
}  # fmt: skip
BY_DAY = ("llama", "gemma3_text", "gpt_oss", "beit")
_LENGTHS = {"wav2vec2": 800}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(model_type: str = "llama", **fields: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type, **SIZES, **MODELS.get(model_type, ({}, ""))[0], **fields}))
        return path

    return write


def script_of(run: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(run.code(), namespace)
    return namespace


def saved_llama(folder: Path) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold BatchNorm2d:UserWarning")  # of ResNet
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in MODELS]
)
def test_every_architecture_is_planned_from_its_config_alone(model_type: str, config: Any) -> None:
    path, seq = config(model_type), _LENGTHS.get(model_type, 16)
    run = fs.plan_run(path, gpus=8, seq=seq, batch=2)
    assert run.fits
    assert run.parameters == sum(leaf.numel for leaf in run.plan.leaves) > 0
    assert any(path.startswith(MODELS[model_type][1]) for unit in run.plan.unit_list for path in unit.paths)
    assert run.report.events == fs.predict_events(run.plan, run.report.schedule) or run.remat
    assert 0 < run.peak_bytes < run.reserved_bytes <= run.budget
    # The truth is a trace in which each module runs, as in a step.
    module = module_of_config(path)
    _without_layerdrop(module)
    _fuse_scans(module)
    args, keywords = _model_inputs(module, 2, seq, None)
    functional = fs.make_functional(module)
    whole = fs.profile(*functional, *args, precision=PRECISIONS["bf16"], fold=False, **keywords)
    truth = fs.estimate(whole, run.plan, schedule=run.schedule, remat=run.remat, hardware="h100")
    assert run.peak_bytes == pytest.approx(truth.peak, rel=0.02)
    assert run.report.flops == truth.flops > 0


@pytest.mark.nightly
def test_the_command_prints_the_figures_of_plan_run_and_one_screen(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tie_word_embeddings=False)
    argv = ["plan", str(path), "--gpus", "16", "--gpu", "h100", "--seq", "32"]
    facts = json.loads(printed([*argv, "--json"], capsys))
    run = fs.plan_run(path, gpus=16, gpu="h100", seq=32)
    names = ("parameters", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second")
    assert {name: facts[name] for name in names} == {name: getattr(run, name) for name in names}
    assert fs.Plan.from_json(json.dumps(facts["plan"])) == run.plan
    assert run.tokens_per_second == pytest.approx(run.batch * 32 * 16 / run.step_seconds)
    screen = printed(argv, capsys)
    assert screen.count("\n") < 60
    for words in ("It fits: ", "binds", "tokens per second", "MFU", "all_gather", "activations", "400 Gb/s per GPU"):
        assert words in screen


def test_the_command_answers_again_from_its_cache_unless_something_changed(config, tmp_path, monkeypatch, capsys) -> None:
    path, runs = config(), []

    class Run:
        fits, plan, report = True, None, None
        to_json = _repr_html_ = __str__ = lambda self: f"answer {len(runs)}"

    def plan_run(*args: Any, **keywords: Any) -> Any:
        runs.append(args)
        return Run()

    def answer(*options: str) -> str:
        return printed(["plan", str(path), "--gpus", "2", *options], capsys).strip()

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
    "given", [{}, {"task": fs.Training(precision="fp32"), "budget": "3MiB", "batch": 4}], ids=["as found", "a small budget"]
)
def test_the_script_of_a_run_trains_with_its_plan(given: dict[str, Any], config: Any) -> None:
    path = config(tie_word_embeddings=False)
    run = fs.plan_run(path, gpus=2, seq=16, **given)
    namespace = script_of(run)
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
    task = fs.Training(inputs=lambda batch, seq: (torch.empty(batch, 64),))
    options: Any = {"gpus": 2, "seq": 1, "batch": 512, "task": task}
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
    run = fs.plan_run(path, **options, task=fs.Training(lora=lora))
    buffers = [buffer for unit in run.plan.unit_list for buffer in unit.buffers]
    assert sum(buffer.numel for buffer in buffers if buffer.trainable) == 3 * 2 * (32 + 32 + 32 + 16)
    assert {buffer.dtype for buffer in buffers if not buffer.trainable} == {"bfloat16"}
    assert run.peak_bytes < fs.plan_run(path, **options).peak_bytes
    packed = fs.plan_run(path, **options, task=fs.Training(lora={**lora, "base": "nf4"}))
    packings = [buffer for unit in packed.plan.unit_list for buffer in unit.buffers if buffer.packing]
    assert [leaf.path.split(".")[1] for buffer in packings for leaf in buffer.leaves] == ["layers"] * 3 * 7
    assert packed.parameters == run.parameters
    assert packed.report.by_category["shards"] < run.report.by_category["shards"]
    with pytest.raises(ValueError, match="base of lora must be 'nf4', 'int8' or 'fp8'"):
        fs.Training(lora={**lora, "base": "int4"})
    with pytest.raises(ValueError, match="found \\['query'\\]: pass some of down_proj, "):
        fs.plan_run(path, **options, task=fs.Training(lora={"r": 2, "targets": ["query"]}))


@pytest.mark.parametrize(
    ("loads", "base"), [(True, {}), (False, {}), (True, {"base": "int8"})], ids=["a folder", "a module", "in 8 bits"]
)
def test_the_script_of_adapters_begins_at_the_model_and_trains(loads: bool, base: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = saved_llama(tmp_path)
    lora = {"r": 2, "targets": ["q_proj", "v_proj"], **base}
    run = fs.plan_run(tmp_path if loads else model, gpus=2, seq=16, batch=2, task=fs.Training(precision="fp32", lora=lora))
    namespace = script_of(run)
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
    run = fs.plan_run(path, gpus={"shard": 2, "tensor": 2}, seq=16, batch=1)
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
    namespace = script_of(run)
    ids = torch.zeros(1, 16, dtype=torch.long)
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = fs.init_mesh(namespace["MESH"], device="cpu")
        _, plan = namespace["main"](mesh, [{"input_ids": ids, "labels": ids, "use_cache": False}])
    finally:
        dist.destroy_process_group()
    for unit, planned in zip(plan.unit_list, run.plan.unit_list, strict=True):
        assert (unit.name, unit.strategy) == (planned.name, planned.strategy)
        found, meant = ([(each.key, each.numel, each.local) for each in of.buffers] for of in (unit, planned))
        assert found == meant


def test_preferences_need_a_frozen_reference(config: Any) -> None:
    path = config(tie_word_embeddings=False)
    options: Any = {"gpus": 2, "seq": 16, "batch": 2}
    run = fs.plan_run(path, **options, task=fs.Training(dpo=True))
    plain = fs.plan_run(path, **{**options, "batch": 4})
    assert run.parameters == plain.parameters
    assert run.report.tokens == plain.report.tokens == 4 * 16
    assert run.report.flops == pytest.approx(plain.report.flops * 4 / 3, rel=0.05)
    shards = run.report.by_category["shards"]
    assert shards == pytest.approx(1.5 * plain.report.by_category["shards"], rel=0.01)  # half as many bytes
    assert run.report.by_category["optimizer"] == plain.report.by_category["optimizer"]
    assert "examples/dpo.py" in run.code()
    with pytest.raises(ValueError, match="dpo needs a decoder of transformers"):
        fs.plan_run(config("bert"), **options, task=fs.Training(dpo=True))


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

    task = fs.Training(inputs=lambda batch, seq: {"x": torch.empty(batch, seq, 8)})
    run = fs.plan_run(Net(), gpus=4, seq=5, task=task)
    assert run.fits
    assert run.tokens_per_second == 0 < run.samples_per_second
    assert "def main(mesh, batches, model):" in run.code()


TENSOR = {"gpus": {"tensor": 2}}
PACKED = {"gpus": {"shard": 1, "tensor": 2}, "task": fs.Generation(precision="nf4")}
OTHER_INPUTS = {"task": fs.Training(inputs=lambda batch, seq: (torch.empty(1, 1),))}
# Fields of the configuration, options, and words of the error.
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "custom code": ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, {}, "isn't a configuration that transf"),
    "unknown": ({"model_type": "mine"}, {}, "has model type `mine` but Transformers does not recognize"),
    "unknown class": ({"architectures": ["MyLlama"]}, {}, "found ['MyLlama']: pass the model itself"),
    "damage": ({"num_attention_heads": "many"}, {}, "isn't a configuration that"),
    "budget": ({}, {"budget": "90GiB"}, "budget must be at most the 79.2 GiB of h100-8x400gbps; found 90.0 GiB"),
    "axes": ({}, {"gpus": {"shard": 2, "expert": 4}}, "gpus may have the axes replicate, shard and tensor; found"),
    "heads": ({}, {"gpus": {"tensor": 4}}, "tensor must divide num_key_value_heads; found 4 and 2: pass a divisor"),
    "columns": ({"intermediate_size": 49}, TENSOR, "tensor must divide dimension 0 of 'model.layers.0.mlp.gate_proj."),
    "no tp_plan": ({"model_type": "gpt2"}, TENSOR, "found GPT2LMHeadModel, which has none: leave out the axis"),
    "packed": ({}, PACKED, "nf4 can't be cut along tensor"),
    "no decoder": ({"model_type": "bert"}, {"task": fs.Generation()}, "needs a decoder of transformers; found Bert"),
    "inputs": ({}, OTHER_INPUTS, "the model failed on its inputs ("),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "keywords", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_planned_is_an_error(fields: Any, keywords: Any, words: str, config: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        fs.plan_run(config(**fields), **{"gpus": 8, "seq": 16, **keywords})


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


def test_a_scan_is_one_kernel_however_many_tokens_there_are(config: Any) -> None:
    runs = [fs.plan_run(config("mamba"), gpus=2, seq=seq, batch=1) for seq in (16, 32)]
    short, long = ([span.seconds for span in run.report.spans if span.lane == "compute"] for run in runs)
    assert len(short) == len(long)
    kernels = [
        sum(work.kernels for step in run.profile.program(run.plan).steps for work in getattr(step, "work", ()))
        for run in runs
    ]
    assert kernels[0] == kernels[1]
    assert any("kernels of mamba_ssm" in note for note in runs[0].notes)
    module: Any = module_of_config(config("mamba"))
    mixer = type(module.backbone.layers[0].mixer)
    assert _fuse_scans(module)
    # Other models of the process scan as before.
    assert type(module.backbone.layers[0].mixer) is not mixer
    assert not _fuse_scans(module_of_config(config()))


def test_a_model_without_attention_has_no_note_of_it(config: Any) -> None:
    sizes = {"image_size": 32, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4, "num_hidden_layers": 4}
    assert "eager" not in str(fs.plan_run(config("convnext", **sizes, num_attention_heads=None), gpus=2, batch=1).notes)


def test_a_short_step_gets_the_largest_batch(config: Any) -> None:
    assert fs.plan_run(config(), gpus=8, seq=16).batch == 64


def test_a_training_run_has_no_cache_in_models_that_take_no_option_for_it(config: Any) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, **sizes, **IMAGE}
    path = config("llava", text_config={"model_type": "llama", **SIZES, "num_hidden_layers": 6}, vision_config=vision)
    profile = fs.plan_run(path, gpus=2, seq=16, batch=1).profile
    # Layers that fill a cache all differ, so that none represents another.
    assert [fold.path for fold in profile.tape().folds] == ["language_model.layers.0"]


def test_a_model_of_sound_hears_ten_seconds() -> None:
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, **SOUND}
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes))
    assert default_seq(model) == 160_000
    spectrogram = transformers.ASTForAudioClassification(transformers.ASTConfig(num_hidden_layers=1))
    assert default_seq(spectrogram) == 1024


def test_a_config_with_two_texts_has_no_context() -> None:
    parts: Any = {name: {"model_type": "t5"} for name in ("text_encoder", "audio_encoder")}
    config = transformers.MusicgenConfig(**parts, decoder={"model_type": "musicgen_decoder"})
    assert text_config(config) is config


def test_a_missing_package_is_named(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_timm(*_: Any) -> None:
        raise ImportError("it requires the timm library")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", needs_timm)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM needs a package .*timm library\): install it"):
        fs.plan_run(config(), gpus=2)


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
    lean = fs.plan_run(config(torch_dtype="bfloat16"), gpus=2, seq=16, batch=1, task=fs.Training(precision="bf16-params"))
    assert {buffer.dtype for unit in lean.plan.unit_list for buffer in unit.buffers} == {"bfloat16"}


def test_adapters_are_cut_beside_their_layers_and_add_a_small_sum(config: Any) -> None:
    pytest.importorskip("peft")
    path, targets = config(tie_word_embeddings=False), ["q_proj", "o_proj"]
    options: Any = {"gpus": {"shard": 2, "tensor": 2}, "seq": 16, "batch": 1}
    run = fs.plan_run(path, **options, task=fs.Training(lora={"r": 2, "targets": targets}))
    leaves = {leaf.path: leaf.shape for leaf in run.plan.leaves}
    attention = "model.layers.0.self_attn"
    for layer, side, shape in (
        ("q_proj", "A", (2, 32)), ("q_proj", "B", (16, 2)), ("o_proj", "A", (2, 16)), ("o_proj", "B", (32, 2)),
    ):  # fmt: skip
        assert leaves[f"{attention}.{layer}.lora_{side}.default.weight"] == shape
    assert leaves[f"{attention}.q_proj.base_layer.weight"] == (16, 32)
    full = fs.plan_run(path, **options)
    key = "all_reduce", "tensor"
    sums, traffic = (run._of_model[key][i] - full._of_model[key][i] for i in (0, 1))
    # Of A's output in o_proj, in forward and backward; and none of the frozen embedding's gradient.
    assert sums == 2 * 3 - 1
    assert traffic == 2 * 3 * 16 * 2 * 2 - 16 * 32 * 2
    assert "adapters" in str(run.notes)


def test_a_policy_with_adapters_is_its_own_reference(config: Any) -> None:
    pytest.importorskip("peft")
    path = config(tie_word_embeddings=False)
    lora: Any = {"r": 2, "targets": ["q_proj"]}
    run = fs.plan_run(path, gpus=2, seq=16, batch=2, task=fs.Training(lora=lora, dpo=True))
    plain = fs.plan_run(path, gpus=2, seq=16, batch=4, task=fs.Training(lora=lora))
    assert run.parameters == plain.parameters
    assert sum(leaf.numel for leaf in run.plan.leaves) == plain.parameters
    gathers = [event.unit for event in run.report.events if event.kind == "all_gather"]
    assert gathers.count("policy.model.layers.1") >= 2  # for the reference, and for the policy
    assert run.report.flops > plain.report.flops
    assert "with LoRA and DPO" in str(run)


def test_a_model_that_generates_has_a_cache_and_no_gradients(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, task = config(tie_word_embeddings=False), fs.Generation()
    run = fs.plan_run(path, gpus=4, seq=64, batch=8, task=task)
    assert run.fits
    assert run.cache_bytes == 3 * 2 * 8 * 64 * 2 * 8 * 2  # layers, keys and values, samples, tokens, heads of 8, bfloat16
    assert run.plan.mesh_shape == (4, 1)  # it fits without shards
    assert run.report.by_category["shards"] == run.parameters * 2 + 4
    assert not {"gradients", "optimizer", "activations"} & run.report.by_category.keys()
    assert run.token_seconds == run.decode.step_time + run.cache_seconds
    assert run.tokens_per_second == pytest.approx(4 * 8 / run.token_seconds)
    tight = fs.plan_run(path, gpus=4, seq=64, batch=8, budget=run.reserved_bytes - 1024, task=task)
    assert tight.plan.mesh_shape[1] > 1
    assert tight.token_seconds > run.token_seconds  # it gathers weights for each token
    none = fs.plan_run(path, gpus=4, seq=64, budget=1024, task=task)
    assert not none.fits
    assert none.plan.mesh_shape == (1, 4)
    small = fs.plan_run(path, gpus=4, seq=64, batch=8, task=fs.Generation(precision="int8"))
    assert small.report.by_category["shards"] < run.report.by_category["shards"]
    assert fs.plan_run(path, gpus=4, seq=64, task=task).batch == 64  # more samples are faster
    argv = ["plan", str(path), "--gpus", "4", "--seq", "64", "--batch", "8", "--generate"]
    facts = json.loads(printed([*argv, "--json"], capsys))
    assert (facts["tokens_per_second"], facts["memory"]["cache"]) == (run.tokens_per_second, run.cache_bytes)
    screen = printed(argv, capsys)
    assert screen.count("\n") < 40
    assert "further token" in screen


def test_the_cache_is_what_transformers_holds_after_as_many_tokens(config: Any) -> None:
    for model_type, fields in (("llama", {}), ("mistral", {"sliding_window": 16})):
        path = config(model_type, **fields)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        with torch.no_grad():
            cache = model(torch.zeros(1, 48, dtype=torch.int64), use_cache=True).past_key_values
        held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
        run = fs.plan_run(path, gpus=1, seq=48, batch=1, task=fs.Generation(precision="fp32"))
        assert run.cache_bytes == pytest.approx(held, rel=0.01)  # some layers count their tokens in a tensor


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_script_of_a_model_that_generates_gives_its_texts(precision: str, tmp_path: Path) -> None:
    model = saved_llama(tmp_path).eval()
    run = fs.plan_run(tmp_path, gpus=2, seq=140, batch=2, task=fs.Generation(precision=precision))
    namespace = script_of(run)
    prompts = torch.arange(3, 15).view(2, 6)
    expected = model.generate(prompts, min_new_tokens=128, max_new_tokens=128, do_sample=False)
    for tokens in fs.simulate(lambda mesh: namespace["main"](mesh, prompts), namespace["MESH"]):
        assert tokens.shape == expected.shape
        assert precision != "fp32" or torch.equal(tokens, expected)


def test_several_lengths_and_batches_are_one_table(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(config()), "--gpus", "2", "--seq", "16,32", "--batch", "1,4"]
    results = json.loads(printed([*argv, "--json"], capsys))
    assert [(result["seq"], result["batch"]) for result in results] == [(16, 1), (16, 4), (32, 1), (32, 4)]
    rows = [line.split() for line in printed(argv, capsys).splitlines() if line.strip()[:2] in ("16", "32")]
    assert [row[:3] for row in rows] == [[str(r["seq"]), str(r["batch"]), "yes"] for r in results]


def test_a_run_is_compared_with_the_plan_of_another(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(config(num_hidden_layers=6)), "--gpus", "2", "--seq", "64", "--batch", "8"]
    file = tmp_path / "other.json"
    file.write_text(printed([*argv, "--json"], capsys))
    budget = int(0.7 * json.loads(file.read_text())["reserved_bytes"])
    assert "remat" in printed([*argv, "--budget", f"{budget // 1000}KB", "--compare", str(file)], capsys)
