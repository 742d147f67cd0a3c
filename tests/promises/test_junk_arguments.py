"""Arguments of a wrong type that the hostile campaign found: each is refused in words of ours.

``tests/hostile/test_misuse.py`` passes random junk; a case that failed there stands here.
"""

from collections.abc import Callable
from pathlib import Path
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
    "save: a number as path": (lambda: fs.save(0, SHARDS, PLAN, MESH), TypeError, "path must be a path, as text"),
    "save: bytes as path": (lambda: fs.save(b"x", SHARDS, PLAN, MESH), TypeError, "path must be a path, as text"),
    "save: a zero in the path": (lambda: fs.save("a\0b", SHARDS, PLAN, MESH), ValueError, "no character of number zero"),
    "restore: a tensor as path": (lambda: fs.restore(torch.ones(2), PLAN, MESH), TypeError, "path must be a path, as text"),
    "latest: None as folder": (lambda: fs.latest(None), TypeError, "folder must be a path, as text"),
    "export_safetensors: a list as path": (
        lambda: fs.export_safetensors([1], SHARDS, PLAN, MESH), TypeError, "path must be a path, as text",
    ),
    "import_safetensors: None as path": (
        lambda: fs.import_safetensors(None, PLAN, MESH), TypeError, "path must be a path, as text",
    ),
    "import_dcp: a number as path": (lambda: fs.import_dcp(3.5, PLAN, MESH), TypeError, "path must be a path, as text"),
    "load_traced: a number as path": (lambda: fs.load_traced(1, MESH), TypeError, "path must be a path, as text"),
    "from_json: a number": (lambda: fs.Plan.from_json(0), TypeError, "JSON must be text or bytes; found int"),
    "value_and_grad: a path as mesh": (
        lambda: fs.value_and_grad(lambda shards: 0, mesh=Path("x")), TypeError, "mesh must be a Mesh, or None; found",
    ),
    "accumulate: a flag as mesh": (
        lambda: fs.accumulate(lambda shards: 0, 2, mesh=True), TypeError, "mesh must be a Mesh, or None; found bool",
    ),
    "simulate: a module": (lambda: fs.simulate(nn.Linear(2, 2), 1), TypeError, "simulate takes the program of one rank"),
    "assign_owners: a number as matrices": (
        lambda: fs.assign_owners(PLAN, torch.tensor(1.0)), TypeError, "must be a list of paths or globs",
    ),
    "optimizer_to_state_dict: an empty state": (
        lambda: fs.optimizer_to_state_dict({}, SGD, PLAN, MESH), ValueError, "found no ['leaves', 'steps']: pass state.",
    ),
    "Mesh: a number too large for a device": (lambda: fs.Mesh(device=2**70), ValueError, "device must be a device of torch"),
    "Mesh: a module as groups": (lambda: fs.Mesh(fs), TypeError, "Mesh takes the group of this rank along each axis"),
    "make_functional: a class of no modules": (lambda: fs.make_functional(dict), TypeError, "found type: unshard shards a"),
    "init_shards: a class": (
        lambda: fs.init_shards(dict, PLAN, MESH), TypeError, "init(unit) -> {path: tensor}; found the class dict: call",
    ),
    "simulate: more ranks than threads": (
        lambda: fs.simulate(lambda mesh: 0, 2**70), ValueError, "world_size must be at most 10,000 ranks, because each is a",
    ),
    "init_shards: a text": (lambda: fs.init_shards("x", PLAN, MESH), TypeError, "init_shards takes a function init(unit)"),
    "muon: two numbers as lr": (
        lambda: fs.muon(PLAN, MESH, lr=torch.ones(2)), ValueError, "lr must be one number; found a tensor of shape (2,)",
    ),
    "torch_optimizer: two numbers as lr": (
        lambda: fs.torch_optimizer(torch.optim.SGD, lr=torch.ones(2)), ValueError, "lr must be one number; found a tensor",
    ),
    "export_safetensors: numbers as buffers": (
        lambda: fs.export_safetensors("x", SHARDS, PLAN, MESH, buffers={"a": 1}),
        TypeError, "buffers must hold tensors; found int under 'a'",
    ),
    "fully_shard: a class as cast": (
        lambda: fs.fully_shard(APPLY, PLAN, MESH, cast=dict), TypeError, "cast must be a function cast(unit, buffer)",
    ),
    "unshard: a module as cast": (
        lambda: fs.unshard(APPLY, PLAN.units[""], MESH, cast=nn.Linear(2, 2)), TypeError, "cast must be a function",
    ),
    "make_plan: a tensor as ties": (
        lambda: fs.make_plan(PARAMS, MESH, ties=torch.ones(2)), TypeError, "ties must be a list of groups of paths",
    ),
    "make_plan: paths as ties": (
        lambda: fs.make_plan(PARAMS, MESH, ties=["0.weight"]), TypeError, "ties must be a list of groups of paths",
    ),
    "Mesh: an object as device": (lambda: fs.Mesh({}, device=object()), TypeError, "device must be a device of torch"),
    "init_mesh: a device that torch lacks": (lambda: fs.init_mesh(device="gpu"), ValueError, "found 'gpu': pass one that"),
    "simulate: a device that torch lacks": (
        lambda: fs.simulate(lambda mesh: 0, 2, device="gpu"), ValueError, "device must be a device of torch",
    ),
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
