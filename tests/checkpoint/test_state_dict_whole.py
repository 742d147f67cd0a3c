"""``iter_params`` yields what a gather returns, with two units in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import funcshard as fs
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Alive
from tests.zoo.transformers_models import build

WIDTH, BLOCKS = 64, 5


def tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    net[2].weight = net[0].weight
    return net


def whole(mesh: fs.Mesh, dtype: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    _, params, _ = fs.make_functional(tied())
    plan = fs.make_plan(params, mesh, units=["1"])
    shards = fs.shard(params, plan, mesh)
    pairs = list(fs.iter_params(shards, plan, mesh, dtype=dtype))
    meant = {name: leaf.detach().to(dtype or leaf.dtype) for name, leaf in fs.gather(shards, plan, mesh).items()}
    assert sorted(name for name, _ in pairs) == ["0.weight", "1.bias", "1.weight"]  # the tied one once
    assert all(torch.equal(tensor, meant[name]) and tensor.dtype == meant[name].dtype for name, tensor in pairs)
    for _, tensor in pairs:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # it keeps no unit in memory
        tensor.zero_()  # a copy: neither shards nor other ranks see it
    again = fs.gather(shards, plan, mesh)
    assert all(torch.equal(again[name].to(meant[name].dtype), leaf) for name, leaf in meant.items())


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [{"shard": 1}, {"shard": 2}, {"replicate": 2, "shard": 1}], ids=str)
def test_each_parameter_comes_once_and_whole(
    run: Callable[..., Any], dtype: torch.dtype | None, shape: dict[str, int]
) -> None:
    run(whole, shape["shard"] * shape.get("replicate", 1), dtype, shape=shape)


@on_ranks({"shard": 2, "tensor": 2})
def test_slices_are_joined(mesh: fs.Mesh) -> None:
    whole_leaf = torch.arange(24.0).view(4, 6)
    rows = {"w": whole_leaf.chunk(2)[mesh["tensor"].rank]}
    plan = fs.make_plan(rows, mesh, local={"w": {"tensor": 0}})
    pairs = dict(fs.iter_params(fs.shard(rows, plan, mesh), plan, mesh))
    assert torch.equal(pairs["w"], whole_leaf)


@on_ranks(2)
def test_at_most_two_units_are_in_memory_and_one_is_under_way(mesh: fs.Mesh) -> None:
    params = {f"{i}.{name}": torch.full((WIDTH, WIDTH), float(i)) for i in range(BLOCKS) for name in "ab"}
    plan = fs.make_plan(params, mesh, units=[str(i) for i in range(BLOCKS)])
    shards = fs.shard(params, plan, mesh)
    unit_bytes = 2 * WIDTH * WIDTH * 4
    with Alive(lambda nbytes: nbytes >= unit_bytes // 2) as alive, fs.record_events() as events:
        under_way = []
        for name, tensor in fs.iter_params(shards, plan, mesh):
            under_way.append((name, events[-1].unit))
            del tensor
    assert alive.most_of[unit_bytes] == 2
    assert alive.most_bytes <= 2 * unit_bytes + unit_bytes // 2  # and the tensor that is used
    nexts = ["1", "2", "3", "4", "4"]
    assert under_way == [(f"{i}.{name}", nexts[i]) for i in range(BLOCKS) for name in "ab"]


@pytest.mark.slow
def test_names_and_tensors_are_those_of_hugging_faces_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build("MixtralForCausalLM", "mixtral", {})
    model.save_pretrained(tmp_path)
    apply, params, _ = fs.make_functional(model)

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=["model.layers.*"])
        return dict(fs.iter_params(fs.shard(params, plan, mesh), plan, mesh, apply=apply))

    ours, theirs = fs.simulate(main, 2)[1], safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys() != params.keys()  # experts are one leaf, and several tensors in files
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_it_does_not_take() -> None:
    params, mesh = {"a": torch.zeros(3)}, fs.Mesh()
    plan = fs.make_plan(params, 1)
    with pytest.raises(TypeError, match="iter_params takes the apply of a model of Hugging Face; found function"):
        fs.iter_params(fs.shard(params, plan, mesh), plan, mesh, apply=lambda: 0)
    local = fs.make_plan(params, 1, local=["a"])
    with pytest.raises(ValueError, match="leaf 'a' is local to each rank"):
        fs.iter_params(fs.shard(params, local, mesh), local, mesh)
