"""The collectives of estimates are those of real steps: nested, repeated, checkpointed, frozen units."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs

WIDTH, BLOCKS = 6, 3
again = functools.partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """Two linear layers with norms; a checkpoint may hold a part of the second half."""

    def __init__(self, inside):
        super().__init__()
        self.norm1, self.norm2, self.inside = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), inside
        self.linear, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x + torch.relu(self.linear(self.norm1(x)))
        if self.inside == "module":
            return x + again(self.mlp, self.norm2(x))
        if self.inside == "function":
            return again(lambda y: y + self.scale * self.mlp(self.norm2(y)), x)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, how=""):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), how
        self.blocks = nn.ModuleList(Block(how) for _ in range(BLOCKS)).requires_grad_("frozen" not in how)

    def forward(self, x):
        x = self.first(x)
        for i, block in enumerate([*self.blocks] * (2 if "in turn" in self.how else 1)):
            x = torch.sin(block(x)) if "twice" in self.how else x
            x = again(block, x) if self.how == "around" or (self.how == "around some" and i % 2) else block(x)
        return self.last(x).square().mean()


BOTH = ("blocks.*", "blocks.*.mlp")
ALL = (*BOTH, "blocks.*.norm1", "blocks.*.norm2")
GRAD_OP = {"strategy": "shard_grad_op"}
# Where checkpoints are; options of make_plan; of make_schedule; the units that backward computes again.
CASES = {
    "plain": ("", {"units": ALL}, {}, ()),
    "plain, after backward": ("", {"units": ALL}, {"backward_prefetch": "post"}, ()),
    "around blocks": ("around", {"units": ALL}, {}, ()),
    "around blocks, after backward": ("around", {"units": ALL}, {"backward_prefetch": "post"}, ()),
    "around blocks, on demand": ("around", {"units": ALL}, {"backward_prefetch": None}, ()),
    "around blocks, three ahead": ("around", {"units": ALL}, {"limit": 3}, ()),
    "around blocks, slices": ("around", {"units": ALL, "reshard_after_forward": 2}, {}, ()),
    "around blocks, kept": ("around", {"units": ALL, **GRAD_OP}, {}, ()),
    "around blocks, inner ones kept": ("around", {"units": {"blocks.*": {}, "blocks.*.mlp": GRAD_OP}}, {}, ()),
    "around blocks, outer ones kept": ("around", {"units": {"blocks.*.mlp": {}, "blocks.*": GRAD_OP}}, {}, ()),
    "around some blocks": ("around some", {"units": BOTH}, {}, ()),
    "inside blocks, a unit": ("module", {"units": ALL}, {}, ()),
    "inside blocks, no unit": ("module", {"units": ("blocks.*",)}, {}, ()),
    "inside blocks, a function": ("function", {"units": ALL}, {}, ()),
    "inside blocks, a function, kept": ("function", {"units": ALL, **GRAD_OP}, {}, ()),
    "twice": ("twice", {"units": BOTH}, {}, ()),
    "twice, kept": ("twice", {"units": BOTH, **GRAD_OP}, {}, ()),
    "twice, two ahead": ("twice", {"units": ("blocks.*",)}, {"limit": 2}, ()),
    "twice, inner ones alone": ("twice", {"units": ("blocks.*.mlp", "blocks.*.norm1")}, {}, ()),
    "twice, remat": ("twice", {"units": BOTH}, {}, ("blocks",)),
    "twice, remat, kept": ("twice", {"units": BOTH, **GRAD_OP}, {}, ("blocks",)),
    "remat of blocks": ("", {"units": ALL}, {}, ("blocks",)),
    "remat of blocks, kept": ("", {"units": ALL, **GRAD_OP}, {}, ("blocks",)),
    "frozen blocks": ("frozen", {"units": BOTH}, {}, ()),
    "frozen blocks, in turn": ("frozen, in turn", {"units": ("blocks.*",)}, {}, ()),
    "frozen blocks, in turn, remat": ("frozen, in turn", {"units": ("blocks.*",)}, {}, ("blocks",)),
    "remat of units in units": ("", {"units": BOTH}, {}, ("blocks", "mlp")),
}


@functools.cache
def made(how):
    apply, params, buffers = fs.make_functional(Net(how))
    return apply, params, buffers, fs.profile(apply, params, buffers, torch.zeros(2, WIDTH))


def recorded(apply, params, buffers, plan, schedule, remat):
    """The collectives of the second step of the library itself, and the schedule that it learned."""

    def step(mesh, given):
        sharded, shards = fs.fully_shard(apply, plan, mesh, schedule=given, remat=remat), fs.shard(params, plan, mesh)
        for _ in range(2):
            with fs.record_events() as events:
                fs.value_and_grad(lambda shards: sharded(shards, buffers, torch.zeros(2, WIDTH)))(shards)
        return tuple(event for event in events if event.unit is not None), sharded.schedule

    events, learned = fs.simulate(lambda mesh: step(mesh, None), plan.mesh_axes)[0]
    if schedule is None:
        return events, learned
    chosen = dataclasses.replace(schedule, order=learned.order, backward=learned.backward)
    return fs.simulate(lambda mesh: step(mesh, chosen), plan.mesh_axes)[0]


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize("name", CASES)
def test_the_collectives_and_their_order_are_those_of_a_real_step(name):
    how, options, scheduled, parts = CASES[name]
    apply, params, buffers, profile = made(how)
    plan = fs.make_plan(params, 4 if "slices" in name else 2, **options)
    remat = [
        unit for unit in plan.units if unit and ("mlp" if unit.endswith("mlp") else "blocks") in parts and "norm" not in unit
    ]
    schedule = fs.make_schedule(plan, **scheduled) if scheduled else None
    events, learned = recorded(apply, params, buffers, plan, schedule, remat)
    report = fs.estimate(profile, plan, schedule=schedule, remat=remat)
    assert report.events == events
    assert report.timeline[-1].memory == report.timeline[0].memory
    assert report.schedule.order == learned.order
    freed = [
        [(what, unit) for what, unit in each.backward_order() if what == "reduce" or plan.units[unit].reshard_after_forward]
        for each in (report.schedule, learned)
    ]
    assert freed[0] == freed[1]
