"""The cases of PyTorch's tests of wrap policies: a policy, a module, and the units that it chooses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import funcshard as fs
from funcshard.plan import wrap
from tests.module.law import check_equal


def linear(n: int = 5) -> nn.Linear:
    return nn.Linear(n, n)


def batch_norms() -> nn.Module:
    kinds = {"bn1": nn.BatchNorm1d, "bn2": nn.BatchNorm2d, "bn3": nn.BatchNorm3d, "sync_bn": nn.SyncBatchNorm}
    return Container(lin=nn.Linear(10, 10, bias=False), **{name: kind(10) for name, kind in kinds.items()})


class Container(nn.ModuleDict):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(parts)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested_lin = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_lin(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.lin3 = (nn.Linear(1, 1, bias=False) for _ in range(3))
        self.lin4 = Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin4(self.lin3(self.lin2(self.lin1(x))))


def nested_sequential() -> nn.Module:
    return nn.Sequential(linear(), linear(), nn.Sequential(linear(), linear()))


def transformer() -> nn.Module:
    return nn.Transformer(16, 4, 2, 2, 8, batch_first=True)


LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
LAYER_PATHS = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]
BATCH_NORMS = ["bn1", "bn2", "bn3", "sync_bn"]
never = wrap.by_function(lambda m: False)
by_layer = wrap.by_class(*LAYERS)
by_norm = wrap.by_class(_BatchNorm)
by_container = wrap.by_class(Container)
linear_is_leaf = (nn.MultiheadAttention, nn.Linear)

CASES: dict[str, tuple[Any, wrap.Policy, list[str]]] = {
    "batch norm individually": (batch_norms, by_norm, BATCH_NORMS),
    "batch norm individually, or never": (batch_norms, wrap.any_of(never, by_norm), BATCH_NORMS),
    "batch norm inside a chosen container": (
        lambda: nn.Sequential(batch_norms()),
        wrap.any_of(by_container, by_norm),
        ["0", *(f"0.{name}" for name in BATCH_NORMS)],
    ),
    "the container alone": (lambda: nn.Sequential(batch_norms()), by_container, ["0"]),
    "everything, of least size 0": (Chain, wrap.by_size(0), ["lin1", "lin2", "lin3", "lin4.nested_lin"]),
    "always": (nested_sequential, wrap.always(), ["0", "1", "2", "2.0", "2.1"]),
    "layers of a transformer": (transformer, by_layer, LAYER_PATHS),
    "layers of a transformer, as one of several": (transformer, wrap.any_of(by_layer), LAYER_PATHS),
    "layers of a transformer, by a function": (
        transformer,
        wrap.by_function(lambda m: isinstance(m, LAYERS)),
        LAYER_PATHS,
    ),
    "by size: two small layers are one unit": (nested_sequential, wrap.by_size(40), ["2"]),
    "by size: a list is no unit": (lambda: nn.ModuleList([linear(), linear()]), wrap.by_size(40), []),
    "by size: a list inside is no unit": (
        lambda: nn.Sequential(nn.ModuleList([linear(), linear()]), nn.ModuleDict({"a": linear(), "b": linear()})),
        wrap.by_size(40),
        [],
    ),
    "by size: a list's children are": (lambda: nn.ModuleList([linear(10)]), wrap.by_size(40), ["0"]),
    "by size: attention is a forced leaf": (
        lambda: nn.Sequential(linear(10), nn.MultiheadAttention(100, 1)),
        wrap.by_size(40),
        ["0"],
    ),
    "by size: linear as a forced leaf": (
        lambda: nn.Sequential(linear(10), nn.ModuleList([linear(10)])),
        wrap.by_size(40, force_leaf=linear_is_leaf),
        [],
    ),
}


@pytest.mark.parametrize(("build", "policy", "expected"), CASES.values(), ids=CASES)
def test_policy_chooses(build: Any, policy: wrap.Policy, expected: list[str]) -> None:
    net = build()
    assert policy(net) == expected
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 2, units=policy(net))  # a plan accepts the chosen units
    assert [name for name in plan.units if name and name not in expected] == []


def small_and_wide(m: nn.Module) -> bool | dict[str, str]:
    if isinstance(m, nn.TransformerEncoderLayer):
        return {"strategy": "shard_grad_op"}
    return isinstance(m, nn.TransformerDecoderLayer)


def strategies(plan: fs.Plan) -> dict[str, tuple[str, bool]]:
    return {name: (unit.strategy, unit.reshard_after_forward) for name, unit in plan.units.items() if name}


@pytest.mark.parametrize(
    "policy", [wrap.by_function(small_and_wide), wrap.any_of(wrap.by_function(small_and_wide), by_layer)]
)
def test_what_a_function_overrides_holds_for_its_units_alone(policy: wrap.Policy) -> None:
    net = transformer()
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 2, units=policy(net))
    assert strategies(plan) == {
        path: ("shard_grad_op", False) if path.startswith("encoder") else ("full_shard", True) for path in LAYER_PATHS
    }
    assert plan.units[""].strategy == "full_shard"
    (row,) = (line for line in str(plan).splitlines() if "shard_grad_op" in line)
    assert row.startswith("2 × encoder.layers.*  ")


def test_a_function_without_overrides_leaves_the_plans_strategy() -> None:
    net = transformer()
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 2, units=wrap.by_function(lambda m: isinstance(m, LAYERS))(net), strategy="no_shard")
    assert set(strategies(plan).values()) == {("no_shard", False)}


def three_widths() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(linear(), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_model_whose_units_differ_in_strategy_trains_as_unsharded(strategy: str) -> None:
    net, choices = three_widths(), {5: {"strategy": "no_shard"}, 4: {"strategy": "shard_grad_op"}, 3: True}
    units = wrap.by_function(lambda m: isinstance(m, nn.Linear) and choices[m.out_features])(net)
    for call in check_equal(net, torch.randn(6, 5), units, strategy=strategy):
        assert call.events == call.predicted()
        assert {name: of for name, (of, _) in strategies(call.plan).items()} == {
            "0": "no_shard", "2": "shard_grad_op", "4": strategy,
        }  # fmt: skip


def test_an_override_that_does_not_exist_is_refused() -> None:
    net = nn.Sequential(linear())
    _, params, _ = fs.make_functional(net)
    with pytest.raises(ValueError, match=r"unit '0' overrides 'sharding_strategy'; a unit can override 'strategy'"):
        fs.make_plan(params, 2, units=wrap.by_function(lambda m: {"sharding_strategy": 1})(net))


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["pre", "post"])
@pytest.mark.parametrize("forward", [True, False])
def test_a_chain_of_units_of_one_element_trains_in_each_of_six_steps(forward: bool, backward: str) -> None:
    net = Chain()
    plan = fs.make_plan(fs.make_functional(net)[1], 2, units=wrap.by_size(0)(net))
    schedule = fs.make_schedule(plan, forward_prefetch=forward, backward_prefetch=backward)
    assert (schedule.forward_prefetch, schedule.backward_prefetch) == (forward, backward)
    for call in check_equal(net, torch.ones(1), wrap.by_size(0)(net), calls=6, how={"schedule": schedule}):
        assert call.events == call.predicted()


def test_one_unit_is_offloaded_and_never_gathered_ahead_and_the_model_trains_as_unsharded() -> None:
    net = three_widths()
    choose = wrap.by_function(lambda m: isinstance(m, nn.Linear) and ({"offload": True} if m.out_features == 4 else True))
    plan = fs.make_plan(fs.make_functional(net)[1], 2, units=choose(net))
    assert {name: unit.offload for name, unit in plan.units.items()} == {"0": False, "2": True, "4": False}
    for call in check_equal(net, torch.randn(6, 5), choose(net), how={"schedule": fs.make_schedule(plan, on_demand=["2"])}):
        assert call.events == call.predicted()


@pytest.mark.parametrize("policy", [wrap.by_size(40), wrap.always()], ids=["by size", "always"])
def test_an_automatically_wrapped_model_is_offloaded_and_runs_a_step(policy: wrap.Policy) -> None:
    net = nested_sequential()
    for call in check_equal(net, torch.randn(4, 5), policy(net), offload=True):
        assert all(unit.offload for unit in call.plan.unit_list)


@pytest.mark.parametrize("ignored", [["1", "2.0"], ["1", "2.0.*"]], ids=["modules", "parameters"])
def test_what_is_ignored_stays_whole_on_every_rank_and_is_not_communicated(ignored: list[str]) -> None:
    net = nested_sequential()
    for call in check_equal(net, torch.randn(4, 5), wrap.by_size(40)(net), local=ignored):
        plan = call.plan
        whole = {leaf.path for unit in plan.unit_list for b in unit.buffers if b.local for leaf in b.leaves}
        assert whole == {f"{path}.{name}" for path in ("1", "2.0") for name in ("weight", "bias")}
        assert [b.shards for unit in plan.unit_list for b in unit.buffers] == [2, 1, 2, 1]
        assert {event.buffer for event in call.events} == {"float32"}
        assert call.events == call.predicted()
        assert str(plan).count("float32.local") == 2


def test_an_apply_that_is_sharded_already_is_refused() -> None:
    apply, params, _ = fs.make_functional(nn.Sequential(linear()))
    plan = fs.make_plan(params, 1, units=["0"])
    words = r"found a function that is sharded already: pass make_functional's apply itself"
    with pytest.raises(TypeError, match=words):
        fs.fully_shard(fs.fully_shard(apply, plan, fs.Mesh()), plan, fs.Mesh())


@pytest.mark.parametrize("units", [["0", "0"], ["0", ["0", "1"]], [["0", "1"], "1"]], ids=str)
def test_a_path_that_is_written_twice_is_an_error(units: list[str]) -> None:
    _, params, _ = fs.make_functional(nn.Sequential(linear(), linear()))
    with pytest.raises(ValueError, match=r"units name '[01]' twice, in .* and in .*; remove one of the two"):
        fs.make_plan(params, 2, units=units)
