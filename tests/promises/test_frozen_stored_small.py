"""Frozen weights stored small: the bits of the decoded weights, and bytes that nothing encodes again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import funcshard as fs
from funcshard.checkpoint import export_parameters
from tests.core.units import forward_mode, of_module, same_bits
from tests.jobs import decoded
from tests.ranks import run_ranks, run_simulated
from tests.storages import Alive

PAIR = fs.Storage(lambda x: (x.bfloat16(), x[:, :1] * 0), lambda low, zero: low.double() + zero, name="pair")
AS_IT_IS = fs.Storage(torch.clone, torch.clone, name="as it is")
STORAGES = {"nf4": fs.nf4(), "int8": fs.int8(32), "fp8": fs.fp8(), "pair": PAIR, "as it is": AS_IT_IS}
UNITS, X, Y = ["0", "2", "4"], torch.linspace(-1, 1, 8 * 32).view(8, 32).sin(), torch.linspace(0, 1, 8).view(8, 1)


class Lora(nn.Module):
    """A frozen linear layer plus a trained matrix of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, inputs) / 4), nn.Parameter(torch.randn(outputs, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def net(storage: fs.Storage | None = None) -> nn.Module:
    """Return adapters on a frozen model; with a storage, its weights are what this decodes to."""
    torch.manual_seed(0)
    model = nn.Sequential(Lora(32, 48), nn.Tanh(), Lora(48, 32), nn.Tanh(), Lora(32, 16))
    if storage is not None:
        for name, leaf in model.named_parameters():
            leaf.data = decoded(leaf.data, storage) if "base.weight" in name else leaf.data
    return model


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def transformed(mesh: fs.Mesh, name: str, packed: bool) -> Any:
    """Return what transforms and derivatives give, for a plan and for one with the decoded weights."""
    module, storage = net(None if packed else STORAGES[name]), STORAGES[name if packed else "as it is"]
    plan, sharded, shards = of_module(mesh, module, UNITS, storage={"*.base.weight": storage})

    def loss(shards: Any, _: Any, batch: Any) -> torch.Tensor:
        return loss_of(sharded(shards, {}, batch[0][None]), batch[1][None])

    with torch.inference_mode():
        inferred = sharded(shards, {}, X)
    of_inputs = torch.func.grad(lambda x: sharded(shards, {}, x).square().sum())(X)
    tangents = fs.value_and_grad(loss)(shards, {}, (X[0], Y[0]))[1]
    product = fs.hvp(lambda s: loss(s, {}, (X[0], Y[0])), (shards,), (tangents,), mesh=mesh)
    norms = fs.per_sample_norms(loss, plan, mesh)(shards, {}, (X, Y))
    return inferred, of_inputs, [unit["float32"] for unit in product.values()], norms


@forward_mode
@pytest.mark.parametrize("name", ["nf4", "pair"])
def test_transforms_see_the_decoded_weights(name: str) -> None:
    same_bits(run_simulated(transformed, 2, name, True), run_simulated(transformed, 2, name, False))


# --- files and state dicts --------------------------------------------------------------------------


def planned(ranks: Any, storage: fs.Storage | None = STORAGES["nf4"], units: Any = UNITS) -> fs.Plan:
    chosen = None if storage is None else {"*.base.weight": storage}
    return fs.make_plan(fs.make_functional(net())[1], ranks, units=units, storage=chosen)


def written(mesh: fs.Mesh, folder: Path, name: str = "nf4") -> Any:
    """Write shards, read each file again, and return the shards."""
    plan, params = planned(mesh, STORAGES[name]), fs.make_functional(net())[1]
    shards, values = fs.shard(params, plan, mesh), dict(net(STORAGES[name]).named_parameters())
    state_dict = fs.to_state_dict(shards, plan, mesh)
    same_bits(dict(fs.iter_params(shards, plan, mesh)), values)
    same_bits(fs.gather(shards, plan, mesh), values)
    fs.export_safetensors(folder / "model.safetensors", shards, plan, mesh)
    own = params if mesh.rank == 0 else {name: value.to("meta") for name, value in params.items()}
    ways = {
        "params of rank 0": fs.shard(own, plan, mesh, src=0),
        "a state dict": fs.from_state_dict(state_dict, plan, mesh),
        "rank 0's": fs.from_state_dict(fs.to_state_dict(shards, plan, mesh, rank0_only=True), plan, mesh, src=0),
        "pieces, packed": fs.from_state_dict(fs.to_state_dict(shards, plan, mesh, sharded=True), plan, mesh),
        "a file": fs.import_safetensors(folder / "model.safetensors", plan, mesh),
    }
    for way in ways.values():
        same_bits(way, shards)
    sharded = fs.fully_shard(fs.make_functional(net())[0], plan, mesh)
    same_bits(sharded(shards, {}, X), net(STORAGES[name])(X))
    fs.save(folder / "checkpoint", {"shards": shards}, plan, mesh)
    return shards


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_whatever_leaves_the_shards_is_decoded_and_checkpoints_keep_the_bytes(tmp_path: Path, name: str) -> None:
    shards, other = run_simulated(written, 4, tmp_path, name), {"replicate": 2, "shard": 2}
    new = planned(other, STORAGES[name], units=["0"])
    cut = run_simulated(lambda mesh: fs.shard(fs.make_functional(net())[1], new, mesh), 4, shape=other)
    same_bits(fs.replan(shards, planned(4, STORAGES[name]), new), cut)
    restored = run_simulated(lambda mesh: fs.restore(tmp_path / "checkpoint", new, mesh), 4, shape=other)
    same_bits([state["shards"] for state in restored], cut)
    export_parameters(tmp_path / "checkpoint", tmp_path / "of_it.safetensors")
    same_bits(load_file(tmp_path / "of_it.safetensors"), dict(net(STORAGES[name]).named_parameters()))


def test_other_storage_is_refused_and_not_encoded_again(tmp_path: Path) -> None:
    shards = run_simulated(written, 2, tmp_path)
    alike = fs.Storage(lambda x: (x[:, :32].byte(), x[:, :1]), lambda low, one: torch.cat([low, low], 1) * one)
    for storage in (None, fs.int8(), fs.nf4(32), alike):  # the last makes records of the same parts
        with pytest.raises(ValueError, match=r"'storage': \('nf4', .* If storage= differs, to_state_dict and"):
            fs.replan(shards, planned(2), planned(1, storage))
    plain = planned(1, None)
    fs.save(tmp_path / "plain", {"shards": fs.shard(fs.make_functional(net())[1], plain, fs.Mesh())}, plain, fs.Mesh())
    shards, _ = fs.import_dcp(fs.export_dcp(tmp_path / "plain", tmp_path / "dcp of it"), planned(1), fs.Mesh())[:2]
    same_bits(fs.gather(shards, planned(1), fs.Mesh()), dict(net(fs.nf4()).named_parameters()))
    with pytest.raises(ValueError, match="packed leaves, which other programs can't decode"):
        fs.export_dcp(tmp_path / "checkpoint", tmp_path / "dcp")


def test_a_module_is_initialised_into_packed_shards() -> None:
    def weight(mesh: fs.Mesh, storage: Any) -> torch.Tensor:
        module = nn.Linear(40, 30, device="meta").requires_grad_(False)
        plan = fs.make_plan(fs.make_functional(module)[1], mesh, storage=storage)
        torch.manual_seed(1)
        return fs.gather(fs.init_module(module, plan, mesh, draws="blocks")[0], plan, mesh)["weight"]

    plain = run_simulated(weight, 2, None)[0]
    same_bits(run_simulated(weight, 3, {"weight": fs.nf4()})[0], decoded(plain, fs.nf4()))


# --- whole models -----------------------------------------------------------------------------------

IDS = torch.arange(4 * 6).view(4, 6) % 32
QLORA = {"**": fs.nf4(), "**.*norm": None, "**.embed_tokens": None}  # trained leaves stay as they are


# Why in functions: the fast loop needs none of this, and peft is imported for two seconds.
def llama(**sizes: int) -> Any:
    import transformers

    torch.manual_seed(0)
    usual = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **usual | sizes)).eval()


