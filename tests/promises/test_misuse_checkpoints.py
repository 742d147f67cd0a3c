"""Mistakes with checkpoints, optimizer state by name, and changes of plan."""

import copy
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.checkpoint.path_lock import take
from tests.misuse import APPLY, BUFFERS, DESYNC, NET, PARAMS, Table, check, error, given, right, set_up, untold, values

CASES = Table()
MISTAKES = "docs/mistakes.md"
ORDER = "`replan` takes states in the order of ranks, and a shard does not say whose it is."
OTHER_MODEL = "the plan is of another model"
ADAMW = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
MOMENTUM = fs.torch_optimizer(torch.optim.SGD, lr=lambda step: 0.1, momentum=0.9)

FOLDER = Path(tempfile.gettempdir()) / f"funcshard misuse {os.getpid()}"
NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _folder():
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)


def new(mesh):
    """Return a path that is free, the same one on every rank."""
    number = float(next(NUMBERS)) if mesh.rank == 0 else 0.0
    return FOLDER / str(int(fs.psum(torch.tensor(number), mesh)))


def saved(s, state=None, **options):
    path = new(s.mesh)
    fs.save(path, s.shards if state is None else state, s.plan, s.mesh, **options)
    return path


def other_plan(s, **options):
    return fs.make_plan(PARAMS, s.mesh, **options)


def linear_plan(mesh):
    return fs.make_plan(fs.make_functional(nn.Linear(3, 3))[1], mesh)


# --- save, Saving ---------------------------------------------------------------------------------

CASES(
    "save",
    "shards cut by a plan of other units",
    error(ValueError, "pass the plan that cut them"),
    given(lambda s: fs.save(new(s.mesh), s.shards, other_plan(s), s.mesh)),
)
CASES(
    "save",
    "shards cut under another strategy",
    error(ValueError, "pass the plan that made it"),
    given(lambda s: fs.save(new(s.mesh), s.shards, set_up(s.mesh, "no_shard").plan, s.mesh)),
)
CASES(
    "save",
    "on one rank only",
    DESYNC,
    given(lambda s: (path := new(s.mesh)) and s.mesh.rank == 0 and fs.save(path, s.shards, s.plan, s.mesh)),
)
CASES(
    "save",
    "a path of each rank's own",
    error(ValueError, "path must be the same on every rank"),
    given(lambda s: fs.save(f"{new(s.mesh)}-{s.mesh.rank}", s.shards, s.plan, s.mesh)),
)
CASES(
    "save PerRank",
    "a rank's own number",
    error(ValueError, "mark a value of a rank's own with PerRank"),
    given(lambda s: saved(s, {"rank": s.mesh.rank})),
)
CASES(
    "save PerRank",
    "a rank's own tensor",
    error(ValueError, "mark a value of a rank's own with PerRank"),
    given(lambda s: saved(s, {"rank": torch.tensor(s.mesh.rank)})),
)
CASES(
    "save",
    "a module",
    error(TypeError, "found a Sequential: convert it, or leave it out"),
    given(lambda s: saved(s, {"net": NET})),
)
CASES(
    "save",
    "an optimizer",
    error(TypeError, "found a function: convert it, or leave it out"),
    given(lambda s: saved(s, {"optimizer": ADAMW})),
)
CASES(
    "save",
    "a folder of checkpoints as the path",
    error(ValueError, "choose another path"),
    given(lambda s: fs.save(saved(s).parent, s.shards, s.plan, s.mesh)),
)
CASES(
    "save",
    "a name that latest passes over",
    error(ValueError, "path must end in a name without a dot at its front"),
    given(lambda s: fs.save(new(s.mesh) / ".last", s.shards, s.plan, s.mesh)),
)
CASES(
    "save",
    "a list of shards outside of an optimizer's state",
    error(ValueError, "keep an optimizer's state as the opt_state of a TrainState"),
    given(lambda s: saved(s, {"mine": [shard for unit in s.shards.values() for shard in unit.values()]})),
)
CASES(
    "save",
    "a job saves to the path of another one that still lives",
    error(ValueError, "a checkpoint is already being saved to"),
    given(lambda s: two_jobs(s)),
)
CASES(
    "save restore",
    "full parameters",
    right(values),
    given(lambda s: fs.restore(saved(s, s.whole(s.shards)), s.plan, s.mesh)),
)
CASES(
    "Saving",
    "a path instead of the earlier save",
    error(TypeError, "after must be the Saving"),
    given(lambda s: saved(s, after="step-1")),
)
CASES(
    "Saving",
    "waited for on one rank only",
    DESYNC,
    given(
        lambda s: (
            (saving := fs.save(new(s.mesh), s.shards, s.plan, s.mesh, wait=False)) and s.mesh.rank == 0 and saving.wait()
        )
    ),
)


