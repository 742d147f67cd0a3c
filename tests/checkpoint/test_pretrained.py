"""Folders of Hugging Face are loaded into shards and saved again, by seven families of models."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import funcshard as fs
from funcshard.checkpoint.hugging_face import is_hugging_face
from tests.ranks import on_ranks
from tests.states import equal
from tests.storages import Alive
from tests.zoo.transformers_models import build, small_config

by_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
pytestmark = [pytest.mark.slow, by_peft]

IDS = torch.arange(12).view(2, 6)


class Family(NamedTuple):
    kind: str  # in transformers, as the class
    model: str
    inputs: dict[str, torch.Tensor]
    units: int  # their number

    def build(self, **changes: Any) -> Any:
        return build(self.model, self.kind, changes)


TEXT = {"input_ids": IDS, "labels": IDS}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
SOUND = {"input_features": torch.linspace(-1, 1, 1024).view(2, 8, 64), "labels": IDS}
FAMILIES = {
    "Llama": Family("llama", "LlamaForCausalLM", TEXT, 3),
    "GPT-2": Family("gpt2", "GPT2LMHeadModel", TEXT, 3),
    "BERT": Family("bert", "BertForMaskedLM", TEXT, 3),
    "Mixtral": Family("mixtral", "MixtralForCausalLM", TEXT, 3),
    "ViT": Family("vit", "ViTForImageClassification", IMAGES, 4),
    "T5": Family("t5", "T5ForConditionalGeneration", TEXT, 5),
    "Whisper": Family("whisper", "WhisperForConditionalGeneration", SOUND, 5),
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Keep transformers from showing progress."""
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


def made(name: str, folder: Path, **options: Any) -> Any:
    """Return the model of a family, saved in ``folder`` by Hugging Face."""
    torch.manual_seed(0)
    model = FAMILIES[name].build().eval()
    model.save_pretrained(folder, **options)
    return model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_loaded_trains_and_is_saved_as_hugging_face_saves_it(name: str, tmp_path: Path) -> None:
    family, model = FAMILIES[name], made(name, tmp_path / "theirs", max_shard_size="9KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1

    def main(mesh: fs.Mesh) -> Any:
        apply, shards, buffers, plan = fs.from_pretrained(tmp_path / "theirs", mesh)
        assert len(plan.units) == family.units
        sharded = fs.fully_shard(apply.eval(), plan, mesh)
        loss_fn = lambda shards: sharded(shards, buffers, **family.inputs).loss  # noqa: E731
        loss, grads = fs.value_and_grad(loss_fn, mesh=mesh)(shards)
        fs.save_pretrained(tmp_path / "ours", apply, fs.TrainState(shards, buffers), plan, mesh, max_shard_size="9KB")
        return loss, fs.gather(grads, plan, mesh), dict(fs.iter_params(shards, plan, mesh, apply=apply))

    loss, grads, params = fs.simulate(main, 2)[1]
    meant = model(**family.inputs).loss
    meant.backward()
    torch.testing.assert_close(loss, meant.detach())
    for path, grad in grads.items():
        parameter = model.get_parameter(path)
        meant_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, meant_grad if parameter.requires_grad else None)
    theirs, ours = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(torch.equal(params[key], theirs[key]) for key in params)
    assert params.keys() == theirs.keys() - {key for key, _ in model.named_buffers()}
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again.eval()(**family.inputs).loss, meant)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [family.model]


