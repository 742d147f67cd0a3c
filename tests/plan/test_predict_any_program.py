"""Any program of units: nested, repeated, joined, of any strategies, under any schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.plan.wrap import Units
from tests.core.units import recorded, same_bits
from tests.jobs import Calls
from tests.module.law import Runs
from tests.plan.test_predict import linear

STRATEGIES, WIDTH = ("full_shard", "shard_grad_op", "no_shard"), 3
UNITS = (
    "parts.0", "parts.1", "parts.2", "parts.2.parts.0", "parts.2.parts.1", "parts.2.parts.2", "parts.2.parts.2.parts.0",
    "parts.3", "parts.3.inner",
)  # fmt: skip


def lends():
    """Return a module that hands its own weight to the module inside it, which uses it after its own."""
    run = lambda inner, x, weight: torch.sin(torch.sin(x @ inner.own) @ weight)  # noqa: E731
    inner = Runs(run, own=nn.Parameter(torch.eye(WIDTH) - 0.2))
    weight = nn.Parameter(torch.eye(WIDTH) + 0.1)
    return Runs(lambda outer, x: outer.inner(x, outer.weight), weight=weight, inner=inner)


def program(order, inner, deepest):
    """Return a module that calls its parts in an order; the third part is another such module, with a third inside."""
    third = Calls(inner, linear(), linear(), Calls(deepest, linear()))
    return Calls(order, linear(), linear(), third, lends())


def orders(most, *parts):
    """Lists of parts with a use of the module's own leaf somewhere, because what nobody uses is not reduced."""
    lists = st.lists(st.sampled_from([None, *parts]), max_size=most)
    return st.builds(lambda order, at: [*order[:at], None, *order[at:]], lists, st.integers(0, most))


SETTINGS = st.fixed_dictionaries({
    "forward_prefetch": st.booleans(),
    "backward_prefetch": st.sampled_from(["pre", "post", None]),
    "limit": st.integers(1, 3),
    "on_demand": st.lists(st.sampled_from(UNITS), max_size=2, unique=True),
})  # fmt: skip


@pytest.mark.nightly
@given(
    world=st.sampled_from([2, {"replicate": 2, "shard": 2}]),
    order=orders(6, 0, 1, 2, 2, 3),
    inner=orders(4, 0, 1, 2),
    deepest=orders(2, 0),
    strategies=st.tuples(*[st.sampled_from(STRATEGIES)] * len(UNITS)),
    bucket_bytes=st.sampled_from([0, 256, 1 << 20]),
    options=SETTINGS,
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_gradients_are_the_unsharded_ones_to_rounding_the_bits_no_schedules_and_the_collectives_the_predicted_ones(
    world, order, inner, deepest, strategies, bucket_bytes, options
):
    torch.manual_seed(0)
    apply, params, _ = fs.make_functional(program(order, inner, deepest))
    units = Units(UNITS, {name: {"strategy": strategy} for name, strategy in zip(UNITS, strategies, strict=True)})

    def main(mesh):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + mesh.rank)
        plan = fs.make_plan(params, mesh, units=units, bucket_bytes=bucket_bytes)
        shards, learning = fs.shard(params, plan, mesh), fs.fully_shard(apply, plan, mesh)
        step_of = lambda sharded: fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)  # noqa: E731
        first = step_of(learning)
        unit_of = {path: unit.name for unit in plan.unit_list for path in unit.paths}
        on_demand = {unit_of[path] for path in options["on_demand"]}
        schedule = fs.make_schedule(plan, learning.schedule.order, **{**options, "on_demand": on_demand})
        given_one = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        for sharded in (learning, given_one, given_one):
            result, events = recorded(step_of, sharded)
            assert events == fs.predict_events(plan, sharded.schedule)
            same_bits(result, first)
        expected = torch.func.grad(lambda p: apply(p, {}, x).square().mean())(params)
        torch.testing.assert_close(fs.gather(first[1], plan, mesh), tree.map(lambda grad: fs.pmean(grad, mesh), expected))

    fs.simulate(main, world)
