"""Mistakes with profiles, estimates and comparisons."""

import functools

import torch

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DATA, NET, PARAMS

HALF = fs.MixedPrecision(param_dtype=torch.bfloat16)


def profile(*args, **options):
    return fs.profile(*(args or (APPLY, PARAMS, BUFFERS, DATA)), **options)


@functools.cache
def traced():
    return profile()


def estimate(*, precision=None, **options):
    return fs.estimate(traced(), fs.make_plan(PARAMS, 1, precision=precision), **options)


CASES = [
    ("profile", "a module instead of its function",
     TypeError("profile takes the apply that make_functional returned; found Sequential"),
     lambda: profile(NET, PARAMS, BUFFERS, DATA)),
    ("profile", "targets without a loss",
     ValueError("found targets without loss: pass loss=, a function of the model's outputs and the targets"),
     lambda: profile(targets=DATA)),
    ("profile", "the module instead of its params",
     TypeError("params must be a dictionary {name: tensor}; found Sequential"),
     lambda: profile(APPLY, NET, BUFFERS, DATA)),
    ("profile", "no buffers", TypeError("buffers must be a dictionary {name: tensor}; found Tensor"),
     lambda: profile(APPLY, PARAMS, DATA)),
    ("profile", "a loss as a number of Python", ValueError("must not read values of tensors, because a trace has none"),
     lambda: profile(loss=lambda out: out.sum().item())),
    ("profile", "a loss of every sample", ValueError("the loss must be a scalar; found a tensor of shape [8, 1]"),
     lambda: profile(loss=lambda out: out.square())),
    ("profile", "a dtype instead of a precision",
     TypeError("precision must be a MixedPrecision, a plan or None; found torch.bfloat16"),
     lambda: profile(precision=torch.bfloat16)),
    ("profile", "a plan of another model as precision",
     ValueError("precision must be a plan of the same parameters; found a plan without '0.bias'"),
     lambda: profile(precision=fs.make_plan({"w": torch.zeros(3)}, 1))),
    ("estimate", "plan and profile swapped", TypeError("profile must be the Profile that fs.profile returned; found Plan"),
     lambda: fs.estimate(fs.make_plan(PARAMS, 1), traced())),
    ("estimate profile", "a plan of another precision than the profile",
     ValueError("was profiled in float32, but the plan computes in bfloat16"),
     lambda: estimate(precision=HALF)),
    ("estimate", "a plan of another model", ValueError("the profile has no parameter 'w', which the plan has"),
     lambda: fs.estimate(traced(), fs.make_plan({"w": torch.zeros(3)}, 1))),
    ("estimate", "hardware that is not described", ValueError("hardware must be one of a100"),
     lambda: estimate(hardware="my-gpu")),
    ("estimate torch_optimizer", "an optimizer that trains instead of its name",
     TypeError("describe its memory with OptimizerMemory"),
     lambda: estimate(optimizer=fs.torch_optimizer(torch.optim.AdamW, lr=0.1))),
    ("estimate", "an operator in micro-batches",
     ValueError("transform='hvp' is of a function that runs once; found micro_batches=2"),
     lambda: fs.estimate(traced(), fs.make_plan(PARAMS, 1), accumulate=2, transform="hvp")),
    ("estimate", "a number instead of a schedule",
     TypeError("schedule must be a Schedule or None; found 3: make it with make_schedule(plan)"),
     lambda: estimate(schedule=3)),
    ("estimate", "the name of a peer instead of its runtime",
     TypeError("runtime must be a Runtime, such as Runtime.fsdp2(), or None"),
     lambda: estimate(runtime="fsdp2")),
    ("auto_plan", "no profile", ValueError("profile must hold at least one Profile; found {}"),
     lambda: fs.auto_plan({}, ranks=2)),
    ("auto_plan", "units that the model does not have", ValueError("unit 'layers.*' matches no part of the tree"),
     lambda: fs.auto_plan(traced(), ranks=2, units=["layers.*"])),
    ("auto_plan", "options that the search chooses",
     ValueError("auto_plan chooses the options of units itself; found 'strategy': leave it out"),
     lambda: fs.auto_plan(traced(), ranks=2, units={"0": {"strategy": "no_shard"}})),
]  # fmt: skip