@pytest.mark.parametrize("choose", [None, transformers.GPT2LMHeadModel, "module"], ids=["config", "class", "module"])
def test_the_function_is_in_evaluation_mode_as_hugging_faces_is(choose: Any, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.9, attn_pdrop=0.9
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    if choose == "module":
        with torch.device("meta"):
            choose = transformers.GPT2LMHeadModel(config)
    apply, shards, buffers, plan = fs.from_pretrained(tmp_path, fs.Mesh(), model=choose)
    sharded = fs.fully_shard(apply, plan, fs.Mesh())
    assert torch.equal(sharded(shards, buffers, IDS).logits, theirs(IDS).logits)
    training = fs.fully_shard(apply.train(), plan, fs.Mesh())
    torch.manual_seed(0)
    dropped = training(shards, buffers, IDS).logits
    torch.manual_seed(0)
    assert torch.equal(dropped, theirs.train()(IDS).logits)
    assert not torch.equal(dropped, theirs.eval()(IDS).logits)


DTYPES: dict[str, tuple[str, torch.dtype | None, set[torch.dtype]]] = {
    "that of the config": ("Llama", None, {torch.bfloat16}),
    "another on request": ("Llama", torch.float32, {torch.float32}),
    "and float32 for what a model computes in it": ("T5", torch.float16, {torch.float16, torch.float32}),
}


@pytest.mark.parametrize(("family", "dtype", "meant"), DTYPES.values(), ids=DTYPES)
def test_parameters_have_the_dtype(family: str, dtype: torch.dtype | None, meant: set[torch.dtype], tmp_path: Path) -> None:
    model = made(family, tmp_path).bfloat16()
    model.save_pretrained(tmp_path)
    apply, shards, buffers, plan = fs.from_pretrained(tmp_path, fs.Mesh(), dtype=dtype)
    params = fs.gather(shards, plan, fs.Mesh())
    theirs = type(model).from_pretrained(tmp_path, dtype=dtype or torch.bfloat16)
    assert {value.dtype for value in params.values()} == meant
    assert all(torch.equal(params[key], p) and params[key].dtype == p.dtype for key, p in theirs.named_parameters())
    assert all(torch.equal(buffers[key], value) for key, value in theirs.named_buffers())
    fs.save_pretrained(tmp_path / "new", apply, shards, plan, fs.Mesh(), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "new").values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "new").dtype == torch.bfloat16


HEADS = {"a new head": "BertForSequenceClassification", "no head": "BertModel"}


@pytest.mark.parametrize("name", HEADS)
def test_another_class_takes_the_parameters_that_the_files_hold(name: str, tmp_path: Path) -> None:
    cls = getattr(transformers, HEADS[name])  # which is slow to import
    made("BERT", tmp_path)

    def main(mesh: fs.Mesh) -> Any:
        torch.manual_seed(0)
        _, shards, _, plan = fs.from_pretrained(tmp_path, mesh, model=cls)
        return fs.gather(shards, plan, mesh)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = fs.simulate(main, 2)
        theirs = cls.from_pretrained(tmp_path)
    new = {"classifier.weight", "classifier.bias"} if name == "a new head" else set()
    pooler = {key for key in first if "pooler" in key}  # BertForMaskedLM has none
    for key, value in theirs.named_parameters():
        assert torch.equal(first[key], second[key])
        assert torch.equal(first[key], value.detach()) is (key not in {*new, *pooler} or key.endswith("bias"))
    said = [str(each.message) for each in caught if "they begin with the model's initial values" in str(each.message)]
    assert bool(said) is bool(new | pooler)


def test_a_head_of_its_own_is_filled_from_a_model_without_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    build("GPT2Model", "gpt2", {}).save_pretrained(tmp_path)
    cls = transformers.GPT2LMHeadModel
    _, shards, _, plan = fs.from_pretrained(tmp_path, fs.Mesh(), model=cls)  # the head is tied, so nothing is missing
    params = fs.gather(shards, plan, fs.Mesh())
    assert all(torch.equal(params[key], value) for key, value in cls.from_pretrained(tmp_path).named_parameters())


def test_tokens_are_added_while_loading(tmp_path: Path) -> None:
    model = made("GPT-2", tmp_path)
    whole = dict(model.named_parameters())
    with torch.device("meta"):
        larger = FAMILIES["GPT-2"].build()
        tokens = larger.config.vocab_size
        larger.resize_token_embeddings(tokens + 3, mean_resizing=False)

    def main(mesh: fs.Mesh) -> Any:
        torch.manual_seed(0)
        apply, shards, buffers, plan = fs.from_pretrained(tmp_path, mesh, model=larger)
        out = fs.fully_shard(apply, plan, mesh)(shards, buffers, torch.tensor([[tokens + 2, 1, 2]]))
        return fs.gather(shards, plan, mesh), out

    with pytest.warns(UserWarning, match="or rows of them, such as .*begin with the model's initial values"):
        results = fs.simulate(main, 2)
    for params, out in results:
        for key, value in params.items():
            rows = whole[key].detach()
            assert torch.equal(value[: len(rows)], rows)
            assert len(value) == len(rows) or (len(value) == tokens + 3 and value[tokens:].isfinite().all())
        assert torch.isfinite(next(iter(out.values()))).all()


