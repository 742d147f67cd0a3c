"""Mistakes with functions of modules, units and casts."""

import optree
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, DESYNC, NET, Table, untold, whole_grads, whole_loss

CASES = Table()
MISTAKES = "docs/mistakes.md"


DROPPED = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def identity(leaves):
    return leaves


def loss_with(s, **options):
    sharded = fs.fully_shard(APPLY, s.plan, s.mesh, **options)
    return fs.pmean(sharded(s.shards, BUFFERS, s.x).square().mean(), s.mesh).detach()


def grads_with(s, **options):
    sharded = fs.fully_shard(APPLY, s.plan, s.mesh, **options)
    loss = lambda shards, x: sharded(shards, BUFFERS, x).square().mean()  # noqa: E731
    return s.whole(fs.value_and_grad(loss)(s.shards, s.x)[1])


# --- make_functional ------------------------------------------------------------------------------

CASES += [
    ("fully_shard", "a function that is sharded already", TypeError("a function that is sharded already: pass make"),
     lambda s: fs.fully_shard(s.sharded, s.plan, s.mesh)),
    ("make_functional", "the persistent ones among params", ValueError("buffers must hold the module's names"),
     lambda mesh: APPLY.persistent(dict(NET.named_parameters()))),
]  # fmt: skip


def with_tensor(**tensors):
    """Return a module with a tensor subclass as its weight, or as a buffer."""
    net = nn.Sequential(nn.Linear(3, 3))
    for name, value in tensors.items():
        net[0].register_parameter(name, value) if name == "weight" else net[0].register_buffer(name, value)
    return net


TWO = TwoTensor(torch.ones(3, 3), torch.zeros(3, 3))
CASES += [
    ("make_functional", "a parameter of a tensor subclass",
     TypeError("parameter '0.weight' is a TwoTensor (torch.testing.…)…: they hold plain tensors. Convert it to"),
     lambda: fs.make_functional(with_tensor(weight=nn.Parameter(TWO)))),
    ("make_functional", "a buffer of a tensor subclass", TypeError("buffer '0.seen' is a TwoTensor…Convert it"),
     lambda: fs.make_functional(with_tensor(seen=TWO))),
    ("make_functional", "a module of torch.jit",
     TypeError("module '0' was made by torch.jit,…: use the module from which it was made, and pass compiler=torch.compile"),
     lambda: fs.make_functional(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))),
    ("make_functional", "an embedding with max_norm",
     ValueError("module '(root)' (EmbeddingBag) has max_norm=2.0,…parameter 'weight',…: set max_norm to None"),
     lambda: fs.make_functional(nn.EmbeddingBag(5, 3, max_norm=2.0))),
]  # fmt: skip


# --- fully_shard ----------------------------------------------------------------------------------

CASES += [
    ("fully_shard Schedule", "names instead of a schedule", TypeError("make it with make_schedule(plan, order)"),
     lambda s: grads_with(s, schedule=["0", "2"])),
]  # fmt: skip


def evaluated_in_training(mesh):
    apply, params, buffers = fs.make_functional(DROPPED.train())
    plan = fs.make_plan(params, mesh)
    with torch.no_grad():
        return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, DATA)


CASES += [
    ("fully_shard", "the training function of a model in evaluation",
     untold(MISTAKES, "`sharded` keeps the mode of its `apply`, even under `no_grad`.",
        lambda: DROPPED.eval()(DATA).detach()), evaluated_in_training),
]  # fmt: skip


# --- unshard, reshard, remat ----------------------------------------------------------------------

CASES += [
    ("unshard", "the shard of another unit of the same size",
     untold(MISTAKES, "so you can pass another one of the same size by mistake.", lambda:
        [NET[0].bias.detach(), NET[0].weight.detach()]),
     lambda s: optree.tree_leaves(fs.unshard(identity, s.plan.units["0"], s.mesh)(s.shards["2"]))),
    ("unshard", "ranks call units in different orders", DESYNC,
     lambda s: [fs.unshard(identity, s.plan.units[name], s.mesh)(s.shards[name]) for name in
        (("0", "2") if s.mesh.rank == 0 else ("2", "0"))]),
    ("remat", "the result of a function", TypeError("remat takes a function"),
     lambda mesh: fs.remat(APPLY(dict(NET.named_parameters()), BUFFERS, DATA))),
]  # fmt: skip


def captured_factor(changed):
    factor, x = [2.0], torch.ones(2, requires_grad=True)
    loss = fs.remat(lambda x: (x * factor[0]).square().sum())(x)
    factor[0] = changed
    loss.backward()
    return x.grad


CASES += [
    ("remat", "a captured number changes before backward",
     untold(MISTAKES, "`remat` reads captured variables again in backward.", torch.full((2,), 8.0)),
     lambda mesh: captured_factor(5.0)),
]  # fmt: skip


@CASES("remat", "a captured parameter under a transform", ValueError("pass the tensor as an argument"))
def _(mesh):
    w = torch.ones(2, requires_grad=True)
    return torch.func.grad(lambda x: fs.remat(lambda x: (x * w).sum())(x))(torch.ones(2))


# --- Cast -----------------------------------------------------------------------------------------


def everywhere(pre, post):
    return lambda unit, buffer: fs.Cast(pre, post)


def unchanged(shard):
    return shard


CASES += [
    ("Cast", "a plain tuple", TypeError("that returns a funcshard.Cast or None"),
     lambda s: loss_with(s, cast=lambda unit, buffer: (unchanged, torch.flatten))),
    ("Cast", "rows of ranks mixed up",
     untold(MISTAKES, "The library trusts your `Cast`: it may mix up the rows of ranks", whole_loss),
     lambda s: loss_with(s, cast=everywhere(unchanged, lambda rows: rows.T.reshape(-1)))),
    ("Cast", "random numbers, which backward draws again", untold(MISTAKES, "or draw random numbers.", whole_grads),
     lambda s: grads_with(s, cast=everywhere(lambda shard: shard + torch.rand_like(shard), torch.flatten))),
]  # fmt: skip


# --- start ----------------------------------------------------------------------------------------


def started(s, program, before=lambda f: None):
    """Run ``program(f, g, shards, before(f))`` with functions of the units "0" and "2" as a loss function."""
    linear = lambda leaves, x: torch.nn.functional.linear(x, leaves["weight"], leaves["bias"])  # noqa: E731
    f, g = (fs.reshard(fs.unshard(linear, s.plan.units[name], s.mesh)) for name in ("0", "2"))
    given_before = before(f)
    return fs.value_and_grad(lambda shards: program(f, g, shards, given_before).square().mean())(s.shards)[0]


CASES += [
    ("unshard reshard", "gathers started in another order on one rank", DESYNC,
     lambda s: started(s, lambda f, g, shards, _: in_order_of_ranks(s, f, g, shards))),
]  # fmt: skip


def in_order_of_ranks(s, f, g, shards):
    starts = [(f, "0"), (g, "2")][:: -1 if s.mesh.rank else 1]
    handles = {name: each.start(shards[name]) for each, name in starts}
    return g(handles["2"], f(handles["0"], s.x))
