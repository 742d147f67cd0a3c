"""Whole tensors pass between funcshard and FSDP2 with tensor parallelism, on 2 x 2 processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcshard as fs
from tests.ranks import run_ranks

SHAPE = {"shard": 2, "tensor": 2}
LOCAL = {"up": {"tensor": 0}, "down.weight": {"tensor": 1}}
FULL = StateDictOptions(full_state_dict=True)
OF_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OPTIONS = {"lr": 0.05, "weight_decay": 0.1}
NO_DECAY = {"paths": ["**.bias"], "weight_decay": 0.0}
DATA = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    def __init__(self, seed: int = 0, ranks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8 // ranks)
        self.down = nn.Linear(8 // ranks, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def fsdp2(seed: int) -> nn.Module:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    module = MLP(seed)
    parallelize_module(module, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(module, mesh=grid["shard"])


def ours(mesh: fs.Mesh) -> tuple[fs.Plan, Any, Any]:
    """Return a plan, an optimizer, and a step that computes what FSDP2's modules compute."""
    params = dict(MLP(0, 2).named_parameters())
    plan = fs.make_plan(params, mesh, local=LOCAL)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, groups=[NO_DECAY], plan=plan, mesh=mesh, **OPTIONS)

    def call(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x, (6,), leaves["norm.weight"], leaves["norm.bias"])
        hidden = torch.tanh(nn.functional.linear(y, leaves["up.weight"], leaves["up.bias"]))
        return x + fs.psum(hidden @ leaves["down.weight"].T, mesh, axis="tensor") + leaves["down.bias"]

    run = fs.unshard(call, plan.units[""], mesh)
    return plan, optimizer, fs.make_train_step(lambda s, _, x: run(s[""], x).square().mean(), optimizer, plan, mesh)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW, which does not decay biases."""
    named = dict(module.named_parameters())
    weights = [leaf for name, leaf in named.items() if not name.endswith("bias")]
    biases = [leaf for name, leaf in named.items() if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], **OPTIONS)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def both_ways(mesh: fs.Mesh, folder: Path) -> None:
    wanted = dict(MLP(7).state_dict())
    plan, optimizer, step = ours(mesh)
    theirs = fsdp2(7)
    torch_optimizer = adamw(theirs)
    x = DATA.chunk(2)[mesh.position["shard"]]

    def train(steps: int) -> None:
        for _ in range(steps):
            torch_optimizer.zero_grad()
            theirs(x).square().mean().backward()
            torch_optimizer.step()

    # State dicts of DTensors with two placements, and whole ones.
    for form in (theirs.state_dict(), get_model_state_dict(theirs, options=FULL)):
        shards = fs.from_state_dict(form, plan, mesh)
        assert same(fs.to_state_dict(shards, plan, mesh), wanted)

    # Our checkpoint into a module of theirs.
    fs.save(folder / "ours", {"shards": shards}, plan, mesh)
    if mesh.rank == 0:
        fs.export_dcp(folder / "ours", folder / "exported")
    fs.psum(torch.zeros(1), mesh)
    other = fsdp2(0)
    loaded = other.state_dict()
    dcp.load({"model": loaded}, checkpoint_id=folder / "exported")
    assert same(get_model_state_dict(other, options=FULL), wanted)

    # Optimizer state: two steps there, then one step there and one here.
    train(2)
    state = fs.TrainState(
        fs.from_state_dict(theirs.state_dict(), plan, mesh),
        {},
        fs.optimizer_from_state_dict(get_optimizer_state_dict(theirs, torch_optimizer), optimizer, plan, mesh),
        step=2,
    )
    train(1)
    state, _ = step(state, x)
    found = fs.to_state_dict(state.shards, plan, mesh)
    torch.testing.assert_close(found, dict(get_model_state_dict(theirs, options=FULL)))
    by_name = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh)
    torch.testing.assert_close(by_name["state"], get_optimizer_state_dict(theirs, torch_optimizer, options=FULL)["state"])

    # And back: the next step there and here, from our state, of all ranks or of rank 0.
    form: dict[str, Any] = {"rank0_only": True, "offload": True}
    first = fs.to_state_dict(state.shards, plan, mesh, **form)
    first_by_name = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh, **form)
    other = fsdp2(0)
    other_optimizer = adamw(other)
    set_model_state_dict(other, first, options=OF_RANK_0)
    set_optimizer_state_dict(other, other_optimizer, first_by_name, options=OF_RANK_0)
    set_model_state_dict(theirs, found, options=FULL)
    set_optimizer_state_dict(theirs, torch_optimizer, by_name, options=FULL)
    whole = get_optimizer_state_dict(theirs, torch_optimizer, options=FULL)
    of_rank_0 = get_optimizer_state_dict(other, other_optimizer, options=FULL)
    assert of_rank_0["param_groups"] == whole["param_groups"]
    torch.testing.assert_close(of_rank_0["state"], whole["state"], rtol=0, atol=0)
    assert same(get_model_state_dict(other, options=FULL), get_model_state_dict(theirs, options=FULL))
    train(1)
    state, _ = step(state, x)
    torch.testing.assert_close(fs.to_state_dict(state.shards, plan, mesh), dict(get_model_state_dict(theirs, options=FULL)))


@pytest.mark.slow
def test_whole_tensors_pass_to_fsdp2_and_back(tmp_path: Path) -> None:
    run_ranks(both_ways, 4, tmp_path, shape=SHAPE, timeout=180)
