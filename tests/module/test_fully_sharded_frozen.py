"""No step changes a frozen parameter, whatever else the tree holds; a sharded function is copied, pickled, printed."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated

SGD = fs.torch_optimizer(torch.optim.SGD, lr=0.1)


def net_of(frozen: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net.requires_grad_(frozen == "none")
    if frozen == "first layer":
        net[2].requires_grad_()
    return net


def one_step(mesh: fs.Mesh, device: str) -> tuple[Any, Any]:
    """Train plain adapters, as in JAX, around a module that is frozen as a whole; return params before and after."""
    with torch.device(device):
        module = net_of("all")
    apply, base, buffers = fs.make_functional(module)
    params = {"base": base, "adapter": {"a": torch.full((3, 2), 0.1), "b": torch.full((2, 3), 0.1)}}
    plan = fs.make_plan(params, mesh, units=["base"])
    if device == "meta":
        return {buffer.key for unit in plan.unit_list for buffer in unit.buffers}, None

    run_base = fs.unshard(lambda leaves, x: apply(leaves, buffers, x), plan.units["base"], mesh)
    adapt = fs.unshard(lambda leaves, x: x @ leaves["adapter"]["a"] @ leaves["adapter"]["b"], plan.units[""], mesh)
    loss_fn = lambda s, _, x: (run_base(s["base"], x) + adapt(s[""], x)).square().mean()  # noqa: E731
    step = fs.make_train_step(loss_fn, SGD, plan, mesh)
    before = copy.deepcopy(params)
    state, _ = step(step.init(fs.shard(params, plan, mesh), {}), torch.ones(2, 3))
    return before, fs.gather(state.shards, plan, mesh)


def test_a_step_trains_adapters_and_no_parameter_of_a_module_that_is_frozen_as_a_whole() -> None:
    for before, after in run_simulated(one_step, 2, "cpu"):
        assert all(
            torch.equal(one, other) for one, other in zip(*map(tree.leaves, (before["base"], after["base"])), strict=True)
        )
        assert not any(torch.equal(before["adapter"][name], after["adapter"][name]) for name in ("a", "b"))
    assert run_simulated(one_step, 2, "meta") == [({"float32", "float32.frozen"}, None)] * 2


def test_a_frozen_module_made_on_meta_is_frozen_and_gets_its_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3)).requires_grad_(False)
    apply, params, buffers = fs.make_functional(module)

    def main(mesh: fs.Mesh) -> Any:
        torch.manual_seed(0)
        plan = fs.make_plan(params, mesh, units=["0"])
        shards, _ = fs.init_module(module, plan, mesh)
        out = fs.fully_shard(apply, plan, mesh)(shards, buffers, torch.ones(1, 3, requires_grad=True))
        return {buffer.key for unit in plan.unit_list for buffer in unit.buffers}, out.detach()

    torch.manual_seed(0)
    wanted = nn.Linear(3, 3)(torch.ones(1, 3))
    for keys, out in run_simulated(main, 2):
        assert keys == {"float32.frozen"}
        assert torch.equal(out, wanted)


# name -> (what is frozen, change of the params, whether the plan trains what was frozen)
CHANGES: dict[str, tuple[str, Any, bool]] = {
    "unchanged, all frozen": ("all", lambda p: p, False),
    "unchanged, some frozen": ("first layer", lambda p: p, False),
    "unchanged, none frozen": ("none", lambda p: p, False),
    "cast, all frozen": ("all", lambda p: p.to(torch.float64), True),
    "cast, some frozen": ("first layer", lambda p: p.to(torch.float64), False),  # .to keeps requires_grad of the others
    "cast, none frozen": ("none", lambda p: p.to(torch.float64), False),
    "detached, all frozen": ("all", torch.Tensor.detach, True),
    "detached, some frozen": ("first layer", torch.Tensor.detach, True),
    "detached, none frozen": ("none", torch.Tensor.detach, False),
}


@pytest.mark.parametrize(("frozen", "change", "lost"), CHANGES.values(), ids=CHANGES)
def test_fully_shard_warns_if_the_plan_trains_everything_although_the_module_was_frozen(frozen, change, lost) -> None:
    apply, params, _ = fs.make_functional(net_of(frozen))
    plan = fs.make_plan({name: change(value) for name, value in params.items()}, fs.Mesh())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fs.fully_shard(apply, plan, fs.Mesh())
    assert len(said) == lost
    if lost:
        words = str(said[0].message)
        count = 4 if frozen == "all" else 2
        assert words.startswith(
            f"the plan trains every parameter, but {count} of them, such as '0.bias', required no gradient"
        )
        assert (
            "cast the module before make_functional and give make_plan its params, or call module.requires_grad_()" in words
        )
        assert said[0].filename == __file__


def test_a_plan_that_trains_some_of_what_was_frozen_is_a_choice() -> None:
    apply, params, _ = fs.make_functional(net_of("all"))
    params["2.weight"].requires_grad_()
    fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh())  # warnings are errors here


def sharded() -> tuple[Any, Any, Any]:
    apply, params, buffers = fs.make_functional(net_of("none"))
    plan = fs.make_plan(params, fs.Mesh(), units=["0"])
    return fs.fully_shard(apply, plan, fs.Mesh()), fs.shard(params, plan, fs.Mesh()), buffers


def test_copies_of_a_sharded_function_are_the_function_itself() -> None:
    f, _, _ = sharded()
    assert copy.copy(f) is f
    assert copy.deepcopy({"f": [f]})["f"][0] is f


def test_a_sharded_function_cannot_be_pickled_and_says_what_can() -> None:
    words = "it holds the connections of its mesh: .* call fs.save.*; for another process pickle the function of make_func"
    with pytest.raises(TypeError, match=words):
        pickle.dumps(sharded()[0])


def test_a_sharded_function_can_be_printed() -> None:
    f = sharded()[0]
    assert repr(f).startswith("<fully_shard of Sequential, plan ")
    assert repr(f).endswith("Mesh(rank=0, shape={'replicate': 1, 'shard': 1}, device='cpu')>")
    assert "placeholder of '0.weight' in unit '0'" in repr(f.outside)