@CASES("Saving save", "the shards change while they are written", right(values))
def _(mesh):
    s, path = set_up(mesh), new(mesh)
    saving = fs.save(path, s.shards, s.plan, mesh, wait=False)
    for shard in s.shards.values():
        shard["float32"].zero_()
    saving.wait()
    return s.whole(fs.restore(path, s.plan, mesh))


# --- restore, Contents, latest --------------------------------------------------------------------

CASES(
    "restore",
    "the folder of checkpoints",
    error(ValueError, "it is a folder of checkpoints: name one of"),
    given(lambda s: fs.restore(saved(s).parent, s.plan, s.mesh)),
)
CASES(
    "restore",
    "a path where nothing is",
    error(FileNotFoundError, "there is no checkpoint at"),
    given(lambda s: fs.restore(FOLDER / "nothing", s.plan, s.mesh)),
)
CASES(
    "restore latest",
    "the latest of an empty folder",
    error(ValueError, "start from the beginning in that case"),
    given(lambda s: fs.restore(fs.latest(FOLDER / "nothing"), s.plan, s.mesh)),
)
CASES("restore", "a plan without a mesh", error(ValueError, "found no mesh"), given(lambda s: fs.restore(saved(s), s.plan)))
CASES(
    "restore",
    "the plan of another model",
    error(ValueError, OTHER_MODEL),
    given(lambda s: fs.restore(saved(s), linear_plan(s.mesh), s.mesh)),
)
CASES(
    "restore",
    "a plan of other units",
    right(values),
    given(lambda s: fs.gather(fs.restore(saved(s), other_plan(s), s.mesh), other_plan(s), s.mesh)),
)
CASES(
    "restore",
    "a plan for other ranks",
    error(ValueError, "the plan was made for a mesh of"),
    given(lambda s: fs.restore(saved(s), fs.make_plan(PARAMS, 3), s.mesh)),
)
CASES(
    "restore gather",
    "a model with one more layer",
    error(ValueError, "shards must hold the units of the plan", "must hold the buffers"),
    given(lambda s: fs.gather(fs.restore(saved(s), grown(s.mesh), s.mesh), grown(s.mesh), s.mesh)),
)
CASES(
    "restore gather",
    "a model of another dtype",
    error(ValueError, "in float32, and leaf '4.bias' is of float16 in the plan"),
    given(lambda s: fs.gather(fs.restore(saved(s), halved(s.mesh), s.mesh), halved(s.mesh), s.mesh)),
)
CASES(
    "restore",
    "a model with one layer less",
    error(ValueError, OTHER_MODEL),
    given(lambda s: fs.restore(saved(s), fs.make_plan({"0.weight": PARAMS["0.weight"]}, s.mesh), s.mesh)),
)
CASES(
    "Contents gather",
    "the description instead of the state",
    error(ValueError, "found Contents"),
    given(lambda s: s.whole(fs.restore(saved(s)))),
)
CASES("Contents", "a changed byte", error(ValueError, "restore another checkpoint"), given(lambda s: changed(s).check()))
CASES(
    "Contents PerRank",
    "values of a rank's own looked up",
    right({"step": 3}),
    given(lambda s: fs.restore(saved(s, {"step": 3, "own": fs.PerRank(s.mesh.rank)})).values),
)
CASES("latest", "a checkpoint itself", error(ValueError, "found a checkpoint itself"), given(lambda s: fs.latest(saved(s))))
CASES("latest", "a folder that does not exist", right(None), lambda mesh: fs.latest(FOLDER / "nothing"))
CASES(
    "latest save",
    "the larger number was saved before",
    untold("docs/names.md", "Return the complete checkpoint of a folder that was saved last.", "step-10"),
    given(lambda s: saved_last(s).name),
)


