"""``reshard_after_forward`` as a number: a few neighbours hold a unit together between forward and backward."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.comm import neighbours
from funcshard.comm.wrapped_group import WrappedGroup
from tests.ranks import run_ranks, run_simulated
from tests.storages import Alive

WIDTH = 16
UNITS = ["0", "1", "2"]
GRID = {"replicate": 2, "shard": 4}


class Block(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.up, self.down, self.again = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), again

    def forward(self, x):
        if self.again and torch.is_grad_enabled():
            return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), x, use_reentrant=False)
        return x + self.down(torch.tanh(self.up(x)))


def made(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(*[Block(**options) for _ in range(3)], nn.Linear(WIDTH, 1))


def data(rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(mesh, reshard_after_forward, units=UNITS, again=False, how=None, **options):
    """Return loss, gradients, the events of the second of two steps, and what the plan predicts."""
    apply, params, buffers = fs.make_functional(made(again=again))
    plan = fs.make_plan(params, mesh, units=units, reshard_after_forward=reshard_after_forward, **options)
    assert fs.Plan.from_json(plan.to_json()) == plan
    sharded = fs.fully_shard(apply, plan, mesh, **(how or {}))
    step = fs.value_and_grad(lambda shards, x: sharded(shards, buffers, x).square().mean(), mesh=mesh)
    shards = fs.shard(params, plan, mesh)
    for _ in range(2):
        with fs.record_events() as events:
            loss, grads = step(shards, data(mesh.rank))
    return loss, fs.gather(grads, plan, mesh), tuple(events), fs.predict_events(plan, sharded.schedule)


CASES = {
    # case: (world, ranks, options)
    "half a row": (4, 2, {}),
    "a row of a grid": (GRID, 2, {}),
    "over shard_grad_op": (4, 2, {"strategy": "shard_grad_op"}),
    "in low precision": (4, 2, {"precision": fs.MixedPrecision(param_dtype=torch.bfloat16)}),
    "a group": (4, 2, {"units": [["0", "2"], "1"]}),
    "a unit alone": (
        4,
        None,
        {"units": {"0": {}, "1": {"reshard_after_forward": 2}, "2": {"reshard_after_forward": False}}},
    ),
    "with buckets": (4, None, {"units": {"0": {}, "1": {}, "2": {"reshard_after_forward": 2}}, "bucket_bytes": 10**6}),
    "six ranks": (6, 3, {}),
    "a compiled unit": (4, 2, {"how": {"compiler": lambda forward: lambda *args, **kwargs: forward(*args, **kwargs)}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_backward_gathers_from_the_neighbours_as_predicted_and_gives_the_same_bits(case):
    world, ranks, options = CASES[case]
    found = run_simulated(lambda mesh: train(mesh, ranks, **options), world)
    usual = {**options, "units": list(options.get("units", UNITS)), "bucket_bytes": 0}
    plain = run_simulated(lambda mesh: train(mesh, None, **usual), world)
    for (loss, grads, events, predicted), (loss_2, grads_2, events_2, _) in zip(found, plain, strict=True):
        assert torch.equal(loss, loss_2)
        assert all(torch.equal(grads[name], grads_2[name]) for name in grads)
        assert events == predicted
        small = [event for event in events if event.kind == "all_gather" and event.ranks == (ranks or 2)]
        assert small
        assert {event.axis for event in small} == {"shard"}
        whole = {(event.unit, event.buffer): (event.bytes, event.dtype) for event in events_2 if event.kind == "all_gather"}
        assert all(whole[event.unit, event.buffer] == (event.bytes, event.dtype) for event in small)


@pytest.mark.slow
def test_between_forward_and_backward_a_rank_holds_its_part_of_a_unit():
    numel = sum(p.numel() for p in Block().parameters())

    def main(mesh, ranks):
        apply, params, buffers = fs.make_functional(made())
        plan = fs.make_plan(params, mesh, units=UNITS, reshard_after_forward=ranks)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        shards = {u: {b: t.requires_grad_() for b, t in own.items()} for u, own in shards.items()}
        with Alive(lambda nbytes: nbytes in (4 * numel // 2, 4 * numel)) as alive:
            out = sharded(shards, buffers, data(0))
            between = dict(alive.now())
            torch.autograd.grad(out.sum(), [t for own in shards.values() for t in own.values()])
            del out
            return between, dict(alive.now())

    (between, after), *_ = run_simulated(lambda mesh: main(mesh, 2), 4)
    assert between == {4 * numel // 2: 3}  # half of each of three units
    assert after == {}
    (between, after), *_ = run_simulated(lambda mesh: main(mesh, True), 4)
    assert between == {}


@pytest.mark.slow
def test_recomputation_inside_and_around_a_unit_gives_the_same_bits():
    plain = run_simulated(lambda mesh: train(mesh, True, again=True), 4)
    inside = run_simulated(lambda mesh: train(mesh, 2, again=True), 4)
    around = run_simulated(lambda mesh: train(mesh, 2, how={"remat": ["1"]}), 4)
    for found in (inside, around):
        for (loss, grads, *_), (loss_2, grads_2, *_) in zip(found, plain, strict=True):
            assert torch.equal(loss, loss_2)
            assert all(torch.equal(grads[name], grads_2[name]) for name in grads)


@dataclass(frozen=True, slots=True)
class Counting(WrappedGroup):
    """Counts the groups that are made of its ranks."""

    made: list = field(default_factory=list)

    def subgroup(self, global_ranks, axis):
        self.made.append(tuple(global_ranks))
        return self.inner.subgroup(global_ranks, axis)


def test_meshes_that_share_the_shard_axis_share_its_neighbours():
    def main(mesh):
        counting = Counting(mesh.shard)
        mesh = fs.Mesh({**mesh.groups, "shard": counting}, mesh.device)
        near = neighbours(mesh, 2)
        of_units = fs.with_collectives(mesh, "shard", all_reduce=lambda tensor, plain: plain.all_reduce(tensor))
        for same in (mesh, mesh["shard"], mesh["shard", "tensor"], mesh["shard"]["shard"], of_units, of_units["shard"]):
            assert neighbours(same, 2) is near
        assert neighbours(mesh["shard"], 4) is neighbours(mesh, 4)  # in the other order
        assert neighbours(mesh["tensor"], 1) is not neighbours(mesh, 1)  # another shard axis, of one rank
        return [len(ranks) for ranks in counting.made], near.shard.size

    assert run_simulated(main, 8, shape={"shard": 4, "tensor": 2}) == [([2, 4, 1], 2)] * 8


PLANS = {
    # case: (ranks on the shard axis, option, reshard_after_forward of a unit)
    "a divisor": (8, 4, 4),
    "one rank frees nothing": (8, 1, False),
    "all ranks free all": (8, 8, True),
    "one rank of one": (1, 1, False),
    "an integer of numpy": (4, np.int64(2), 2),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_number_of_ranks_is_plan_data(case):
    shards, option, wanted = PLANS[case]
    plan = fs.make_plan({"a": {"w": torch.zeros(9)}}, shards, units=["a"], reshard_after_forward=option)
    assert plan.units["a"].reshard_after_forward is wanted or plan.units["a"].reshard_after_forward == wanted
    assert type(plan.units["a"].reshard_after_forward) is type(wanted)
    assert ("over 4 ranks after forward" in str(plan)) == (wanted == 4)


COUNT = r"reshard_after_forward must be a whole number of ranks"
WRONG = {
    "no divisor": ({"reshard_after_forward": 3}, ValueError, r"divides the 4 ranks of the shard axis; found 3 for unit 'a'"),
    "too many": ({"reshard_after_forward": 8}, ValueError, r"divides the 4 ranks of the shard axis; found 8 for unit 'a'"),
    "none": ({"reshard_after_forward": 0}, ValueError, COUNT + ", at least 1"),
    "a part": ({"reshard_after_forward": 1.5}, ValueError, COUNT),
    "a text": ({"reshard_after_forward": "2"}, TypeError, COUNT),
    "of a unit": (
        {"units": {"a": {"reshard_after_forward": 3}}},
        ValueError,
        r"divides the 4 ranks .* found 3 for unit 'a'",
    ),
    "no_shard": (
        {"reshard_after_forward": 2, "strategy": "no_shard"},
        ValueError,
        r"reshard_after_forward=2 frees gathered",
    ),
    "kept too": ({"reshard_after_forward": 2, "reshard_after_backward": False}, ValueError, r"is freed after forward: pass"),
}


@pytest.mark.parametrize("case", WRONG)
def test_numbers_that_fit_no_mesh_are_refused(case):
    options, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        fs.make_plan({"a": {"w": torch.zeros(9)}}, 4, **{"units": ["a"], **options})


def beside_fsdp2(mesh):
    """Return loss and gradients of this library and of FSDP2, and the events, on the same processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    loss, grads, events, predicted = train(mesh, 2)
    net, ranks = made(), init_device_mesh("cpu", (mesh.world_size,))
    for block in list(net)[:3]:
        fully_shard(block, mesh=ranks, reshard_after_forward=2)
    fully_shard(net, mesh=ranks)
    own = net(data(mesh.rank)).square().mean()
    own.backward()
    theirs = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    return loss, own.detach(), grads, theirs, events == predicted


@pytest.mark.slow
def test_on_processes_it_trains_as_fsdp2_does_with_the_same_number():
    for loss, their_loss, grads, theirs, as_predicted in run_ranks(beside_fsdp2, 4):
        torch.testing.assert_close(loss, their_loss)
        torch.testing.assert_close(grads, theirs)
        assert as_predicted