class Own(nn.Module):
    """A module that is not of Hugging Face, with a buffer that is stored and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.empty(1), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) * self.scale


def test_a_model_that_embeds_no_tokens_is_loaded(tmp_path: Path) -> None:
    small = {"conv_dim": [8, 8], "conv_kernel": [8, 4], "conv_stride": [4, 2], "num_conv_pos_embeddings": 8}
    model = build("Wav2Vec2ForSequenceClassification", "wav2vec2", {**small, "num_conv_pos_embedding_groups": 2}).eval()
    model.save_pretrained(tmp_path)
    sound = torch.linspace(-1, 1, 400).view(2, 200)

    def main(mesh: fs.Mesh) -> Any:
        apply, shards, buffers, plan = fs.from_pretrained(tmp_path, mesh)
        return fs.fully_shard(apply, plan, mesh)(shards, buffers, input_values=sound).logits

    torch.testing.assert_close(fs.simulate(main, 2)[0], model(sound).logits)


def test_a_module_on_meta_of_any_kind_is_filled(tmp_path: Path) -> None:
    real = Own()
    real(torch.randn(8, 3))  # changes the statistics
    safetensors.torch.save_file(real.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        meta = Own()
    meta.norm.weight.requires_grad_(False)

    def main(mesh: fs.Mesh) -> Any:
        apply, shards, buffers, plan = fs.from_pretrained(tmp_path, mesh, model=meta, strategy="shard_grad_op")
        assert list(plan.units) == ["", "layers.0", "layers.1"]
        frozen = [buffer for unit in plan.unit_list for buffer in unit.buffers if not buffer.trainable]
        assert [leaf.path for buffer in frozen for leaf in buffer.leaves] == ["norm.weight"]
        assert {unit.strategy for unit in plan.unit_list} == {"shard_grad_op"}
        return fs.fully_shard(apply.eval(), plan, mesh)(shards, buffers, torch.ones(2, 3))

    assert torch.equal(fs.simulate(main, 2)[0], real.eval()(torch.ones(2, 3)))
    assert meta.norm.running_mean.is_meta


TARGETS = {"target_modules": ["k_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Any] = {
    "LoRA": peft.LoraConfig(**TARGETS),
    "LoRA, Gaussian": peft.LoraConfig(**TARGETS, init_lora_weights="gaussian", lora_dropout=0.5),
    "LoRA of an embedding": peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]),
    "LoRA that is not zero": peft.LoraConfig(**TARGETS, init_lora_weights=False),
    "IA3": peft.IA3Config(**TARGETS, feedforward_modules=["down_proj"]),
    "LoRA and a trained head": peft.LoraConfig(**TARGETS, modules_to_save=["lm_head"]),
}


def adapted_on_meta(family: str, config: Any) -> Any:
    with torch.device("meta"):
        return peft.get_peft_model(FAMILIES[family].build(), config)


def loaded_under_adapters(folder: Path, model: Any, **options: Any) -> Any:
    """Return the parameters and logits on the first of two ranks; both hold the same ones."""

    def main(mesh: fs.Mesh) -> Any:
        torch.manual_seed(7)
        apply, shards, buffers, plan = fs.from_pretrained(folder, mesh, model=model, **options)
        assert len(plan.units) == 3
        frozen = {path for path, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {leaf.path for u in plan.unit_list for b in u.buffers if not b.trainable for leaf in b.leaves}
        logits = fs.fully_shard(apply, plan, mesh)(shards, buffers, input_ids=IDS).logits
        return fs.to_state_dict(shards, plan, mesh), logits

    first, second = fs.simulate(main, 2)
    assert all(torch.equal(first[0][path], second[0][path]) for path in first[0])
    return first


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_folder_is_loaded_under_adapters(name: str, tmp_path: Path) -> None:
    real = made("Llama", tmp_path)
    base = {path: p.detach().clone() for path, p in real.named_parameters()}
    theirs = peft.get_peft_model(real, ADAPTERS[name]).eval()
    params, logits = loaded_under_adapters(tmp_path, adapted_on_meta("Llama", ADAPTERS[name]))
    adapters = {path for path in params if "lora_" in path or "ia3_" in path}
    assert adapters
    read = {path for path, p in theirs.state_dict().items() if path in params and path not in adapters}
    assert read == params.keys() - adapters
    assert all(torch.equal(params[path], theirs.state_dict()[path]) for path in read)
    assert len(read) == len(base) + ("head" in name)
    for path in adapters:  # of the same distribution: as wide, and as constant
        value, meant = params[path], theirs.get_parameter(path)
        assert value.dtype == meant.dtype
        assert abs(value.std() - meant.std()) <= 0.4 * meant.std()
        assert abs(value.mean() - meant.mean()) <= 0.2
    if name != "LoRA that is not zero":  # others begin as the model without them
        torch.testing.assert_close(logits, theirs(IDS).logits)
    theirs.load_state_dict(params, strict=False)
    torch.testing.assert_close(logits, theirs(IDS).logits)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")  # by peft
@pytest.mark.parametrize("family", ["Mixtral", "GPT-2"])
def test_converted_and_tied_tensors_are_loaded_under_adapters(family: str, tmp_path: Path) -> None:
    targets, head = {"Mixtral": (["q_proj"], None), "GPT-2": (["c_attn"], ["lm_head"])}[family]
    config = peft.LoraConfig(target_modules=targets, modules_to_save=head, fan_in_fan_out=family == "GPT-2")
    theirs = peft.get_peft_model(made(family, tmp_path), config).eval()
    params, logits = loaded_under_adapters(tmp_path, adapted_on_meta(family, config))
    torch.testing.assert_close(logits, theirs(IDS).logits)
    assert all(torch.equal(value, theirs.state_dict()[path]) for path, value in params.items() if "lora_" not in path)


def test_adapters_stay_in_float32_over_weights_in_bfloat16(tmp_path: Path) -> None:
    made("Llama", tmp_path)
    with torch.device("meta"):
        base = FAMILIES["Llama"].build().bfloat16()
    params, _ = loaded_under_adapters(tmp_path, peft.get_peft_model(base, ADAPTERS["LoRA"]))
    assert all((value.dtype == torch.float32) is ("lora_" in path) for path, value in params.items())


def test_adapters_in_the_files_are_read(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(made("Llama", tmp_path / "base"), ADAPTERS["LoRA that is not zero"]).eval()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    model = adapted_on_meta("Llama", peft.LoraConfig(**TARGETS, use_dora=False))
    params, _ = loaded_under_adapters(tmp_path, model)
    assert all(torch.equal(value, theirs.state_dict()[path]) for path, value in params.items())


UNFIT = {
    "DoRA": peft.LoraConfig(**TARGETS, use_dora=True),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "another kind": peft.LoHaConfig(**TARGETS),
}


@pytest.mark.parametrize("name", UNFIT)
def test_adapters_that_need_values_under_them_are_said(name: str, tmp_path: Path) -> None:
    made("Llama", tmp_path)
    model = adapted_on_meta("Llama", UNFIT[name])
    with pytest.raises(ValueError, match="call get_peft_model on a model with values"):
        fs.from_pretrained(tmp_path, fs.Mesh(), model=model)


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"].build(hidden_size=128, intermediate_size=1024, num_hidden_layers=4, num_local_experts=2)
    model.save_pretrained(tmp_path, max_shard_size="3MB")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layer = max(sum(p.nbytes for p in each.parameters()) for each in model.model.layers)
    del model
    mapped = {file.stat().st_size for file in tmp_path.glob("*.safetensors")}

    def main(mesh: fs.Mesh) -> Any:
        with Alive(lambda nbytes: nbytes not in mapped) as load:
            apply, shards, buffers, plan = fs.from_pretrained(tmp_path, mesh)
        with Alive(lambda nbytes: nbytes not in mapped) as write:
            fs.save_pretrained(tmp_path / "new", apply, fs.TrainState(shards, buffers), plan, mesh)
        return load.most_bytes, write.most_bytes

    for load, write in fs.simulate(main, 4):  # a quarter, a converted leaf, and the scratch memory of checksums
        assert load <= whole / 4 + layer + 1_200_000 < 0.6 * whole
        assert write <= 2.2 * layer < 0.6 * whole


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def another_tie(folder: Path) -> None:
    tensors = tensors_in(folder)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def of_files(*names: str, rest: Callable[[Path], Any] = lambda path: None) -> Callable[[Path], None]:
    """Return a change that leaves files of other names in place of model.safetensors."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_text('{"base_model_name_or_path": "org/base"}')
        rest(folder)

    return change


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


