"""Schedules of units that are called inside others, and of units that are never gathered ahead."""

import itertools

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.jobs import Calls


def linear():
    return nn.Linear(3, 3)


SETTINGS = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit": limit}
    for forward, backward, limit in itertools.product([True, False], ["pre", "post", None], [1, 2])
]


def step_of(sharded, shards, mesh):
    x = torch.linspace(-1, 1, 6).reshape(2, 3) * (mesh.rank + 1)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)
    return loss, fs.gather(grads, sharded.plan, mesh), tuple(events)


@pytest.mark.slow
def test_backward_gathers_an_outer_unit_first_where_its_own_leaves_are_used_last():
    def gathered(order, settings):
        torch.manual_seed(0)
        net = nn.Sequential(Calls((0,), linear()), Calls(order, linear(), linear()))
        apply, params, _ = fs.make_functional(net)

        def main(mesh):
            units = ["0.parts.0", "1", "1.parts.0", "1.parts.1"]
            plan = fs.make_plan(params, mesh, units=units)
            sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, units, **settings))
            _, _, events = step_of(sharded, fs.shard(params, plan, mesh), mesh)
            again = [event.unit for event in events if event.kind == "all_gather"][5:]
            return again, sharded.schedule.backward is None, str(sharded.schedule)

        return fs.simulate(main, 2)[0]

    for settings in SETTINGS:
        # the first linear layer's input needs no gradient, and so its backward no weight
        assert gathered((None, 0, 1), settings)[0] == ["1.parts.1", "1.parts.0", "1"]
        assert gathered((0, None, 1), settings)[0] == ["1.parts.1", "1", "1.parts.0"]
        assert gathered((None, 0, 1, None), settings)[0] == ["1", "1.parts.1", "1.parts.0"]
    _, flat, text = gathered((None, 0, 1, None), SETTINGS[0])
    rows = {line.split()[1]: line.split()[2:] for line in text.splitlines() if line[:1].isdigit()}
    assert not flat
    assert rows["1"] == ["1.parts.0", "1.parts.1"]  # forward gathers the one next, backward the other
    assert rows["1.parts.0"] == ["1.parts.1"]  # and then nothing


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_units_on_demand_are_not_gathered_ahead_and_the_others_are(settings):
    torch.manual_seed(0)
    net = nn.Sequential(Calls((None,)), *(linear() for _ in range(5)))
    apply, params, _ = fs.make_functional(net)
    units = [str(i) for i in range(6)]

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=units)
        schedule = fs.make_schedule(plan, units, **settings, on_demand=["3", "1"])
        sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        loss, grads, events = step_of(sharded, fs.shard(params, plan, mesh), mesh)
        assert events == fs.predict_events(plan, sharded.schedule)
        plain = step_of(fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh), mesh)
        torch.testing.assert_close((loss, grads), plain[:2], rtol=0, atol=0)
        return [event.unit for event in events if event.kind == "all_gather"], str(schedule)

    found, text = fs.simulate(main, 2)[0]
    two_ahead = settings["limit"] == 2
    assert found[:6] == (["0", "2", "1", "4", "3", "5"] if settings["forward_prefetch"] and two_ahead else units)
    assert sorted(found[6:]) == units[1:] or sorted(found[6:]) == units
    assert "ahead, on demand 1, 3" in text