def grown(mesh):
    return fs.make_plan({**values(), "6.weight": torch.ones(4)}, mesh, units=["0", "2", "6.*"])


def halved(mesh):
    return fs.make_plan({name: leaf.half() for name, leaf in values().items()}, mesh, units=["0", "2"])


def changed(s):
    path = saved(s)
    if s.mesh.rank == 0:
        file = sorted(path.glob("*.distcp"))[0]
        data = bytearray(file.read_bytes())
        data[-300] ^= 1
        file.write_bytes(data)
    fs.psum(torch.ones(()), s.mesh)
    return fs.restore(path)


def two_jobs(s):
    path = new(s.mesh)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = take(path) if s.mesh.rank == 0 else None
    try:
        fs.save(path, s.shards, s.plan, s.mesh)
    finally:
        if lock is not None:
            lock.release()


def saved_last(s):
    folder = new(s.mesh)
    for number in (10, 9):
        fs.save(folder / f"step-{number}", s.shards, s.plan, s.mesh)
    return fs.latest(folder)


# --- PerRank, replan ------------------------------------------------------------------------------


def states(mesh, plan):
    """Return the states of all ranks of a world like ``mesh``."""
    return fs.simulate(lambda each: fs.shard(PARAMS, plan, each), mesh.shape)


def replanned(mesh, change=lambda states: states, old=None, new=None):
    plan = fs.make_plan(PARAMS, mesh, units=["0", "2"])
    one = fs.make_plan(PARAMS, 1) if new is None else new
    (state,) = fs.replan(change(states(mesh, plan)), plan if old is None else old, one)
    return fs.gather(state, one, fs.Mesh())


CASES(
    "PerRank",
    "used without its value",
    error(TypeError, "'PerRank' and 'int'"),
    given(lambda s: fs.restore(saved(s, fs.PerRank(1)), s.plan, s.mesh) + 1),
)
CASES(
    "PerRank",
    "on one rank only",
    error(ValueError, "the state must have the same structure on every rank"),
    given(lambda s: saved(s, {"own": fs.PerRank(1) if s.mesh.rank else 1})),
)
CASES(
    "PerRank gather",
    "shards under another plan",
    error(ValueError, "shards must hold the units of the plan"),
    given(
        lambda s: fs.gather(fs.restore(saved(s, fs.PerRank(s.shards)), other_plan(s), s.mesh).value, other_plan(s), s.mesh)
    ),
)
CASES(
    "replan",
    "the state of one rank",
    error(ValueError, "there must be one state per rank"),
    lambda mesh: replanned(mesh, lambda states: states[:1]),
)
CASES(
    "replan",
    "the plans swapped",
    error(ValueError, "there must be one state per rank"),
    lambda mesh: replanned(mesh, old=fs.make_plan(PARAMS, 1)),
)
CASES(
    "replan",
    "states of other units than the old plan's",
    error(ValueError, "pass the plan that cut them"),
    lambda mesh: replanned(mesh, old=fs.make_plan(PARAMS, mesh)),
)
CASES(
    "replan", "the plan of another model", error(ValueError, OTHER_MODEL), lambda mesh: replanned(mesh, new=linear_plan(1))
)
CASES(
    "replan",
    "states in another order",
    untold(MISTAKES, ORDER, values),
    lambda mesh: replanned(mesh, lambda states: states[::-1]),
)
CASES(
    "replan",
    "one rank's state for all",
    untold(MISTAKES, ORDER, values),
    lambda mesh: replanned(mesh, lambda states: states[:1] * len(states)),
)

