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


def test_the_plan_says_which_leaves_are_local():
    plan = fs.make_plan({"a": torch.zeros(5), "experts": [torch.zeros(4), torch.zeros(4)]}, 2, local=["experts.*"])
    assert fs.Plan.from_json(plan.to_json()) == plan
    (unit,) = plan.unit_list
    assert {b.key: (b.local, b.shards, b.padded_numel) for b in unit.buffers} == {
        "float32": ((), 2, 6),
        "float32.local": (("replicate", "shard"), 1, 8),
    }
    assert [line.rstrip()[-15:] for line in str(plan).splitlines() if "float32.local" in line] == ["local to a rank"]


def test_gathering_gives_each_rank_its_own():
    def main(mesh):
        params = params_of(mesh)
        plan = fs.make_plan(params, mesh, local=["expert"])
        return fs.gather(fs.shard(params, plan, mesh), plan, mesh), mesh.rank

    for params, rank in fs.simulate(main, 2):
        assert torch.equal(params["shared"]["w"], SHARED)
        assert torch.equal(params["expert"]["w"], torch.full((3, 2), rank + 1.0))


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


def test_the_norms_traffic_is_recorded_on_the_axis_that_it_takes():
    def main(mesh):
        params = params_of(mesh)
        plan = fs.make_plan(params, mesh, local=["expert"])
        shards = fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            fs.global_norm(shards, plan, mesh)
        return [(event.kind, event.axis) for event in events]

    wanted = [("all_gather", "shard"), ("all_reduce", "shard"), ("all_reduce", "replicate")]
    assert fs.simulate(main, {"replicate": 2, "shard": 2}) == [wanted] * 4


def test_a_local_glob_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="local node 'experts' matches no part of the tree"):
        fs.make_plan({"a": torch.zeros(2)}, 2, local=["experts"])


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": 1}, "unit '0' overrides 'prefetch'; a unit can override 'strategy'"),
        ({"strategy": "zero"}, "strategy must be 'full_shard'"),
    ],
)
def test_overrides_that_do_not_exist_are_refused(options, words):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=words):
        fs.make_plan(fs.make_functional(net)[1], 2, units=fs.wrap.by_function(lambda m: options)(net))
