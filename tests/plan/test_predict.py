"""predict_events: exact prediction of what a step does, from the plan alone."""

import itertools

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.pairwise import crossed

PARAMS = {
    "first": {"w": torch.ones(5, 3), "n": torch.ones(2, dtype=torch.float64)},
    "second": {"w": torch.ones(4), "frozen": torch.ones(9)},
    "rest": torch.ones(3),
    "empty": torch.ones(0),
}


def marked():
    params = {
        "first": {name: leaf.clone().requires_grad_() for name, leaf in PARAMS["first"].items()},
        "second": {"w": PARAMS["second"]["w"].clone().requires_grad_(), "frozen": PARAMS["second"]["frozen"].clone()},
    }
    return {**params, "rest": PARAMS["rest"].clone().requires_grad_(), "empty": PARAMS["empty"]}


def every_leaf(leaves, x):
    return x * sum((leaf * leaf).double().sum() for leaf in tree.leaves(leaves))


def on_demand(plan, order=None):
    """The schedule of a composition by hand: nothing is gathered ahead."""
    return fs.make_schedule(plan, order, forward_prefetch=False, backward_prefetch=None)


WORLDS = [1, 2, 3, {"replicate": 2, "shard": 1}, {"replicate": 2, "shard": 2}]


@crossed(
    order=[["first", "second"], ["second", "first"]], strategy=["full_shard", "shard_grad_op", "no_shard"], world=WORLDS
)
def test_a_hand_written_step_issues_what_its_plan_predicts(world, strategy, order):
    params = marked()

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["first", "second"], strategy=strategy)
        shards = fs.shard(params, plan, mesh)
        f = {name: fs.unshard(every_leaf, unit, mesh) for name, unit in plan.units.items()}
        f = {name: fs.reshard(g) if plan.units[name].reshard_after_forward else g for name, g in f.items()}

        def loss_fn(s):
            def inner(leaves):
                x = every_leaf(leaves, torch.ones((), dtype=torch.float64))
                for name in order:
                    x = f[name](s[name], x)
                return x

            return fs.unshard(inner, plan.units[""], mesh)(s[""])

        with fs.record_events() as events:
            fs.value_and_grad(loss_fn)(shards)
        return tuple(events), fs.predict_events(plan, on_demand(plan, order))

    for happened, predicted in fs.simulate(main, world):
        assert happened == predicted


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


def test_traffic_stays_within_the_bound_of_each_strategy():
    numel, ranks = 1000, 4
    gathers = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}
    for strategy, times in gathers.items():
        plan = fs.make_plan({"u": {"w": torch.ones(numel)}}, ranks, units=["u"], strategy=strategy)
        reduced = 2 if strategy == "no_shard" else 1  # an all-reduce is a reduce-scatter and an all-gather
        bound = (times + reduced) * numel * 4 * (ranks - 1) // ranks
        assert sum(event.traffic for event in fs.predict_events(plan)) == bound, strategy


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"not_saved": ["x"]}, ValueError, r"the plan has no unit 'x' to put in order; its units are \['ab'\]"),
        ({"not_saved": "ab"}, TypeError, r"not_saved must be a list of unit names; found the text 'ab': pass \['ab'\]"),
        ({"recomputed": "ab"}, TypeError, r"recomputed must be a list of unit names; found the text 'ab': pass \['ab'\]"),
    ],
    ids=str,
)
def test_what_is_no_list_of_the_plans_units_is_refused(options, error, words):
    plan = fs.make_plan({"ab": torch.zeros(2)}, 2, units=["ab"])
    with pytest.raises(error, match=words):
        fs.predict_events(plan, **options)


@pytest.mark.slow
def test_units_of_any_strategies_one_after_another_do_what_is_predicted_if_the_model_returns_the_loss():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            x = x * self.scale
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    apply, params, _ = fs.make_functional(net := Three())

    def main(mesh):
        for strategies in itertools.product(["full_shard", "shard_grad_op", "no_shard"], repeat=3):
            strategy_of = dict(zip(net.layers, strategies, strict=True))
            units = fs.wrap.by_function(lambda m, of=strategy_of: m in of and {"strategy": of[m]})(net)
            plan = fs.make_plan(params, mesh, units=units)
            sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
            for call in range(2):
                with fs.record_events() as events:
                    fs.value_and_grad(lambda s, f=sharded: f(s, {}, torch.ones(2, 3)))(shards)
                assert call == 0 or tuple(events) == fs.predict_events(plan, sharded.schedule), strategies

    fs.simulate(main, 2)