# --- optimizer state by name ----------------------------------------------------------------------


def by_name(s, optimizer=ADAMW, given_to=None, plan=None, state=None, **options):
    """Return an optimizer's state by name after one step."""
    _, opt_state = optimizer.step(s.grads(), optimizer.init(s.shards), s.shards)
    opt_state = opt_state if state is None else state(opt_state)
    return fs.optimizer_to_state_dict(opt_state, given_to or optimizer, plan or s.plan, s.mesh, **options)


def loaded(s, state_dict, optimizer=ADAMW, **options):
    return fs.optimizer_from_state_dict(state_dict, optimizer, s.plan, s.mesh, **options)


CASES(
    "optimizer_to_state_dict",
    "a train state",
    error(TypeError, "pass state.opt_state"),
    given(lambda s: by_name(s, state=lambda opt_state: fs.TrainState(s.shards, BUFFERS, opt_state, 1))),
)
CASES(
    "optimizer_to_state_dict",
    "the class of the optimizer",
    error(TypeError, "must be a pair (init, update)"),
    given(lambda s: by_name(s, given_to=torch.optim.AdamW)),
)
CASES(
    "optimizer_to_state_dict",
    "a plan of other units",
    error(ValueError, "the plan that the state was made with"),
    given(lambda s: by_name(s, plan=other_plan(s))),
)
CASES(
    "optimizer_to_state_dict",
    "the plan of another strategy",
    error(ValueError, "the plan that the state was made with"),
    given(lambda s: by_name(s, plan=set_up(s.mesh, "no_shard").plan)),
)
CASES(
    "optimizer_from_state_dict",
    "torch's numbers instead of names",
    error(ValueError, "must name parameters; found numbers"),
    given(lambda s: loaded(s, {"state": {0: {"step": torch.ones(())}}, "param_groups": []})),
)
CASES(
    "optimizer_from_state_dict",
    "the model's state dict",
    error(ValueError, "must have 'state' and 'param_groups'"),
    given(lambda s: loaded(s, NET.state_dict())),
)
CASES(
    "optimizer_from_state_dict",
    "the state of the optimizer itself",
    error(ValueError, "must have 'state' and"),
    given(lambda s: loaded(s, ADAMW.init(s.shards))),
)
CASES(
    "optimizer_from_state_dict",
    "rank 0's dictionary, on the others",
    error(ValueError, "found an empty one", ranks=[1]),
    given(lambda s: loaded(s, by_name(s, rank0_only=True))),
)
CASES(
    "optimizer_from_state_dict",
    "a leaf without state",
    error(ValueError, "the state of every trainable leaf"),
    given(lambda s: (found := by_name(s))["state"].pop("0.bias") and loaded(s, found)),
)
CASES(
    "optimizer_from_state_dict",
    "state of a leaf that is frozen now",
    error(ValueError, "strict=False leaves it out"),
    given(lambda s: (found := by_name(s)) and loaded(s, {**found, "state": {**found["state"], "9.bias": {"step": 1}}})),
)
CASES(
    "optimizer_from_state_dict",
    "names of another model, with strict=False",
    error(ValueError, "the state of every trainable leaf"),
    given(lambda s: loaded(s, {"state": {"9.bias": {"step": 1}}, "param_groups": []}, strict=False)),
)
CASES(
    "optimizer_from_state_dict",
    "a thawed leaf beside others, without a group of its own",
    error(ValueError, "a group of its own"),
    given(lambda s: (found := by_name(s))["state"].pop("0.bias") and loaded(s, found, strict=False)),
)
CASES(
    "optimizer_from_state_dict",
    "the state of a rank that does not exist",
    error(ValueError, "src must be a rank of the world"),
    given(lambda s: loaded(s, by_name(s), src=9)),
)
CASES(
    "optimizer_from_state_dict",
    "another src on each rank",
    error(ValueError, "options of optimizer_from_state_dict must be the same"),
    given(lambda s: loaded(s, by_name(s), src=s.mesh.rank)),
)
CASES(
    "optimizer_from_state_dict",
    "a schedule, and no number of steps",
    error(ValueError, "pass steps="),
    given(lambda s: loaded(s, by_name(s, MOMENTUM), MOMENTUM)),
)
CASES(
    "optimizer_from_state_dict",
    "no state of any parameter",
    untold("docs/state.md", "Before the first step there is no state, as in `torch.optim`.", 1),
    given(lambda s: loaded(s, {"state": {}, "param_groups": []})["steps"]),
)

