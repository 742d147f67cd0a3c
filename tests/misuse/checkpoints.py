"""Mistakes with checkpoints, optimizer state by name, and changes of plan."""

import copy
import itertools
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import funcshard as fs
from tests.misuse import APPLY, BUFFERS, DESYNC, EVERYWHERE, NET, PARAMS

ADAMW = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
W = torch.arange(3.0)
TIED, UNTIED = {"a": W, "b": W}, {"a": W, "b": W * 2}
MOMENTUM = fs.torch_optimizer(torch.optim.SGD, lr=lambda step: 0.1, momentum=0.9)
FOLDER = Path(tempfile.gettempdir()) / f"funcshard misuse {os.getpid()}"
NUMBERS = itertools.count()


def new(mesh):
    """Return a path that is free, the same one on every rank."""
    number = float(next(NUMBERS)) if mesh.rank == 0 else 0.0
    return FOLDER / str(int(fs.psum(torch.tensor(number), mesh)))


def saved(s, state=None, **options):
    path = new(s.mesh)
    fs.save(path, s.shards if state is None else state, s.plan, s.mesh, **options)
    return path


def exported_dcp(s, state=None):
    path = saved(s, state)
    if s.mesh.rank == 0:
        fs.export_dcp(path, f"{path}-dcp")
    fs.psum(torch.zeros(1), s.mesh)
    return f"{path}-dcp"


def linear_plan(mesh):
    return fs.make_plan(fs.make_functional(nn.Linear(3, 3))[1], mesh)


def equal_or_nan(mesh):
    plan = fs.make_plan(TIED, mesh)
    for value in (W, W * float("nan")):
        for load in (fs.shard, fs.from_state_dict):
            tied = fs.gather(load({"a": value, "b": value.clone()}, plan, mesh), plan, mesh)
            torch.testing.assert_close(tied["b"], value, equal_nan=True)


def by_name(s, optimizer=ADAMW, given_to=None, plan=None, state=None, **options):
    """Return an optimizer's state by name after one step."""
    _, opt_state = optimizer.step(s.grads(), optimizer.init(s.shards), s.shards)
    opt_state = opt_state if state is None else state(opt_state)
    return fs.optimizer_to_state_dict(opt_state, given_to or optimizer, plan or s.plan, s.mesh, **options)


def loaded(s, state_dict, optimizer=ADAMW, **options):
    return fs.optimizer_from_state_dict(state_dict, optimizer, s.plan, s.mesh, **options)


def exported(s, **options):
    path = new(s.mesh)
    fs.export_safetensors(path, s.shards, s.plan, s.mesh, **options)
    return path


def on_meta():
    return copy.deepcopy(NET).to("meta")


