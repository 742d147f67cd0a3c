"""State dicts of FSDP2 load into shards, and those of shards into FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcshard as fs
from tests.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.emb.weight


def fsdp2(seed: int) -> nn.Module:
    module = Tied(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fsdp2_both_ways(mesh: fs.Mesh) -> None:
    wanted = dict(Tied(7).state_dict())
    apply, params, buffers = fs.make_functional(Tied())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    kept = {name: wanted[name] for name in apply.persistent(buffers)}
    theirs, full = fsdp2(7), StateDictOptions(full_state_dict=True)
    assert any(hasattr(value, "full_tensor") for value in theirs.state_dict().values())
    for form in (get_model_state_dict(theirs, options=full), theirs.state_dict(), get_model_state_dict(theirs)):
        shards = fs.from_state_dict(form, plan, mesh)
        assert same(fs.to_state_dict(shards, plan, mesh, buffers=kept), wanted)
    for of_rank_0 in (False, True):
        form = {"rank0_only": of_rank_0, "offload": of_rank_0}
        state_dict = fs.to_state_dict(shards, plan, mesh, buffers=kept, **form)
        theirs = fsdp2(0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=of_rank_0)
        set_model_state_dict(theirs, state_dict, options=options)
        assert same(get_model_state_dict(theirs, options=full), wanted)


def test_state_dicts_pass_to_fsdp2_and_back() -> None:
    run_ranks(fsdp2_both_ways, 2)
