"""Local leaves: each rank keeps its own values, beside leaves that are sharded."""

import math

import pytest
import torch

import funcshard as fs
from tests.pairwise import crossed

SHARED = torch.linspace(-1, 1, 12).reshape(4, 3)


def params_of(mesh):
    return {"shared": {"w": SHARED}, "expert": {"w": torch.full((3, 2), mesh.rank + 1.0)}}


def apply(leaves, x):
    return (x @ leaves["shared"]["w"] @ leaves["expert"]["w"]).square().mean()


WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_local_leaf_has_the_gradient_of_its_ranks_loss_and_no_collective(world, strategy):
    x = torch.linspace(0, 1, 8).reshape(2, 4)

    def main(mesh):
        params = params_of(mesh)
        plan = fs.make_plan(params, mesh, local=["expert"], strategy=strategy)
        f = fs.unshard(apply, plan.units[""], mesh)
        shards = fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(lambda s: f(s[""], x * (mesh.rank + 1)))(shards)
        assert {event.buffer for event in events} <= {"float32"}
        assert tuple(events) == fs.predict_events(plan)
        return grads[""]["float32.local"], fs.gather(grads, plan, mesh)["shared"]["w"], mesh.rank

    results = fs.simulate(main, world)
    wanted = []
    for rank in range(len(results)):
        shared, expert = SHARED.clone().requires_grad_(), torch.full((3, 2), rank + 1.0, requires_grad=True)
        loss = apply({"shared": {"w": shared}, "expert": {"w": expert}}, x * (rank + 1))
        wanted.append(torch.autograd.grad(loss, [expert, shared]))
    mean = sum(shared for _, shared in wanted) / len(results)
    for own, shared, rank in results:
        torch.testing.assert_close(own, wanted[rank][0].flatten())
        torch.testing.assert_close(shared, mean)


@crossed(strategy=["full_shard", "no_shard"], norm_type=[1.0, 2.0, math.inf], world=WORLDS)
def test_the_global_norm_counts_every_ranks_own_leaves_once(world, norm_type, strategy):
    def main(mesh):
        params = params_of(mesh)
        plan = fs.make_plan(params, mesh, local=["expert"], strategy=strategy)
        return fs.global_norm(fs.shard(params, plan, mesh), plan, mesh, norm_type)

    norms = fs.simulate(main, world)
    everything = torch.cat([SHARED.flatten(), *(torch.full((6,), rank + 1.0) for rank in range(len(norms)))])
    for norm in norms:
        torch.testing.assert_close(norm, torch.linalg.vector_norm(everything, norm_type))


def test_units_may_override_the_strategy():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    choose = lambda m: {"strategy": "no_shard"} if isinstance(m, torch.nn.LayerNorm) else isinstance(m, torch.nn.Linear)  # noqa: E731
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=fs.wrap.by_function(choose)(net))
        sharded = fs.fully_shard(apply, plan, mesh)
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, buffers, torch.ones(2, 2)).sum())(fs.shard(params, plan, mesh))
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, not_saved=["0"])  # its input needs no gradient
        return {name: unit.strategy for name, unit in plan.units.items()}, {e.kind for e in events if e.unit == "2"}

    assert fs.simulate(main, 2) == [({"0": "full_shard", "1": "full_shard", "2": "no_shard"}, {"all_reduce"})] * 2