CASES = [
    ("save", "a path of each rank's own", ValueError("path must be the same on every rank"),
     lambda s: fs.save(f"{new(s.mesh)}-{s.mesh.rank}", s.shards, s.plan, s.mesh), EVERYWHERE),
    ("save PerRank", "PerRank in a tree of shards",
     TypeError("'float32' of the state is a PerRank inside a tree of shards,…put the PerRank beside the tree"),
     lambda s: saved(s, {u: {k: fs.PerRank(x) for k, x in v.items()} for u, v in s.shards.items()}), EVERYWHERE),
    ("Saving", "a path instead of the earlier save", TypeError("after must be the Saving"),
     lambda s: saved(s, after="step-1")),
    ("Saving", "waited for on one rank only", DESYNC,
     lambda s: ((saving := fs.save(new(s.mesh), s.shards, s.plan, s.mesh, wait=False)) and s.mesh.rank == 0 and
        saving.wait())),
    ("restore", "the folder of checkpoints", ValueError("it is a folder of checkpoints: name one of"),
     lambda s: fs.restore(saved(s).parent, s.plan, s.mesh)),
    ("restore latest", "the latest of an empty folder", ValueError("start from the beginning in that case"),
     lambda s: fs.restore(fs.latest(FOLDER / "nothing"), s.plan, s.mesh)),
    ("restore", "a checkpoint of other names", ValueError("leaf 'c' of the plan is not in checkpoint"),
     lambda s: fs.restore(saved(s), fs.make_plan({"c": W}, s.mesh), s.mesh), EVERYWHERE),
    ("restore", "a plan without a mesh", ValueError("found no mesh"), lambda s: fs.restore(saved(s), s.plan)),
    ("latest", "a checkpoint itself", ValueError("found a checkpoint itself"), lambda s: fs.latest(saved(s))),
    ("from_state_dict", "src and pieces", ValueError("src the state dict must hold full tensors,…leave src out"),
     lambda s: fs.from_state_dict(fs.to_state_dict(s.shards, s.plan, s.mesh, sharded=True), s.plan, s.mesh, src=0),
     EVERYWHERE),
    ("from_state_dict", "another file on each rank", ValueError("must have the same values on every rank"),
     lambda mesh: fs.from_state_dict({"w": W + mesh.rank}, fs.make_plan({"w": W}, mesh), mesh), EVERYWHERE),
    ("shard", "params no longer tied", ValueError("'a' and 'b' of params are one leaf under the plan,…tie them, or"),
     lambda mesh: fs.shard(UNTIED, fs.make_plan(TIED, mesh), mesh), EVERYWHERE),
    ("from_state_dict", "a state dict no longer tied", ValueError("'a' and 'b' of the state dict are one leaf…a new plan"),
     lambda mesh: fs.from_state_dict(UNTIED, fs.make_plan(TIED, mesh), mesh), EVERYWHERE),
    ("shard from_state_dict", "tied leaves of equal values, or both nan", None, equal_or_nan, EVERYWHERE),
    ("replan", "the state of one rank", ValueError("states must be a list with the state of each rank of the old plan"),
     lambda s: fs.replan([s.shards], s.plan, fs.make_plan(PARAMS, 1))),
    ("optimizer_to_state_dict", "a train state", TypeError("pass state.opt_state"),
     lambda s: by_name(s, state=lambda opt_state: fs.TrainState(s.shards, BUFFERS, opt_state, 1))),
    ("optimizer_to_state_dict", "the class of the optimizer", TypeError("must be a pair (init, update)"),
     lambda s: by_name(s, given_to=torch.optim.AdamW)),
    ("optimizer_to_state_dict", "a plan of other units", ValueError("the plan that it was made with"),
     lambda s: by_name(s, plan=fs.make_plan(PARAMS, s.mesh))),
    ("optimizer_from_state_dict", "torch's numbers instead of names", ValueError("must name parameters; found numbers"),
     lambda s: loaded(s, {"state": {0: {"step": torch.ones(())}}, "param_groups": []})),
    ("optimizer_from_state_dict", "the model's state dict", ValueError("must have 'state' and 'param_groups'"),
     lambda s: loaded(s, NET.state_dict())),
    ("optimizer_from_state_dict", "the state of a rank that does not exist", ValueError("src must be a rank of the world"),
     lambda s: loaded(s, by_name(s), src=9)),
    ("optimizer_from_state_dict", "another src on each rank",
     ValueError("options of optimizer_from_state_dict must be the same"), lambda s: loaded(s, by_name(s), src=s.mesh.rank),
     EVERYWHERE),
    ("optimizer_from_state_dict", "a schedule, and no number of steps", ValueError("pass steps="),
     lambda s: loaded(s, by_name(s, MOMENTUM), MOMENTUM)),
    ("export_safetensors", "full parameters", ValueError("shards must hold the units of the plan"),
     lambda s: fs.export_safetensors(new(s.mesh), PARAMS, s.plan, s.mesh)),
    ("export_safetensors", "the shards before the path",
     TypeError("path must be a path, as text or a pathlib.Path; found dict"),
     lambda s: fs.export_safetensors(s.shards, str(new(s.mesh)), s.plan, s.mesh)),
    ("export_safetensors", "the module's state dict as buffers", ValueError("buffers must hold no parameter"),
     lambda s: exported(s, buffers=NET.state_dict())),
    ("import_dcp", "the checkpoint of another model", ValueError("must hold every leaf of the plan"),
     lambda s: fs.import_dcp(exported_dcp(s), fs.make_plan({"x": PARAMS["0.weight"]}, s.mesh), s.mesh)),
    ("import_dcp", "a checkpoint with an average beside the parameters, without key", ValueError("pass one of them as key"),
     lambda s: fs.import_dcp(exported_dcp(s, {"model": s.shards, "ema": s.shards}), s.plan, s.mesh)),
    ("from_pretrained", "a model that has values", ValueError("must have all parameters on meta"),
     lambda s: fs.from_pretrained(exported(s), s.mesh, model=NET)),
    ("from_pretrained", "a plan, and options of another",
     TypeError("from_pretrained takes a plan or options of make_plan; found a plan and 'units'"),
     lambda s: fs.from_pretrained(exported(s), s.mesh, model=on_meta(), plan=s.plan, units=["0"])),
    ("from_pretrained", "a number of ranks", TypeError("mesh must be a Mesh, as from init_mesh(); found int"),
     lambda s: fs.from_pretrained(exported(s), 2, model=on_meta())),
    ("from_pretrained", "the plan of another model", ValueError("the plan was made for another model"),
     lambda s: fs.from_pretrained(exported(s), s.mesh, model=on_meta(), plan=linear_plan(s.mesh))),
    ("from_pretrained", "an auto class", TypeError("pass the model's own class, such as transformers.LlamaForCausalLM"),
     lambda mesh: fs.from_pretrained("model", mesh, model=type("AutoModel", (), {}))),
    ("save_pretrained", "a model that is none of Hugging Face",
     TypeError("export_safetensors writes the parameters of any module"),
     lambda s: fs.save_pretrained(new(s.mesh), APPLY, s.shards, s.plan, s.mesh)),
]  # fmt: skip
for name, words in {"torch_dtype": "did you mean 'dtype'?", "device_map": "its own are model, dtype"}.items():
    CASES += [
        ("from_pretrained", f"the option {name} of transformers",
         TypeError(f"from_pretrained has no option {name!r}: {words}"),
         lambda mesh, name=name: fs.from_pretrained("model", mesh, **{name: "auto"})),
    ]  # fmt: skip
