"""The cases of PyTorch's tests of wrap policies: a policy, a module, and the units that it chooses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.plan import wrap
from tests.module.law import check_equal


def linear(n: int = 5) -> nn.Linear:
    return nn.Linear(n, n)


def nested_sequential() -> nn.Module:
    return nn.Sequential(linear(), linear(), nn.Sequential(linear(), linear()))


def transformer() -> nn.Module:
    return nn.Transformer(16, 4, 2, 2, 8, batch_first=True)


LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
LAYER_PATHS = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]
by_layer = wrap.by_class(*LAYERS)


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