ABSENT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda path: path.rename(path.with_name("away")), "reads local folders"),
    "no config": (without_config, "has no config.json: pass the model"),
    "no files": (of_files(), r"is neither model.safetensors nor .* \['config.json', 'generation_config.json'\]"),
    "an adapter": (of_files("adapter_config.json", "x.safetensors", rest=without_config), "adapter of peft, without its"),
    "files of torch": (of_files("pytorch_model.bin", "training_args.bin"), r"holds 'pytorch_model.bin', .*\(folder\).save"),
    "files of GGUF": (of_files("q4.gguf", rest=without_config), r"holds 'q4.gguf', .*\(folder, gguf_file=name\)"),
    "files of other names": (of_files("x.safetensors"), r"holds 'x.safetensors', .* import_safetensors\(path, plan"),
    "a cache of the hub": (of_files("snapshots", rest=without_config), "cache of the hub: pass the folder that"),
    "a checkpoint of torch": (of_files(".metadata"), r"import_dcp\(path, plan, mesh\) reads"),
}  # fmt: skip
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a class of its own": (changed_config(architectures=["Mine"]), r"found \['Mine'\]: pass the model itself"),
    "2^60 layers": (changed_config(n_layer=2**60), "must have at most 100000 layers; found 1152921504606846976"),
    "a size that is a text": (changed_config(n_head="many"), r"config\.json isn't a configuration that"),
    "code of the folder": (changed_config(model_type="mine", auto_map={"AutoConfig": "code.Config"}), "trust_remote_code"),
    "a pipe": (lambda path: (without_config(path), os.mkfifo(path / "config.json")), "found a named pipe"),
    "quantized weights": (changed_config(quantization_config={"quant_method": "fp8"}), r"are quantized, .*dequantize\(\)"),
    "other shapes": (changed_config(n_embd=8), r"must have shape \(.*\) and dtype float32, as planned; found"),
    "another tie": (another_tie, "holds different values of 'lm_head.weight' and 'transformer.wte.weight'"),
    "another model": (
        lambda path: safetensors.torch.save_file({"x": torch.zeros(3)}, path / "model.safetensors"),
        r"holds no parameter of GPT2LMHeadModel; it has \['x'\], and the model",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made("GPT-2", folder := tmp_path_factory.mktemp("whole"))
    return folder


@pytest.mark.parametrize("name", [*ABSENT, *BAD])
def test_what_cannot_be_loaded_is_said_on_every_rank(name: str, whole_folder: Path, tmp_path: Path) -> None:
    harm, words = (ABSENT | BAD)[name]
    harm(folder := shutil.copytree(whole_folder, tmp_path / "model"))

    def main(mesh: fs.Mesh) -> None:
        with pytest.raises(FileNotFoundError if name in ABSENT else ValueError, match=words):
            fs.from_pretrained(folder, mesh)

    fs.simulate(main, 2)


@pytest.mark.parametrize("missing", ["transformers", "transformers.core_model_loading"])  # which version 5 brought
def test_a_missing_transformers_is_said_with_the_command(missing: str, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"need transformers 5 or newer: pip install 'transformers>=5'"):
        fs.from_pretrained(tmp_path, fs.Mesh())


@on_ranks(2)
def test_a_fault_of_one_rank_is_raised_on_every_rank(mesh: fs.Mesh, whole_folder: Path) -> None:
    whose = r" \(found on rank 1\)$" if mesh.rank == 0 else ""
    with pytest.raises(FileNotFoundError, match=f"reads local folders.*{whose}"):
        fs.from_pretrained(whole_folder if mesh.rank == 0 else whole_folder / "absent", mesh)


def test_tensors_that_files_hold_as_one_must_lie_in_one_unit(tmp_path: Path) -> None:
    config = small_config("hrm_text", num_layers_per_stack=1)  # its files hold gate_proj and up_proj as one tensor
    torch.manual_seed(0)
    model = transformers.HrmTextForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    apply, shards, _, plan = fs.from_pretrained(tmp_path / "theirs", fs.Mesh())
    params = fs.gather(shards, plan, fs.Mesh())
    assert all(torch.equal(params[path], parameter) for path, parameter in model.named_parameters())
    fs.save_pretrained(tmp_path / "ours", apply, shards, plan, fs.Mesh())
    ours, theirs = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    assert equal(ours, theirs)
    fine = fs.make_plan(params, 1, units=["**.gate_proj"])
    with pytest.raises(ValueError, match=r"the files hold .* as one tensor, whose parts lie in several units of the plan"):
        fs.save_pretrained(tmp_path / "fine", apply, fs.shard(params, fine, fs.Mesh()), fine, fs.Mesh())
    with pytest.raises(ValueError, match="whose parts lie in several units of the plan"):
        fs.iter_params(fs.shard(params, fine, fs.Mesh()), fine, fs.Mesh(), apply=apply)


def test_a_model_of_hugging_face_is_one_by_its_name_and_its_package() -> None:
    assert is_hugging_face(FAMILIES["GPT-2"].build())
    assert not is_hugging_face(type("PreTrainedModel", (nn.Module,), {})())
    assert not is_hugging_face(transformers.activations.NewGELUActivation())
