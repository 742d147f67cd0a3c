"""Mistakes with plans, schedules and policies."""

import torch
from torch import nn

import funcshard as fs
from tests.misuse import NET, PARAMS

FROZEN = {name: nn.Parameter(torch.ones(4, 16), requires_grad=False) for name in "wv"}


def plan(mesh, params=PARAMS, **options):
    return fs.make_plan(params, mesh, **options)


def by_value(blocks):
    return blocks.half() if blocks.any() else blocks


def not_sharded():
    return fs.wrap.by_function(lambda module: {"strategy": "no_shard"})(NET)


CASES = [
    ("wrap.by_size", "a list of classes to exclude", TypeError("exclude must be a tuple of module classes"),
     lambda mesh: plan(mesh, units=fs.wrap.by_size(1, exclude=[nn.Linear])(NET))),
    ("make_plan", "one path instead of a list", TypeError("write ['0']"), lambda mesh: plan(mesh, units="0")),
    ("make_plan", "the parameters of a module, as torch's optimizers take them",
     TypeError("pass the params of make_functional(module), or a tree such as dict(module.named_parameters())"),
     lambda mesh: fs.make_plan(NET.parameters(), mesh)),
    ("make_plan", "storage that matches no frozen leaf", ValueError("must match frozen floating-point leaves"),
     lambda mesh: plan(mesh, storage={"**": fs.nf4()})),
    ("make_plan", "a storage in place of a mapping", TypeError("storage must map paths or globs to pairs"),
     lambda mesh: plan(mesh, storage=fs.nf4())),
    ("make_plan", "one function as storage", TypeError("must be a pair (encode, decode) of functions"),
     lambda mesh: plan(mesh, storage={"**": torch.clone})),
    ("Storage", "no functions", TypeError("a Storage takes two functions, encode and decode"),
     lambda mesh: fs.Storage(1, 2)),
    ("nf4", "an odd block", ValueError("block must be even, because two elements share a byte; found 7"),
     lambda mesh: fs.nf4(7)),
    ("make_plan", "two pairs of one name", ValueError("two pairs of storage have the name"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.clone, torch.clone), "v": (torch.clone, torch.abs)})),
    ("make_plan", "an override that does not exist", ValueError("a unit can override 'strategy'"),
     lambda mesh: fs.make_plan(PARAMS, mesh, units={"0": {"sharding_strategy": 1}})),
    ("make_plan", "other functions under a name of the library", ValueError("has the name 'nf4' of a storage of the"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": fs.Storage(torch.clone, torch.clone, name="nf4")})),
    ("make_plan", "an encode without rows", ValueError("with one row for each block; found the shapes [(128,)]"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.flatten, torch.clone)})),
    ("make_plan", "a decode without the blocks", ValueError("must return the blocks, of shape (2, 64)"),
     lambda mesh: plan(mesh, FROZEN, storage={"w": (torch.clone, torch.flatten)})),
    ("make_plan", "a slice that is to be packed", ValueError("leaf 'w' is a slice of a larger tensor"),
     lambda mesh: plan({"shard": 1, "tensor": 2}, FROZEN, local={"w": {"tensor": 0}}, storage={"w": fs.nf4()})),
    ("shard", "an encode whose dtypes depend on values", ValueError("return the same dtypes and shapes for all values"),
     lambda mesh: fs.shard(FROZEN, plan(mesh, FROZEN, storage={"w": (by_value, torch.Tensor.float)}), mesh)),
    ("predict_events", "params instead of a plan", TypeError("plan must be the Plan that make_plan returned"),
     lambda mesh: fs.predict_events(PARAMS)),
    ("predict_events", "a unit that the plan lacks", ValueError("order must name units of the plan; found '9'"),
     lambda s: fs.predict_events(s.plan, ["9"])),
    ("predict_events Schedule", "the schedule of another plan",
     ValueError("the schedule must name units of the plan; found '4'"),
     lambda s: fs.predict_events(s.plan, fs.make_schedule(plan(s.mesh, units=["4"])))),
    ("predict_events", "an operator in micro-batches",
     ValueError("transform='hvp' is of a function that runs once; found micro_batches=2 and forwards=1"),
     lambda s: fs.predict_events(s.plan, accumulate=2, transform="hvp")),
    ("wrap.by_class", "a class that the model lacks", ValueError("the model is made of Linear"),
     lambda mesh: fs.wrap.by_class(nn.Conv2d)(NET)),
    ("wrap.by_class", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_class(nn.Linear)(PARAMS)),
    ("wrap.by_size", "params instead of a module", TypeError("write policy(module)"),
     lambda mesh: fs.wrap.by_size(8)(PARAMS)),
    ("make_plan", "the result of a policy as one unit of a list", TypeError("units hold the result of a policy"),
     lambda mesh: plan(mesh, units=[not_sharded(), "2"])),
    ("make_plan", "a group of paths inside each other", ValueError("leave the inner path out"),
     lambda mesh: plan(mesh, units=[["0", "0.weight"]])),
    ("make_plan", "a strategy in the place of options", TypeError("must be a dictionary"),
     lambda mesh: plan(mesh, units={"0": "no_shard"})),
    ("wrap.any_of", "a list of policies", TypeError("any_of(*policies)"), lambda mesh: fs.wrap.any_of([fs.wrap.always()])),
]  # fmt: skip
