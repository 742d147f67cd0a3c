"""Parameters outside the plan: each rank has its own number of experts, as ordinary inputs of a call."""

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.module.law import Runs, plain_call, same_bits
from tests.ranks import on_ranks, run_ranks, run_simulated

OWN = ["blocks.*.experts.**"]
UNITS = {"blocks": ["blocks.*"], "the root alone": [], "a unit inside": ["blocks.*", "blocks.0.dense"]}
EXPERTS = {0: 1, 1: 3, 2: 0, 3: 2}  # of each rank


def experts(number):
    def forward(m, x):
        y = m.scale * torch.tanh(m.dense(x))
        return x + sum((torch.tanh(expert(y)) for expert in m.experts), y)

    several = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))
    return Runs(forward, dense=nn.Linear(4, 4), experts=several, scale=torch.full((4,), 0.5))


def model(rank):
    """Return the model of one rank: all ranks share everything but the experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.ModuleDict({"blocks": nn.Sequential(experts(0), experts(0)), "head": nn.Linear(4, 1)})
        torch.manual_seed(10 + rank)
        for block in net["blocks"]:
            block.experts.extend(nn.Linear(4, 4) for _ in range(EXPERTS[rank]))
    return Runs(lambda m, x: m.head(m.blocks(x)), **net).double()


def made(rank):
    """Return the function of a rank, the parameters that all ranks share, its own ones, and the buffers."""
    apply, params, buffers = fs.make_functional(model(rank))
    own = {name: value for name, value in params.items() if ".experts." in name}
    return apply, {name: value for name, value in params.items() if name not in own}, own, buffers


def batch(rank):
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def step(mesh, units, strategy="full_shard"):
    """Return the gradients of the plan's leaves by name, and those of this rank's own experts."""
    apply, shared, own, buffers = made(mesh.rank)
    plan = fs.make_plan(shared, mesh, units=units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, ignored_params=OWN)

    def loss_fn(trained, x):
        shards, own = trained
        return sharded(shards, {**buffers, **own}, x).square().mean()

    for _ in range(2):
        with fs.record_events() as events:
            trained = fs.shard(shared, plan, mesh), own
            _, (grads, own_grads) = fs.value_and_grad(loss_fn, mesh=mesh)(trained, batch(mesh.rank))
    assert tuple(events) == fs.predict_events(plan, sharded.schedule)
    return fs.gather(grads, plan, mesh), own_grads


def check(results):
    """Check the gradients of the mean over ranks of the losses."""
    world = len(results)
    alone = [plain_call(model(rank), batch(rank))[1] for rank in range(world)]
    for mine, (grads, own_grads) in zip(alone, results, strict=True):
        torch.testing.assert_close(grads, {name: sum(each[name] for each in alone) / world for name in grads})
        torch.testing.assert_close(own_grads, {name: mine[name] / world for name in own_grads})
        assert {*grads, *own_grads} == mine.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "strategy"), [("blocks", "no_shard"), ("the root alone", "shard_grad_op"), ("a unit inside", "full_shard")]
)
def test_ranks_train_experts_of_another_number_outside_the_plan(units, strategy):
    check(run_simulated(lambda mesh: step(mesh, UNITS[units], strategy), 4))


@pytest.mark.slow
def test_processes_train_experts_of_another_number_outside_the_plan():
    check(run_ranks(step, 2, UNITS["blocks"]))


@on_ranks(4)
def test_a_checkpoint_keeps_the_ignored_parameters_of_each_rank(mesh, tmp_path):
    _, shared, own, _ = made(mesh.rank)
    plan = fs.make_plan(shared, mesh, units=["blocks.*"])
    state = {"shards": fs.shard(shared, plan, mesh), "own": fs.PerRank(own)}
    fs.save(tmp_path, state, plan, mesh)
    back = fs.restore(tmp_path, plan, mesh)["own"].value
    same_bits(back, own)


WRONG = [
    (["blocks.*.expert.**"], (), ValueError, r"missing: \['blocks.0.experts.*, or name parameters that it should lack"),
    ([1], (), TypeError, r"expected string or bytes-like object, got 'int'"),
    (OWN, {}, ValueError, r"hold a tensor of shape \(4, 4\) for 'blocks.0.experts.0.weight', .* found nothing: pass"),
    (OWN, torch.zeros(2), ValueError, r"shape \(4, 4\) for .*found a tensor of shape \(2,\): pass \{\*\*buffers"),
]


@pytest.mark.parametrize(("ignored", "given", "error", "words"), WRONG)
def test_mistakes_with_ignored_parameters_are_errors(ignored, given, error, words):
    apply, shared, own, buffers = made(1)
    plan, mesh = fs.make_plan(shared, 1, units=["blocks.*"]), fs.Mesh()
    with pytest.raises(error, match=words):
        fs.fully_shard(apply, plan, mesh, ignored_params=ignored)(
            fs.shard(shared, plan, mesh), {**buffers, **(dict.fromkeys(own, given) if len(given) else {})}, batch(0)
        )
