"""Arguments of a wrong type that the hostile campaign found: each is told in words of ours.

``tests/hostile/test_misuse.py`` passes random junk; a call that failed there has a row here.
"""

from pathlib import Path

import torch

import funcshard as fs
from tests.misuse import APPLY, PARAMS

MESH = fs.Mesh()
PLAN = fs.make_plan(PARAMS, MESH)
SHARDS = fs.shard(PARAMS, PLAN, MESH)
SGD = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
OF_GROUPS = {"lr": 0.1, "plan": PLAN, "mesh": MESH}


CASES = [
    ("global_norm", "a number of 400 digits", OverflowError("int too large to convert to float"),
     lambda: fs.global_norm(SHARDS, PLAN, MESH, 10**400)),
    ("global_norm", "a whole number of any size", None,
     lambda: fs.global_norm(SHARDS, PLAN, MESH, 2**70)),
    ("torch_optimizer", "a dictionary as groups", TypeError("groups must be a list of dictionaries"),
     lambda: fs.torch_optimizer(torch.optim.SGD, groups={"paths": ["0"]}, **OF_GROUPS)),
    ("fully_shard", "a compiler that takes no function", TypeError("compiler must be"),
     lambda: fs.fully_shard(APPLY, fs.make_plan(PARAMS, MESH, units=["0"]), MESH, compiler=dict)),
    ("fully_shard", "the name of a compiler", TypeError("compiler must be a function such as torch.compile"),
     lambda: fs.fully_shard(APPLY, fs.make_plan(PARAMS, MESH, units=["0"]), MESH, compiler="inductor")),
    ("fully_shard", "a compiler that returns no function", TypeError("returned NoneType"),
     lambda: fs.fully_shard(APPLY, fs.make_plan(PARAMS, MESH, units=["0"]), MESH, compiler=lambda f: None)),
    ("replan", "a flag as states", TypeError("states must be a list"), lambda: fs.replan(True, PLAN, PLAN)),
    ("replan", "a path as the old plan", TypeError("plan must be the Plan that make_plan returned; found str"),
     lambda: fs.replan([SHARDS], "old", PLAN)),
    ("save", "a zero in the path", ValueError("null"), lambda: fs.save("a\0b", SHARDS, PLAN, MESH)),
    ("restore", "a tensor as path", TypeError("path must be a path, as text"),
     lambda: fs.restore(torch.ones(2), PLAN, MESH)),
    ("import_safetensors", "None as path", TypeError("path must be a path, as text"),
     lambda: fs.import_safetensors(None, PLAN, MESH)),
    ("load_traced", "a number as path", TypeError("path must be a path, as text"), lambda: fs.load_traced(1, MESH)),
    ("Plan", "a number as JSON", TypeError("JSON must be text or bytes; found int"), lambda: fs.Plan.from_json(0)),
    ("value_and_grad", "a path as mesh", TypeError("mesh must be a Mesh, or None; found"),
     lambda: fs.value_and_grad(lambda shards: 0, mesh=Path("x"))),
    ("assign_owners", "a number as matrices", TypeError("must be a list of paths or globs"),
     lambda: fs.assign_owners(PLAN, torch.tensor(1.0))),
    ("optimizer_to_state_dict", "an empty state", ValueError("found []: pass state.opt_state"),
     lambda: fs.optimizer_to_state_dict({}, SGD, PLAN, MESH)),
    ("Mesh", "a number too large for a device", ValueError("device must be a device of torch"),
     lambda: fs.Mesh(device=2**70)),
    ("make_functional", "a class of no modules", TypeError("found type: unshard shards a"),
     lambda: fs.make_functional(dict)),
    ("simulate", "more ranks than threads", ValueError("world_size must be at most 10,000 ranks, because each is a"),
     lambda: fs.simulate(lambda mesh: 0, 2**70)),
    ("torch_optimizer", "two numbers as lr", ValueError("lr must be one number; found a tensor"),
     lambda: fs.torch_optimizer(torch.optim.SGD, lr=torch.ones(2))),
    ("export_safetensors", "numbers as buffers", TypeError("buffers must hold tensors; found int under 'a'"),
     lambda: fs.export_safetensors("x", SHARDS, PLAN, MESH, buffers={"a": 1})),
    ("fully_shard", "a class as cast", TypeError("cast must be a function cast(unit, buffer)"),
     lambda: fs.fully_shard(APPLY, PLAN, MESH, cast=dict)),
    ("Mesh", "an object as device", TypeError("device must be a device of torch"), lambda: fs.Mesh({}, device=object())),
    ("init_mesh", "a device that torch lacks", ValueError("found 'gpu': pass one that"), lambda: fs.init_mesh(device="gpu")),
    ("simulate", "a device that torch lacks", ValueError("device must be a device of torch"),
     lambda: fs.simulate(lambda mesh: 0, 2, device="gpu")),
    ("optimizer_from_state_dict", "a path", TypeError("must be a dictionary; found str"),
     lambda: fs.optimizer_from_state_dict("state.pt", SGD, PLAN, MESH)),
]  # fmt: skip
