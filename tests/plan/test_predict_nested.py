"""Schedules of units that are called inside others, and of units that are never gathered ahead."""

import itertools

import pytest
import torch
from torch import nn

import funcshard as fs


class Outer(nn.Module):
    """Calls what it holds, using a leaf of its own at the given moments: 0 is before the first inner call."""

    def __init__(self, moments, *inner):
        super().__init__()
        self.inner, self.moments, self.scale = nn.ModuleList(inner), moments, nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x):
        for number in range(len(self.inner) + 1):
            if number in self.moments:
                x = torch.sin(x * self.scale)
            if number < len(self.inner):
                x = self.inner[number](x)
        return x


class Lends(nn.Module):
    """Hands its own weight to the module inside it, and uses it there last."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.eye(3) + 0.1), Borrows()

    def forward(self, x):
        return self.inner(x, self.weight)


class Borrows(nn.Module):
    """Uses another unit's weight after its own."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.eye(3) - 0.2)

    def forward(self, x, weight):
        return torch.sin(torch.sin(x @ self.own) @ weight)


def linear():
    return nn.Linear(3, 3)


MODELS = {
    "three deep, both after": lambda: nn.Sequential(linear(), Outer([1], Outer([1], linear())), linear()),
    "three deep, one after": lambda: nn.Sequential(linear(), Outer([1], Outer([0], linear()), linear()), linear()),
    "a weight that is lent": lambda: nn.Sequential(linear(), Lends(), Outer([0, 2], Lends(), linear())),
    "NestedWrappedModule": lambda: nn.Sequential(
        linear(), nn.Sequential(linear(), nn.Linear(3, 4)), nn.Linear(4, 3), linear()
    ),
}
SETTINGS = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit": limit}
    for forward, backward, limit in itertools.product([True, False], ["pre", "post", None], [1, 2])
]


def units_of(net):
    """Every module with a forward, but for the root."""
    return [path for path, m in net.named_modules() if path and not isinstance(m, nn.ModuleList) and list(m.parameters())]


def step_of(sharded, shards, mesh):
    x = torch.linspace(-1, 1, 6).reshape(2, 3) * (mesh.rank + 1)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)
    return loss, fs.gather(grads, sharded.plan, mesh), tuple(events)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, "full_shard"), (2, "shard_grad_op"), ({"replicate": 2, "shard": 2}, "full_shard")],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_the_collectives_of_nested_units_are_the_predicted_ones(model, world, strategy):
    torch.manual_seed(0)
    net = MODELS[model]()
    apply, params, _ = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=units_of(net), strategy=strategy)
        shards, learning = fs.shard(params, plan, mesh), fs.fully_shard(apply, plan, mesh)
        loss, grads, events = step_of(learning, shards, mesh)
        assert events == fs.predict_events(plan, learning.schedule)
        results = [(loss, grads)]
        for settings in SETTINGS if mesh.world_size == 2 else SETTINGS[:2]:
            schedule = fs.make_schedule(plan, learning.schedule.order, **settings)
            sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
            loss, grads, events = step_of(sharded, shards, mesh)
            assert events == fs.predict_events(plan, sharded.schedule), settings
            results.append((loss, grads))
        return results

    for results in fs.simulate(main, world):
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)


@pytest.mark.slow
def test_backward_gathers_an_outer_unit_first_where_its_own_leaves_are_used_last():
    def gathered(moments, settings):
        torch.manual_seed(0)
        net = nn.Sequential(Outer([], linear()), Outer(moments, linear(), linear()))
        apply, params, _ = fs.make_functional(net)

        def main(mesh):
            units = ["0.inner.0", "1", "1.inner.0", "1.inner.1"]
            plan = fs.make_plan(params, mesh, units=units)
            sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, units, **settings))
            _, _, events = step_of(sharded, fs.shard(params, plan, mesh), mesh)
            again = [event.unit for event in events if event.kind == "all_gather"][5:]
            return again, sharded.schedule.backward is None, str(sharded.schedule)

        return fs.simulate(main, 2)[0]

    for settings in SETTINGS:
        # the first linear layer's input needs no gradient, and so its backward no weight
        assert gathered([0], settings)[0] == ["1.inner.1", "1.inner.0", "1"]
        assert gathered([1], settings)[0] == ["1.inner.1", "1", "1.inner.0"]
        assert gathered([0, 2], settings)[0] == ["1", "1.inner.1", "1.inner.0"]
    _, flat, text = gathered([0, 2], SETTINGS[0])
    rows = {line.split()[1]: line.split()[2:] for line in text.splitlines() if line[:1].isdigit()}
    assert not flat
    assert rows["1"] == ["1.inner.0", "1.inner.1"]  # forward gathers the one next, backward the other
    assert rows["1.inner.0"] == ["1.inner.1"]  # and then nothing


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_units_on_demand_are_not_gathered_ahead_and_the_others_are(settings):
    torch.manual_seed(0)
    net = nn.Sequential(Outer([0]), *(linear() for _ in range(5)))
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