def adapted(base: Any) -> Any:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, config).eval()


def next_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def qlora(mesh: fs.Mesh, folder: Path) -> Any:
    """Train adapters on a folder of Hugging Face; return parameters before and after, and bits an element."""
    torch.manual_seed(3)
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # by peft
    with torch.device("meta"):
        model = adapted(llama())
    apply, shards, buffers, plan = fs.from_pretrained(folder, mesh, model=model, storage=QLORA)
    before, sharded = fs.to_state_dict(shards, plan, mesh), fs.fully_shard(apply, plan, mesh)
    step = fs.make_train_step(
        lambda s, b, ids: next_tokens(sharded(s, b, input_ids=ids).logits, ids),
        fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh,
    )  # fmt: skip
    packed = [(unit.name, b) for unit in plan.unit_list for b in unit.buffers if b.packing]
    numel = sum(leaf.model_numel for _, buffer in packed for leaf in buffer.leaves)
    bits = sum(shards[name][buffer.key].nbytes for name, buffer in packed) * mesh.world_size * 8 / numel
    state = step.init(shards, buffers)
    for _ in range(3):
        state, _ = step(state, IDS[mesh.rank :: mesh.world_size])
    return before, fs.to_state_dict(state.shards, plan, mesh), bits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(("ranks", "runner"), [(2, run_simulated), (4, run_simulated), (2, run_ranks)])