# --- safetensors ----------------------------------------------------------------------------------


def exported(s, **options):
    path = new(s.mesh)
    fs.export_safetensors(path, s.shards, s.plan, s.mesh, **options)
    return path


CASES(
    "export_safetensors",
    "on one rank only",
    DESYNC,
    given(lambda s: (path := new(s.mesh)) and s.mesh.rank == 0 and fs.export_safetensors(path, s.shards, s.plan, s.mesh)),
)
CASES(
    "export_safetensors",
    "full parameters",
    error(ValueError, "shards must hold the units of the plan"),
    given(lambda s: fs.export_safetensors(new(s.mesh), PARAMS, s.plan, s.mesh)),
)
CASES(
    "export_safetensors",
    "the shards before the path",
    error(TypeError, "path must be a path, as text or a pathlib.Path; found dict"),
    given(lambda s: fs.export_safetensors(s.shards, str(new(s.mesh)), s.plan, s.mesh)),
)
CASES(
    "export_safetensors",
    "the module's state dict as buffers",
    error(ValueError, "buffers must hold no parameter"),
    given(lambda s: exported(s, buffers=NET.state_dict())),
)
CASES(
    "export_safetensors",
    "a size in words",
    error(ValueError, "text such as '500MB'"),
    given(lambda s: exported(s, max_shard_size="5 gigs")),
)
CASES(
    "import_safetensors",
    "the files of another model",
    error(ValueError, "it is of another model"),
    given(lambda s: fs.import_safetensors(exported(s), linear_plan(s.mesh), s.mesh)),
)
CASES(
    "import_safetensors",
    "a checkpoint",
    error(FileNotFoundError, "save wrote this checkpoint: restore(path, plan, mesh) reads it"),
    given(lambda s: fs.import_safetensors(saved(s), s.plan, s.mesh)),
)
CASES(
    "import_safetensors",
    "a plan of another dtype",
    error(ValueError, "dtype float16, as planned"),
    given(lambda s: fs.import_safetensors(exported(s), halved(s.mesh), s.mesh)),
)


CASES(
    "import_dcp",
    "safetensors files",
    error(FileNotFoundError, "import_safetensors(path, plan, mesh) reads its parameters"),
    given(lambda s: fs.import_dcp(exported(s), s.plan, s.mesh)),
)
CASES(
    "import_dcp",
    "the checkpoint of another model",
    error(ValueError, "must hold every leaf of the plan"),
    given(lambda s: fs.import_dcp(saved(s), fs.make_plan({"x": PARAMS["0.weight"]}, s.mesh), s.mesh)),
)
CASES(
    "import_dcp",
    "a checkpoint with an average beside the parameters, without key",
    error(ValueError, "pass one of them as key"),
    given(lambda s: fs.import_dcp(saved(s, {"model": s.shards, "ema": s.shards}), s.plan, s.mesh)),
)
CASES(
    "import_dcp",
    "on one rank only",
    DESYNC,
    given(lambda s: (path := saved(s)) and s.mesh.rank == 0 and fs.import_dcp(path, s.plan, s.mesh)),
)


