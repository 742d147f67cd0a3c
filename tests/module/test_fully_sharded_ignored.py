"""Parameters outside the plan: each rank has its own number of experts, as ordinary inputs of a call."""

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

OWN = ["blocks.*.experts.**"]
UNITS = {"blocks": ["blocks.*"], "the root alone": [], "a unit inside": ["blocks.*", "blocks.0.dense"]}
EXPERTS = {0: 1, 1: 3, 2: 0, 3: 2}  # of each rank


class Experts(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.dense, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(number))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x):
        y = self.scale * torch.tanh(self.dense(x))
        return x + sum((torch.tanh(expert(y)) for expert in self.experts), y)


def made(rank):
    """Return the model of one rank: all ranks share everything but the experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.ModuleDict({"blocks": nn.Sequential(Experts(0), Experts(0)), "head": nn.Linear(4, 1)})
        torch.manual_seed(10 + rank)
        for block in net["blocks"]:
            block.experts.extend(nn.Linear(4, 4) for _ in range(EXPERTS[rank]))
    return Model(net).double()


class Model(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.blocks, self.head = parts["blocks"], parts["head"]

    def forward(self, x):
        return self.head(self.blocks(x))


def batch(rank):
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def step(mesh, units, strategy="full_shard", **how):
    """Return the gradients of the plan's leaves by name, those of this rank's own experts, and the events."""
    apply, params, buffers = fs.make_functional(made(mesh.rank))
    own = {name: value for name, value in params.items() if ".experts." in name}
    plan = fs.make_plan(
        {name: value for name, value in params.items() if name not in own}, mesh, units=units, strategy=strategy
    )
    sharded = fs.fully_shard(apply, plan, mesh, ignored_params=OWN, **how)

    def loss_fn(trained, x):
        shards, own = trained
        return sharded(shards, {**buffers, **own}, x).square().mean()

    shards = fs.shard({name: value for name, value in params.items() if name not in own}, plan, mesh)
    for _ in range(2):
        with fs.record_events() as events:
            _, (grads, own_grads) = fs.value_and_grad(loss_fn, mesh=mesh)((shards, own), batch(mesh.rank))
    assert tuple(events) == fs.predict_events(plan, sharded.schedule)
    return fs.gather(grads, plan, mesh), own_grads


def whole(world):
    """Return the mean over ranks of the gradients of what is shared, and each rank's gradients of its experts."""
    shared, own = {}, []
    for rank in range(world):
        net = made(rank)
        (net(batch(rank)).square().mean() / world).backward()
        grads = {name: p.grad for name, p in net.named_parameters()}
        own.append({name: grad for name, grad in grads.items() if ".experts." in name})
        for name in grads.keys() - own[-1].keys():
            shared[name] = shared.get(name, 0) + grads[name]
    return shared, own


def check(results):
    shared, own = whole(len(results))
    for rank, (grads, own_grads) in enumerate(results):
        torch.testing.assert_close(grads, shared, check_device=False)
        torch.testing.assert_close(own_grads, own[rank])  # of the mean of the losses over ranks


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_ranks_train_experts_of_another_number_outside_the_plan(units, strategy):
    check(run_simulated(lambda mesh: step(mesh, UNITS[units], strategy), 4))


@pytest.mark.slow
def test_processes_train_experts_of_another_number_outside_the_plan():
    check(run_ranks(step, 2, UNITS["blocks"]))


def test_a_checkpoint_keeps_the_ignored_parameters_of_each_rank(tmp_path):
    def main(mesh):
        _, params, _ = fs.make_functional(made(mesh.rank))
        own = {name: value for name, value in params.items() if ".experts." in name}
        shared = {name: value for name, value in params.items() if name not in own}
        plan = fs.make_plan(shared, mesh, units=["blocks.*"])
        state = {"shards": fs.shard(shared, plan, mesh), "own": fs.PerRank(own)}
        fs.save(tmp_path, state, plan, mesh)
        back = fs.restore(tmp_path, plan, mesh)["own"].value
        assert back.keys() == own.keys()
        assert all(torch.equal(back[name], own[name]) for name in own)

    run_simulated(main, 4)


def wrong(mesh, what):
    apply, params, buffers = fs.make_functional(made(1))
    own = {name: value for name, value in params.items() if ".experts." in name}
    shared = {name: value for name, value in params.items() if name not in own}
    if what == "ranks":
        fs.shard(fs.make_functional(made(mesh.rank))[1], fs.make_plan(fs.make_functional(made(mesh.rank))[1], mesh), mesh)
    plan = fs.make_plan(params if what == "planned" else shared, mesh, units=["blocks.*"])
    options = {"text": "experts.**", "numbers": [1], "typo": ["blocks.*.expert.**"], "missing": ()}.get(what, OWN)
    sharded = fs.fully_shard(apply, plan, mesh, ignored_params=options)
    shards = fs.shard(shared, plan, mesh)
    given = {"no buffers": None, "absent": buffers, "a shape": {**buffers, **{name: torch.zeros(2) for name in own}}}[what]
    sharded(shards, given, batch(0))


WRONG = {
    "planned": (ValueError, r"ignored_params match 'blocks.0.experts.0.weight', which is a leaf of the plan; make the plan"),
    "missing": (ValueError, r"it lacks \['blocks.0.experts.*, or name parameters that it should lack in ignored_params"),
    "typo": (ValueError, r"it lacks \['blocks.0.experts.*, or name parameters that it should lack in ignored_params"),
    "text": (TypeError, r"ignored_params must be a list of paths or globs; found 'experts.\*\*': write ignored_params="),
    "numbers": (TypeError, r"ignored_params must be a list of paths or globs; found \[1\]"),
    "absent": (
        ValueError,
        r"buffers must hold a tensor of shape \(4, 4\) for 'blocks.0.experts.0.weight', .* found nothing: pass",
    ),
    "a shape": (
        ValueError,
        r"buffers must hold a tensor of shape \(4, 4\) for 'blocks.0.exp.*found \(2,\): pass \{\*\*buffers",
    ),
    "no buffers": (TypeError, r"buffers must be a dictionary \{name: tensor\}; found NoneType"),
    "ranks": (ValueError, r"the plan"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_with_ignored_parameters_are_errors(what):
    error, words = WRONG[what]
    with pytest.raises(error, match=words):
        run_simulated(wrong, 2, what)
