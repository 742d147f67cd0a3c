"""State dicts of FSDP2 and DDP load into shards, and those of shards into FSDP2 and DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

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


def planned(mesh: fs.Mesh, seed: int) -> tuple[Any, fs.Plan, dict, dict]:
    apply, params, buffers = fs.make_functional(Tied(seed))
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    return apply, plan, fs.shard(params, plan, mesh), apply.persistent(buffers)


def fsdp2_both_ways(mesh: fs.Mesh) -> None:
    wanted = dict(Tied(7).state_dict())
    _, plan, _, buffers = planned(mesh, 0)
    theirs, full = fsdp2(7), StateDictOptions(full_state_dict=True)
    assert any(hasattr(value, "full_tensor") for value in theirs.state_dict().values())
    for form in (get_model_state_dict(theirs, options=full), theirs.state_dict(), get_model_state_dict(theirs)):
        shards = fs.from_state_dict(form, plan, mesh)
        assert same(fs.to_state_dict(shards, plan, mesh, buffers={name: wanted[name] for name in buffers}), wanted)
    for of_rank_0 in (False, True):
        state_dict = fs.to_state_dict(
            shards, plan, mesh, buffers={name: wanted[name] for name in buffers}, rank0_only=of_rank_0, offload=of_rank_0
        )
        theirs = fsdp2(0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=of_rank_0)
        set_model_state_dict(theirs, state_dict, options=options)
        assert same(get_model_state_dict(theirs, options=full), wanted)


def ddp_both_ways(mesh: fs.Mesh) -> None:
    wanted = dict(Tied(7).state_dict())
    _, plan, _, buffers = planned(mesh, 0)
    theirs = DistributedDataParallel(Tied(7))
    prefixed = theirs.state_dict()
    with pytest.raises(
        ValueError, match=r"names that carry the prefix 'module\.' .* call torch\.nn\.modules\.utils\.consume"
    ):
        fs.from_state_dict(prefixed, plan, mesh)
    consume_prefix_in_state_dict_if_present(prefixed, "module.")  # the remedy in the error message
    for form in (prefixed, theirs.module.state_dict()):
        shards = fs.from_state_dict(form, plan, mesh)
        state_dict = fs.to_state_dict(shards, plan, mesh, buffers={name: wanted[name] for name in buffers})
        assert same(state_dict, wanted)
    other = DistributedDataParallel(Tied(0))
    other.module.load_state_dict(state_dict, strict=True)
    assert same(dict(other.module.state_dict()), wanted)


@pytest.mark.parametrize("way", [fsdp2_both_ways, ddp_both_ways], ids=lambda way: way.__name__)
def test_state_dicts_of_torch(way: Any) -> None:
    run_ranks(way, 2)