def on_meta():
    return copy.deepcopy(NET).to("meta")


CASES(
    "from_pretrained",
    "the name of a model of the hub",
    error(FileNotFoundError, "download a model of the hub first"),
    lambda mesh: fs.from_pretrained("openai-community/gpt2", mesh),
)
CASES(
    "from_pretrained",
    "a model that has values",
    error(ValueError, "must have all parameters on meta"),
    given(lambda s: fs.from_pretrained(exported(s), s.mesh, model=NET)),
)
CASES(
    "from_pretrained",
    "the plan of another model",
    error(ValueError, "the plan was made for another model"),
    given(lambda s: fs.from_pretrained(exported(s), s.mesh, model=on_meta(), plan=linear_plan(s.mesh))),
)
CASES(
    "from_pretrained",
    "a checkpoint",
    error(FileNotFoundError, "has no config.json: save wrote this checkpoint"),
    given(lambda s: fs.from_pretrained(saved(s), s.mesh)),
)
for name, words in {"torch_dtype": "did you mean 'dtype'?", "device_map": "its own are model, dtype"}.items():
    CASES(
        "from_pretrained",
        f"the option {name} of transformers",
        error(TypeError, f"from_pretrained has no option {name!r}: {words}"),
        lambda mesh, name=name: fs.from_pretrained("model", mesh, **{name: "auto"}),
    )
CASES(
    "from_pretrained",
    "an auto class",
    error(TypeError, "pass the model's own class, such as transformers.LlamaForCausalLM"),
    lambda mesh: fs.from_pretrained("model", mesh, model=type("AutoModel", (), {})),
)
CASES(
    "from_pretrained Pretrained",
    "on one rank only",
    DESYNC,
    given(lambda s: (path := exported(s)) and s.mesh.rank == 0 and fs.from_pretrained(path, s.mesh, model=on_meta())),
)
CASES(
    "Pretrained",
    "passed on as shards",
    error(ValueError, "shards must hold the units of the plan"),
    given(lambda s: fs.gather(fs.from_pretrained(exported(s), s.mesh, model=on_meta()), s.plan, s.mesh)),
)
CASES(
    "Pretrained",
    "taken for (apply, params, buffers)",
    error(ValueError, "too many values to unpack"),
    given(lambda s: [0 for _, _, _ in [fs.from_pretrained(exported(s), s.mesh, model=on_meta())]]),
)
CASES(
    "save_pretrained",
    "a model that is none of Hugging Face",
    error(TypeError, "export_safetensors writes the parameters of any module"),
    given(lambda s: fs.save_pretrained(new(s.mesh), APPLY, s.shards, s.plan, s.mesh)),
)
CASES(
    "save_pretrained",
    "the sharded function",
    error(TypeError, "found FullyShard"),
    given(lambda s: fs.save_pretrained(new(s.mesh), s.sharded, s.shards, s.plan, s.mesh)),
)
CASES(
    "save_pretrained",
    "without apply, as in export_safetensors",
    error(TypeError, "mesh"),
    given(lambda s: fs.save_pretrained(new(s.mesh), s.shards, s.plan, s.mesh)),
)


@CASES.parametrize()
def test_misuse(case):
    check(case)


# --- read_values ----------------------------------------------------------------------------------

CASES(
    "read_values",
    "a folder that nothing was saved to",
    error(FileNotFoundError, "step-7"),
    lambda mesh: fs.read_values("step-7"),
)
CASES(
    "read_values",
    "a number of a step",
    error(TypeError, "path"),
    lambda mesh: fs.read_values(7),
)
CASES(
    "read_values",
    "the description instead of the path",
    error(TypeError, "path"),
    given(lambda s: fs.read_values(fs.save(saved(s), s.shards, s.plan, s.mesh))),
)
