"""Mistakes with shards, full parameters and state dicts."""

import optree
import torch
from torch import nn

import funcshard as fs
from tests.misuse import EVERYWHERE, NET, PARAMS, set_up


def meta(net=NET):
    with torch.device("meta"):
        return nn.Sequential(
            *[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else nn.Tanh() for m in net]
        )


def ones(unit):
    return {leaf.path: torch.ones(leaf.shape) for leaf in unit.leaves}


def tied_before(mesh):
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    plan = fs.make_plan(fs.make_functional(net)[1], mesh)
    net[1].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    return fs.init_module(net, plan, mesh)


def init_two(values):
    plan = fs.make_plan({"a": torch.zeros(2), "b": torch.zeros(2)}, 1)
    return fs.init_shards(lambda unit: values, plan, fs.Mesh())


def not_contiguous(s):
    shards = optree.tree_map(lambda shard: torch.stack([shard, shard], 1)[:, 0], s.shards)
    torch.testing.assert_close(s.loss(shards, s.x), s.loss(s.shards, s.x))


CASES = [
    ("shard", "shards a second time", ValueError("these are shards already"),
     lambda s: fs.shard(s.shards, s.plan, s.mesh)),
    ("init_shards", "values of some leaves", ValueError("leaves of unit '(root)', ['a', 'b']; found ['a']"),
     lambda: init_two({"a": torch.zeros(2)})),
    ("init_module", "another word for draws",
     ValueError("draws must be 'whole' or 'blocks'; found 'block': did you mean 'blocks'"),
     lambda: fs.init_module(meta(), fs.make_plan(PARAMS, 1), fs.Mesh(), draws="block")),
    ("init_shards", "ranks are seeded apart", ValueError("the state of torch's random number generators"),
     lambda mesh: torch.manual_seed(mesh.rank) and fs.init_shards(ones, set_up(mesh).plan, mesh), EVERYWHERE),
    ("init_module", "ranks are seeded apart", ValueError("the state of torch's random number generators"),
     lambda mesh: torch.manual_seed(mesh.rank) and fs.init_module(meta(), set_up(mesh).plan, mesh), EVERYWHERE),
    ("init_module", "a module that has values", ValueError("use shard(params, plan, mesh)"),
     lambda mesh: fs.init_module(NET, set_up(mesh).plan, mesh)),
    ("init_module", "parameters are no longer tied", ValueError("the plan ties parameter '0.weight' to '1.weight'"),
     tied_before),
    ("init_module", "another module", ValueError("the plan was made for another module"),
     lambda mesh: fs.init_module(meta([NET[0]]), set_up(mesh).plan, mesh)),
    ("to_state_dict", "buffers is a truth value", TypeError("buffers must be a dictionary"),
     lambda s: fs.to_state_dict(s.shards, s.plan, s.mesh, buffers=True)),
    ("init_buffers", "the function in place of the module", TypeError("takes a torch.nn.Module; found Functional"),
     lambda mesh: fs.init_buffers(fs.make_functional(NET)[0], mesh)),
    ("init_buffers", "a buffer that no reset writes", ValueError("no reset wrote ['num_batches_tracked', 'running_mean'"),
     lambda mesh: fs.init_buffers(nn.BatchNorm1d(3, device="meta"), mesh, reset=lambda module: None)),
    ("fully_shard", "shards that are not contiguous", None, not_contiguous),
    ("fully_shard", "buffers left out", TypeError("buffers must be a dictionary"),
     lambda s: s.sharded(s.shards, s.x)),
]  # fmt: skip
