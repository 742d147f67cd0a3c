"""Arguments of a wrong type that the hostile campaign found: each is refused in words of ours.

``tests/hostile/test_misuse.py`` passes random junk; a case that failed there stands here.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs

APPLY, PARAMS, BUFFERS = fs.make_functional(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
MESH = fs.Mesh()
PLAN = fs.make_plan(PARAMS, MESH)
SHARDS = fs.shard(PARAMS, PLAN, MESH)
SGD = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
OF_GROUPS = {"lr": 0.1, "plan": PLAN, "mesh": MESH}

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "assign_owners: a class as matrices": (
        lambda: fs.assign_owners(PLAN, dict), TypeError, "must be a list of paths or globs",
    ),
    "muon: an object as matrices": (
        lambda: fs.muon(PLAN, MESH, lr=0.1, matrices=SimpleNamespace()), TypeError, "must be a list of paths or globs",
    ),
    "global_norm: a number of 400 digits": (
        lambda: fs.global_norm(SHARDS, PLAN, MESH, 10**400), ValueError, "norm_type must be a number above 0",
    ),
    "torch_optimizer: a dictionary as groups": (
        lambda: fs.torch_optimizer(torch.optim.SGD, groups={"paths": ["0"]}, **OF_GROUPS),
        TypeError, "put a single group into a list",
    ),
    "torch_optimizer: a tensor as groups": (
        lambda: fs.torch_optimizer(torch.optim.SGD, groups=torch.ones(2), **OF_GROUPS), TypeError, "groups must be a list",
    ),
    "torch_optimizer: a number as a group": (
        lambda: fs.torch_optimizer(torch.optim.SGD, groups=[3], **OF_GROUPS), ValueError, "a group must be a dictionary",
    ),
    "fully_shard: a compiler that takes no function": (
        lambda: fs.fully_shard(APPLY, fs.make_plan(PARAMS, MESH, units=["0"]), MESH, compiler=dict),
        TypeError, "compiler must be",
    ),
    "fully_shard: a compiler that returns no function": (
        lambda: fs.fully_shard(APPLY, fs.make_plan(PARAMS, MESH, units=["0"]), MESH, compiler=lambda f: None),
        TypeError, "returned NoneType",
    ),
    "torch_schedule: options that the scheduler does not take": (
        lambda: fs.torch_schedule(torch.optim.lr_scheduler.StepLR, lr=0.1, steps=2), TypeError, "with the options ['steps']",
    ),
    "with_collectives: a list as axis": (
        lambda: fs.with_collectives(MESH, ["shard"], all_gather=None), ValueError, "axis must be an axis of the mesh",
    ),
    "replan: a flag as states": (lambda: fs.replan(True, PLAN, PLAN), TypeError, "states must be a list"),
    "replan: a path as the old plan": (lambda: fs.replan([SHARDS], "old", PLAN), TypeError, "old must be a plan; found str"),
    "replan: a list as the new plan": (lambda: fs.replan([SHARDS], PLAN, []), TypeError, "new must be a plan; found list"),
    "from_state_dict: numbers as names": (lambda: fs.from_state_dict({1: 2}, PLAN, MESH), ValueError, "missing"),
    "optimizer_from_state_dict: a path": (
        lambda: fs.optimizer_from_state_dict("state.pt", SGD, PLAN, MESH), TypeError, "must be a dictionary; found str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_junk_is_refused_in_words(case: str) -> None:
    call, kind, words = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


def test_the_order_of_a_norm_may_be_a_whole_number_of_any_size() -> None:
    assert fs.global_norm(SHARDS, PLAN, MESH, 2**70) == fs.global_norm(SHARDS, PLAN, MESH, float(2**70))