def test_qlora_on_a_folder_of_hugging_face_has_the_bits_of_the_unsharded_model(
    ranks: int, runner: Any, tmp_path: Path
) -> None:
    base, real = llama(), adapted(llama())
    base.save_pretrained(tmp_path)
    results = runner(qlora, ranks, tmp_path)
    real.load_state_dict(before := results[0][0], strict=False)
    for name, value in base.named_parameters():
        stays = "norm" in name or "embed" in name
        found = before.get(f"base_model.model.{name}", before.get(f"base_model.model.{name[:-7]}.base_layer.weight"))
        same_bits(found, value.detach() if stays else decoded(value.detach(), fs.nf4()))
    optimizer = torch.optim.AdamW([p for p in real.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            ids = IDS[rank::ranks]
            next_tokens(real(input_ids=ids).logits, ids).backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= ranks
        optimizer.step()
    for _, after, bits in results:
        assert bits == 4.5
        same_bits(after, {name: value.detach() for name, value in real.named_parameters()})


@pytest.mark.slow
def test_no_rank_holds_more_than_packed_shards_and_one_leaf_while_it_loads(tmp_path: Path) -> None:
    model = llama(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    whole, most = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    mapped = {file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    meta = model.to("meta").requires_grad_(False)

    def main(mesh: fs.Mesh) -> int:
        with Alive(lambda nbytes: nbytes not in mapped) as load:
            fs.from_pretrained(tmp_path, mesh, model=meta, storage={"**": fs.nf4()})
        return load.most_bytes

    # The functions take a few times this rank's part of a leaf, and checksums some scratch memory.
    for load in fs.simulate(main, 4):
        assert load <= whole * 4.5 / 32 / 4 + 5 * most / 4 + 1_200_000 < 0.3 * whole


@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold")
def test_a_packed_unit_in_full_precision_computes_in_the_dtype_of_its_decoded_leaves():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8).requires_grad_(False)).eval()
    precision, x = fs.MixedPrecision(param_dtype=torch.bfloat16), torch.ones(2, 8)

    def main(mesh):
        storage = {"1": fs.int8(block=8)}
        _, sharded, shards = of_module(mesh, net, ["0", "1"], precision=precision, storage=storage)
        return sharded(shards, dict(net.named_buffers()), x)

    expected = net[1](net[0].bfloat16()(x.bfloat16()).float()).bfloat16()
    for out in fs.simulate(main, 2):
        torch.testing.assert_close(out, expected)
