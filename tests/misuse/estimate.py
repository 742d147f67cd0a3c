"""Mistakes with profiles, estimates and comparisons."""

import functools

import torch

import funcshard as fs
from funcshard.estimate import Space
from tests.misuse import APPLY, BUFFERS, DATA, NET, PARAMS, Table

CASES = Table(worlds=(1,))  # these programs do not communicate, so one world is enough
HALF = fs.MixedPrecision(param_dtype=torch.bfloat16)


def profile(*args, **options):
    return fs.profile(*(args or (APPLY, PARAMS, BUFFERS, DATA)), **options)


@functools.cache
def traced():
    return profile()


def estimate(mesh, given=None, *, precision=None, **options):
    return fs.estimate(given or traced(), fs.make_plan(PARAMS, mesh, precision=precision), **options)


# --- profile --------------------------------------------------------------------------------------

CASES += [
    ("profile", "a module instead of its function",
     TypeError("profile takes the apply that make_functional returned; found Sequential"),
     lambda mesh: profile(NET, PARAMS, BUFFERS, DATA)),
    ("profile", "targets without a loss",
     ValueError("found targets without loss: pass loss=, a function of the model's outputs and the targets"),
     lambda mesh: profile(targets=DATA)),
    ("profile", "the module instead of its params",
     TypeError("params must be a dictionary {name: tensor}; found Sequential"),
     lambda mesh: profile(APPLY, NET, BUFFERS, DATA)),
    ("profile", "no buffers", TypeError("buffers must be a dictionary {name: tensor}; found Tensor"),
     lambda mesh: profile(APPLY, PARAMS, DATA)),
    ("profile", "a loss of every sample", ValueError("the loss must be a scalar; found a tensor of shape"),
     lambda mesh: profile(loss=lambda out: out)),
    ("profile", "a loss as a number of Python", ValueError("must not read values of tensors, because a trace has none"),
     lambda mesh: profile(loss=lambda out: out.sum().item())),
    ("profile", "a loss that is a constant", ValueError("the loss does not depend on a trainable parameter"),
     lambda mesh: profile(loss=lambda out: out.detach().sum())),
    ("profile", "a dtype instead of a precision",
     TypeError("precision must be a MixedPrecision, a plan or None; found torch.bfloat16"),
     lambda mesh: profile(precision=torch.bfloat16)),
    ("profile", "a plan of another model as precision",
     ValueError("precision must be a plan of the same parameters; found a plan without '0.bias'"),
     lambda mesh: profile(precision=fs.make_plan({"w": torch.zeros(3)}, mesh))),
]  # fmt: skip

# --- estimate -------------------------------------------------------------------------------------

CASES += [
    ("estimate", "plan and profile swapped", TypeError("profile must be the Profile that fs.profile returned; found Plan"),
     lambda mesh: fs.estimate(fs.make_plan(PARAMS, mesh), traced())),
    ("estimate profile", "a plan of another precision than the profile",
     ValueError("was profiled in float32, but unit '(root)' of the plan computes in bfloat16"),
     lambda mesh: estimate(mesh, precision=HALF)),
    ("estimate", "a plan of another model", ValueError("the profile has no parameter 'w', which the plan has"),
     lambda mesh: fs.estimate(traced(), fs.make_plan({"w": torch.zeros(3)}, mesh))),
    ("estimate", "hardware that is not described", ValueError("hardware must be one of a100-40gb-8x200gbps"),
     lambda mesh: estimate(mesh, hardware="my-gpu")),
    ("estimate torch_optimizer", "an optimizer that trains instead of its name",
     TypeError("describe its memory with OptimizerMemory"),
     lambda mesh: estimate(mesh, optimizer=fs.torch_optimizer(torch.optim.AdamW, lr=0.1))),
    ("estimate", "a budget without a unit",
     ValueError("budget must be a number of bytes, or text such as '500MB' or '80GiB'; found '80'"),
     lambda mesh: estimate(mesh, budget="80")),
    ("estimate", "a number instead of a schedule",
     TypeError("schedule must be a Schedule or None; found 3: make it with make_schedule(plan)"),
     lambda mesh: estimate(mesh, schedule=3)),
    ("estimate", "one name of a unit instead of a list",
     TypeError("remat must be a list of names or globs of units, True or False; found '0': write ['0']"),
     lambda mesh: estimate(mesh, remat="0")),
    ("estimate", "a module that is no unit", ValueError("remat must name units of the plan, not the root; found '0'"),
     lambda mesh: estimate(mesh, remat=["0"])),
]  # fmt: skip

# --- auto_plan ------------------------------------------------------------------------------------

CASES += [
    ("auto_plan", "the function instead of its profile",
     TypeError("profile must be the Profile that fs.profile returned, a sequence of them"),
     lambda mesh: fs.auto_plan(APPLY, ranks=2)),
    ("auto_plan", "no profile", ValueError("profile must hold at least one Profile; found an empty dictionary"),
     lambda mesh: fs.auto_plan({}, ranks=2)),
    ("auto_plan", "no profile in a list", ValueError("profile must hold at least one Profile; found an empty sequence"),
     lambda mesh: fs.auto_plan([], ranks=2)),
    ("auto_plan", "units that the model does not have", ValueError("unit 'layers.*' matches no part of the tree"),
     lambda mesh: fs.auto_plan(traced(), ranks=2, units=["layers.*"])),
    ("auto_plan", "options that the search chooses",
     ValueError("auto_plan chooses the options of units itself; found 'strategy': leave it out"),
     lambda mesh: fs.auto_plan(traced(), ranks=2, units={"0": {"strategy": "no_shard"}})),
    ("auto_plan", "a list of meshes instead of a space", TypeError("space must be a Space, or None for the usual one"),
     lambda mesh: fs.auto_plan(traced(), ranks=2, space=[(1, 2)])),
    ("auto_plan", "the name of a peer instead of its runtime",
     TypeError("runtime must be a Runtime, such as Runtime.fsdp2(), or None"),
     lambda mesh: fs.auto_plan(traced(), ranks=2, runtime="fsdp2")),
    ("auto_plan", "other ranks than the meshes have", ValueError("meshes of the space must have 4 ranks"),
     lambda mesh: fs.auto_plan(traced(), ranks=4, space=Space(meshes=((1, 2),)))),
]  # fmt: skip

# --- compare --------------------------------------------------------------------------------------

CASES += [
    ("compare", "plans instead of reports", TypeError("before must be a Report that estimate returned; found Plan"),
     lambda mesh: fs.compare(fs.make_plan(PARAMS, mesh), fs.make_plan(PARAMS, mesh))),
    ("compare profile", "a profile instead of a report",
     TypeError("after must be a Report that estimate returned; found Profile"),
     lambda mesh: fs.compare(estimate(mesh), traced())),
]  # fmt: skip
