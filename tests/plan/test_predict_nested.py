"""Predictions from the plan alone: of plain units, of units inside others, and of units that are gathered on demand."""

import itertools

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module, recorded
from tests.jobs import Calls
from tests.ranks import on_ranks


def linear():
    return nn.Linear(3, 3)


SETTINGS = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit": limit}
    for forward, backward, limit in itertools.product([True, False], ["pre", "post", None], [1, 2])
]


def test_prediction_names_kind_unit_bytes_dtype_and_axis_exactly():
    plan = fs.make_plan({"a": torch.ones(5), "u": {"w": torch.ones(7)}}, {"replicate": 2, "shard": 3}, units=["u"])
    assert fs.predict_events(plan) == (
        fs.Event("all_gather", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_reduce", "u", "float32", "float32", 12, "replicate", 2),
        fs.Event("all_reduce", "", "float32", "float32", 8, "replicate", 2),
    )


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_backward_gathers_an_outer_unit_first_where_its_own_leaves_are_used_last(mesh, settings):
    units = ["0.parts.0", "1", "1.parts.0", "1.parts.1"]

    def gathered(order):
        net = nn.Sequential(Calls((0,), linear()), Calls(order, linear(), linear()))
        _, sharded, shards = of_module(mesh, net, units, schedule={"order": units, **settings})
        _, events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, torch.ones(2, 3)).square().mean()), shards)
        return [event.unit for event in events if event.kind == "all_gather"][5:]

    # the first linear layer's input needs no gradient, and so its backward no weight
    assert gathered((None, 0, 1)) == ["1.parts.1", "1.parts.0", "1"]
    assert gathered((0, None, 1)) == ["1.parts.1", "1", "1.parts.0"]
    assert gathered((None, 0, 1, None)) == ["1", "1.parts.1", "1.parts.0"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_units_on_demand_are_not_gathered_ahead_and_the_others_are(mesh, settings):
    net, units = nn.Sequential(Calls((None,)), *(linear() for _ in range(5))), [str(i) for i in range(6)]
    _, sharded, shards = of_module(mesh, net, units, schedule={"order": units, "on_demand": ["3", "1"], **settings})
    _, events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, torch.ones(2, 3)).square().mean()), shards)
    assert events == fs.predict_events(sharded.plan, sharded.schedule)
    found = [event.unit for event in events if event.kind == "all_gather"]
    ahead = settings["forward_prefetch"] and settings["limit"] == 2
    assert found[:6] == (["0", "2", "1", "4", "3", "5"] if ahead else units)
    assert sorted(found[6:]) in (units[1:], units)
    assert sharded.schedule.on_demand == ("1", "3")


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize("remat", [True, ["1", "2"]], ids=["each unit", "outer units"])
@pytest.mark.parametrize("order", [(None, 0, 1), (0, 1, None), (0, None, 1, None)], ids=str)
@on_ranks(2)
def test_units_inside_recomputed_units_are_gathered_once_more(mesh, order, remat):
    def outer():
        return Calls(order, linear(), Calls((None, 0), linear()))

    for settings in SETTINGS[::3]:
        net = nn.Sequential(linear(), outer(), outer())
        units = ["0", "1", "1.parts.*", "1.parts.1.parts.0", "2", "2.parts.*", "2.parts.1.parts.0"]
        _, sharded, shards = of_module(mesh, net, units, schedule=settings, how={"remat": remat})
        grad = fs.value_and_grad(lambda s, sharded=sharded: sharded(s, {}, torch.ones(2, 3)).square().mean())
        names = [name for name in sharded.plan.units if name] if remat is True else remat
        for _ in range(3):
            _, events = recorded(grad, shards)
        assert events == fs.predict_events(sharded.plan, sharded.schedule, recomputed=names), settings
