"""A plan that trains what a module froze is told; a sharded function is copied, pickled, printed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs


def net_of(frozen: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net.requires_grad_(frozen == "none")
    if frozen == "first layer":
        net[2].requires_grad_()
    return net


# name -> (what is frozen, change of the params, how many frozen ones the plan trains unasked)
CHANGES: dict[str, tuple[str, Any, int]] = {
    "unchanged": ("all", lambda p: p, 0),
    "cast, all frozen": ("all", lambda p: p.to(torch.float64), 4),
    "cast, some frozen": ("first layer", lambda p: p.to(torch.float64), 0),  # .to keeps requires_grad of the others
    "detached, some frozen": ("first layer", torch.Tensor.detach, 2),
    "detached, none frozen": ("none", torch.Tensor.detach, 0),
}


@pytest.mark.parametrize(("frozen", "change", "lost"), CHANGES.values(), ids=CHANGES)
def test_fully_shard_warns_if_the_plan_trains_everything_although_the_module_was_frozen(frozen, change, lost) -> None:
    apply, params, _ = fs.make_functional(net_of(frozen))
    plan = fs.make_plan({name: change(value) for name, value in params.items()}, fs.Mesh())
    words = (
        f"the plan trains every parameter, but {lost} of them, such as '0.bias', required no gradient.*cast the module "
        r"before make_functional, or call module.requires_grad_\(\)"
    )
    with pytest.warns(UserWarning, match=words) if lost else contextlib.nullcontext([]) as said:
        fs.fully_shard(apply, plan, fs.Mesh())  # warnings are errors here
    assert [warning.filename for warning in said] == [__file__] * bool(lost)


def test_a_plan_that_trains_some_of_what_was_frozen_is_a_choice() -> None:
    apply, params, _ = fs.make_functional(net_of("all"))
    params["2.weight"].requires_grad_()
    fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh())  # warnings are errors here


def test_copies_of_a_sharded_function_are_the_function_itself_and_a_pickle_says_what_can_be_pickled() -> None:
    apply, params, _ = fs.make_functional(net_of("none"))
    f = fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh())
    assert copy.copy(f) is copy.deepcopy({"f": [f]})["f"][0] is f
    words = "it holds the connections of its mesh: .* with fs.save, or pickle the function of make_func"
    with pytest.raises(TypeError, match=words):
        pickle.dumps(f)
