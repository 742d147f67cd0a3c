"""Mistakes with functions of modules, units and casts."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, DESYNC, NET


def identity(leaves):
    return leaves


def called_with(s, **options):
    return fs.fully_shard(APPLY, s.plan, s.mesh, **options)(s.shards, BUFFERS, s.x)


def with_two_tensor():
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.zeros(3, 3)))
    return net


def with_grad_dtype(dtype):
    net = nn.Linear(3, 3)
    net.weight.grad_dtype = dtype
    return net


def started_in_order_of_ranks(s):
    for name in ("2", "0") if s.mesh.rank else ("0", "2"):
        fs.reshard(fs.unshard(identity, s.plan.units[name], s.mesh)).start(s.shards[name])
    return fs.psum(s.x, s.mesh)


CASES = [
    ("fully_shard", "a function that is sharded already", TypeError("a function that is sharded already: pass make"),
     lambda s: fs.fully_shard(s.sharded, s.plan, s.mesh)),
    ("make_functional", "the persistent ones among params", ValueError("buffers must hold the module's names"),
     lambda mesh: APPLY.persistent(dict(NET.named_parameters()))),
    ("make_functional", "a parameter of a tensor subclass",
     TypeError("parameter '0.weight' is a TwoTensor (torch.testing.…)…: they hold plain tensors. Convert it to"),
     lambda: fs.make_functional(with_two_tensor())),
    ("make_functional", "a module of torch.jit",
     TypeError("module '0' was made by torch.jit,…: use the module from which it was made, and pass compiler=torch.compile"),
     lambda: fs.make_functional(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))),
    ("make_functional", "an embedding with max_norm",
     ValueError("module '(root)' (EmbeddingBag) has max_norm=2.0,…parameter 'weight',…: set max_norm to None"),
     lambda: fs.make_functional(nn.EmbeddingBag(5, 3, max_norm=2.0))),
    ("make_functional", "a parameter with a grad_dtype",
     ValueError("parameter 'weight' has grad_dtype=torch.float64,…: set grad_dtype to that, and reduce_dtype"),
     lambda: fs.make_functional(with_grad_dtype(torch.float64))),
    ("fully_shard Schedule", "names instead of a schedule", TypeError("make it with make_schedule(plan, order)"),
     lambda s: called_with(s, schedule=["0", "2"])),
    ("unshard", "ranks call units in different orders", DESYNC,
     lambda s: [fs.unshard(identity, s.plan.units[name], s.mesh)(s.shards[name]) for name in
        (("0", "2") if s.mesh.rank == 0 else ("2", "0"))]),
    ("remat", "the result of a function", TypeError("remat takes a function"),
     lambda mesh: fs.remat(APPLY(dict(NET.named_parameters()), BUFFERS, DATA))),
    ("Cast", "a plain tuple", TypeError("that returns a funcshard.Cast or None"),
     lambda s: called_with(s, cast=lambda unit, buffer: (torch.clone, torch.flatten))),
    ("unshard reshard", "gathers started in another order on one rank", DESYNC, started_in_order_of_ranks),
]  # fmt: skip
