"""Mistakes with plans, schedules and policies."""

import dataclasses

import torch
from torch import nn

import funcshard as fs
from tests.misuse import APPLY, NET, PARAMS, Table, check, error, given, right, set_up, untold, values, whole_grads

CASES = Table()
MISTAKES = "docs/mistakes.md"
LINEARS = ["0", "2", "4"]


def plan(mesh, params=PARAMS, **options):
    return fs.make_plan(params, mesh, **options)


# --- make_plan ------------------------------------------------------------------------------------

CASES(
    "make_plan",
    "a module instead of its params",
    error(TypeError, "must be a torch.Tensor; found Sequential"),
    lambda mesh: plan(mesh, NET),
)
CASES(
    "make_plan",
    "mesh and params swapped",
    error(ValueError, "mesh must be a number of ranks"),
    lambda mesh: fs.make_plan(mesh, PARAMS),
)
CASES("make_plan", "one path instead of a list", error(TypeError, "write ['0']"), lambda mesh: plan(mesh, units="0"))
CASES(
    "make_plan",
    "the parameters of a module, as torch's optimizers take them",
    error(TypeError, "pass the params of make_functional(module), or a tree such as dict(module.named_parameters())"),
    lambda mesh: fs.make_plan(NET.parameters(), mesh),
)
CASES(
    "make_plan",
    "a policy that was not applied",
    error(TypeError, "apply a policy to the module"),
    lambda mesh: plan(mesh, units=fs.wrap.always()),
)
CASES(
    "make_plan",
    "classes instead of paths",
    error(TypeError, "pass units=fs.wrap.by_class(Linear)(module)"),
    lambda mesh: plan(mesh, units=[nn.Linear]),
)
CASES("make_plan", "globs that overlap", error(ValueError, "units overlap"), lambda mesh: plan(mesh, units=["0", "*"]))
CASES(
    "make_plan",
    "units that are freed after forward, to stay over micro-batches",
    error(ValueError, "reshard_after_backward=False keeps a unit gathered until the next micro-batch"),
    lambda mesh: plan(mesh, units=LINEARS, reshard_after_backward=False),
)
CASES(
    "make_plan",
    "copies to be freed after forward",
    error(ValueError, "leave it out, or choose 'full_shard'"),
    lambda mesh: plan(mesh, strategy="no_shard", reshard_after_forward=True),
)
CASES(
    "make_plan",
    "a number of ranks for reshard_after_backward",
    error(TypeError, "reshard_after_backward must be True or False"),
    lambda mesh: plan(mesh, strategy="shard_grad_op", reshard_after_backward=2),
)
CASES(
    "make_plan",
    "a glob of another model",
    error(ValueError, "matches no part of the tree"),
    lambda mesh: plan(mesh, units=["blocks.*"]),
)
CASES(
    "make_plan fully_shard",
    "a parameter as a unit",
    error(ValueError, "is no module of this model"),
    lambda mesh: fs.fully_shard(APPLY, plan(mesh, units=["0.weight"]), mesh),
)
CASES(
    "make_plan",
    "units in another order than the model's",
    right(whole_grads),
    lambda mesh: (s := set_up(mesh, units=["4", "2", "0"])).whole(s.grads()),
)
CASES(
    "make_plan",
    "two tensors called tied",
    error(ValueError, "several tensors there"),
    lambda mesh: plan(mesh, ties=[("0.weight", "2.weight")]),
)
CASES(
    "make_plan",
    "an axis that no mesh has",
    error(ValueError, "one or several axes of the mesh, ['replicate', 'shard']; found 'row'"),
    lambda mesh: plan(mesh, local={"0": "row"}),
)
CASES(
    "make_plan",
    "a device instead of offload",
    error(TypeError, "offload must be True or False"),
    lambda mesh: plan(mesh, offload="cpu"),
)
CASES(
    "make_plan",
    "offload where all is on the CPU",
    right(whole_grads),
    lambda mesh: (s := set_up(mesh, offload=True)).whole(s.grads()),
)
CASES(
    "make_plan",
    "torch's name of a strategy",
    error(ValueError, "did you mean 'full_shard'?"),
    lambda mesh: plan(mesh, strategy="FULL_SHARD"),
)
CASES(
    "make_plan",
    "a leaf local along an axis of one rank",
    error(ValueError, "leaf 'w' of params must have the same values on every rank"),
    worlds=(2, 4),
    program=lambda mesh: keeps_its_own(mesh, "replicate"),
)
CASES(
    "make_plan",
    "detached copies of frozen leaves, for a function by hand",
    untold(
        MISTAKES, "A detached copy of a frozen parameter does not say that it was frozen.", ["float32", "float32.frozen"]
    ),
    lambda mesh: [buffer.key for buffer in plan(mesh, detached(fs.make_functional(half_frozen())[1])).units[""].buffers],
)
CASES(
    "make_plan fully_shard",
    "detached copies of frozen leaves, for their module",
    error(UserWarning, "the plan trains every parameter, but 1 of them"),
    lambda mesh: fs.fully_shard((made := fs.make_functional(half_frozen()))[0], plan(mesh, detached(made[1])), mesh),
)


def keeps_its_own(mesh, axis):
    params = {"w": torch.ones(4) * mesh.rank}
    own = plan(mesh, params, local={"w": axis})
    return torch.equal(fs.gather(fs.shard(params, own, mesh), own, mesh)["w"], params["w"])


def half_frozen():
    net = nn.Linear(4, 4)
    net.bias.requires_grad_(False)
    return net


def detached(params):
    return {name: leaf.detach().clone() for name, leaf in params.items()}


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.outer.weight = self.inner.weight


CASES(
    "make_plan fully_shard",
    "copies of params, whose ties are lost",
    error(ValueError, "or ties=apply.ties"),
    lambda mesh: fs.fully_shard(
        (made := fs.make_functional(Tied()))[0], plan(mesh, detached(made[1]), units=["inner"]), mesh
    ),
)
CASES(
    "make_plan fully_shard",
    "a state dict with both names of a tie",
    error(ValueError, "has ['outer.weight'] besides"),
    lambda mesh: fs.fully_shard(fs.make_functional(Tied())[0], plan(mesh, detached(Tied().state_dict())), mesh),
)

# --- Plan -----------------------------------------------------------------------------------------

CASES(
    "Plan",
    "JSON of something else",
    error(ValueError, "expected JSON written by Plan.to_json"),
    lambda mesh: fs.Plan.from_json("{}"),
)
CASES("Plan", "the path of a file", error(ValueError, "read the file first"), lambda mesh: fs.Plan.from_json("plan.json"))
CASES(
    "Plan shard",
    "a stored plan for other ranks",
    error(ValueError, "the plan was made for a mesh of"),
    lambda mesh: fs.shard(PARAMS, fs.Plan.from_json(fs.make_plan(PARAMS, 3).to_json()), mesh),
)
CASES(
    "Plan",
    "another mesh put into a plan",
    error(ValueError, "was planned for mesh"),
    lambda mesh: dataclasses.replace(fs.make_plan(PARAMS, 8), mesh_shape=(1, 2)),
)
CASES(
    "Plan gather",
    "the plan in full precision for shards of the other",
    right(values),
    lambda mesh: fs.gather(
        (s := set_up(mesh, precision=fs.MixedPrecision(torch.bfloat16))).shards, s.plan.in_full_precision(), mesh
    ),
)

# --- MixedPrecision -------------------------------------------------------------------------------

CASES(
    "MixedPrecision make_plan",
    "a dtype instead of a precision",
    error(TypeError, "must be a funcshard.MixedPrecision"),
    lambda mesh: plan(mesh, precision=torch.bfloat16),
)
CASES(
    "MixedPrecision",
    "the name of a dtype",
    error(ValueError, "param_dtype must be a floating-point torch.dtype"),
    lambda mesh: fs.MixedPrecision("bfloat16"),
)
CASES(
    "MixedPrecision",
    "integers",
    error(ValueError, "param_dtype must be a floating-point torch.dtype"),
    lambda mesh: fs.MixedPrecision(torch.int8),
)
CASES(
    "MixedPrecision",
    "one class instead of a tuple",
    error(TypeError, "must be a tuple of module classes"),
    lambda mesh: fs.MixedPrecision(torch.bfloat16, ignored_classes=nn.LayerNorm),
)
CASES(
    "MixedPrecision",
    "the short name of a class",
    error(ValueError, "pass the class itself"),
    lambda mesh: fs.MixedPrecision(torch.bfloat16, ignored_classes=("LayerNorm",)),
)


@CASES("MixedPrecision", "integer leaves", right(("torch.bfloat16", "torch.int64")))
def _(mesh):
    params = {"w": torch.ones(4), "ids": torch.arange(4)}
    own = plan(mesh, params, precision=fs.MixedPrecision(torch.bfloat16))
    f = fs.unshard(lambda leaves: (str(leaves["w"].dtype), str(leaves["ids"].dtype)), own.units[""], mesh)
    return f(fs.shard(params, own, mesh)[""])


class Ids(nn.Module):
    """A model that gets ids as floating-point numbers, and returns them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids):
        return ids.long()


@CASES(
    "MixedPrecision fully_shard",
    "ids in a floating-point dtype",
    untold(MISTAKES, "Token ids in a floating-point dtype are cast as all such inputs are", torch.tensor([259])),
)
def _(mesh):
    apply, params, buffers = fs.make_functional(Ids())
    own = plan(mesh, params, precision=fs.MixedPrecision(torch.bfloat16))
    return fs.fully_shard(apply, own, mesh)(fs.shard(params, own, mesh), buffers, torch.tensor([259.0]))


# --- schedules and predictions --------------------------------------------------------------------

CASES(
    "make_schedule",
    "params instead of a plan",
    error(TypeError, "plan must be the Plan that make_plan returned"),
    lambda mesh: fs.make_schedule(PARAMS),
)
CASES(
    "make_schedule",
    "a unit that the plan lacks",
    error(ValueError, "the plan has no unit '1'"),
    given(lambda s: fs.make_schedule(s.plan, ["1"])),
)
CASES(
    "Schedule make_schedule",
    "torch's kind of prefetch",
    error(ValueError, "must be 'pre', 'post' or None"),
    given(lambda s: fs.make_schedule(s.plan, backward_prefetch="BACKWARD_PRE")),
)
CASES(
    "predict_events",
    "params instead of a plan",
    error(TypeError, "plan must be the Plan that make_plan returned"),
    lambda mesh: fs.predict_events(PARAMS),
)
CASES(
    "predict_events",
    "a unit that the plan lacks",
    error(ValueError, "the plan has no unit '9'"),
    given(lambda s: fs.predict_events(s.plan, ["9"])),
)
CASES(
    "predict_events Schedule",
    "the schedule of another plan",
    error(ValueError, "found '4'; the plan's units are"),
    given(lambda s: fs.predict_events(s.plan, fs.make_schedule(plan(s.mesh, units=["4"])))),
)

# --- policies -------------------------------------------------------------------------------------

CASES(
    "wrap.by_class",
    "no class",
    error(TypeError, "one or more subclasses of torch.nn.Module"),
    lambda mesh: fs.wrap.by_class(),
)
CASES(
    "wrap.by_class",
    "a list of classes",
    error(TypeError, "one or more subclasses of torch.nn.Module"),
    lambda mesh: fs.wrap.by_class([nn.Linear]),
)
CASES(
    "wrap.by_class",
    "a class that the model lacks",
    error(ValueError, "the model is made of Linear"),
    lambda mesh: fs.wrap.by_class(nn.Conv2d)(NET),
)
CASES(
    "wrap.by_class",
    "params instead of a module",
    error(TypeError, "write policy(module)"),
    lambda mesh: fs.wrap.by_class(nn.Linear)(PARAMS),
)
CASES(
    "wrap.by_class",
    "applied to another module",
    error(ValueError, "unit '1' matches no part of the tree"),
    lambda mesh: plan(mesh, units=fs.wrap.by_class(nn.Linear)(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))),
)
CASES(
    "wrap.by_size",
    "params instead of a module",
    error(TypeError, "write policy(module)"),
    lambda mesh: fs.wrap.by_size(8)(PARAMS),
)
CASES(
    "wrap.by_size",
    "no module is so large",
    right(whole_grads),
    lambda mesh: (s := set_up(mesh, units=fs.wrap.by_size(10**9)(NET))).whole(s.grads()),
)
CASES(
    "wrap.by_size",
    "a class that would be a unit is excluded",
    right(["0", "2"]),
    lambda mesh: [*fs.wrap.by_size(6, exclude=(nn.ModuleList,))(NET)],
)
CASES(
    "wrap.by_function",
    "an option that no unit has",
    error(ValueError, "a unit can override 'strategy'"),
    lambda mesh: plan(mesh, units=fs.wrap.by_function(lambda module: {"sharding": "no_shard"})(NET)),
)
CASES(
    "wrap.by_function", "a function of names", right([]), lambda mesh: [*fs.wrap.by_function(lambda name: name == "0")(NET)]
)
CASES(
    "wrap.by_function wrap.Units",
    "overrides lost in a plain list",
    untold(MISTAKES, "keeps the paths and loses the overrides.", ["no_shard"] * 3),
    lambda mesh: [unit.strategy for unit in plan(mesh, units=[*not_sharded()]).unit_list],
)
CASES(
    "wrap.Units",
    "a group added to the units of a policy",
    right({"0": "no_shard", "4": "no_shard", "1+2": "full_shard"}),
    lambda mesh: {
        name: unit.strategy
        for name, unit in fs.make_plan({str(i): torch.ones(3) for i in range(5)}, mesh, units=grouped()).units.items()
        if name
    },
)
CASES(
    "make_plan",
    "the result of a policy as one unit of a list",
    error(TypeError, "units hold the result of a policy"),
    lambda mesh: plan(mesh, units=[not_sharded(), "2"]),
)
CASES(
    "make_plan",
    "a group of paths inside each other",
    error(ValueError, "leave the inner path out"),
    lambda mesh: plan(mesh, units=[["0", "0.weight"]]),
)
CASES(
    "make_plan",
    "a unit that is in a group too",
    error(ValueError, "units overlap"),
    lambda mesh: plan(mesh, units=["0", ["0", "2"]]),
)
CASES(
    "make_plan",
    "ranks after forward that divide no row",
    error(ValueError, "divides the"),
    lambda mesh: plan(mesh, reshard_after_forward=5),
)
CASES(
    "make_plan",
    "ranks after forward as a text",
    error(TypeError, "reshard_after_forward must be a whole number of ranks"),
    lambda mesh: plan(mesh, reshard_after_forward="2"),
)
CASES(
    "make_plan",
    "one rank after forward",
    right([False]),
    lambda mesh: [unit.reshard_after_forward for unit in plan(mesh, reshard_after_forward=1).unit_list][:1],
)
CASES(
    "make_plan",
    "a strategy in the place of options",
    error(TypeError, "must be a dictionary"),
    lambda mesh: plan(mesh, units={"0": "no_shard"}),
)
CASES(
    "wrap.Units",
    "a unit removed, its overrides left",
    error(ValueError, "remove the entry from units.overrides too"),
    lambda mesh: (units := not_sharded()).remove("2") or plan(mesh, units=units),
)
CASES(
    "wrap.Units",
    "overrides of a unit that is not chosen",
    error(ValueError, "units override options of '2'"),
    lambda mesh: plan(mesh, units=fs.wrap.Units(["0"], {"2": {"offload": True}})),
)
CASES(
    "wrap.always",
    "params instead of a module",
    error(TypeError, "write policy(module)"),
    lambda mesh: fs.wrap.always()(PARAMS),
)
CASES(
    "wrap.always",
    "the module given at once",
    error(TypeError, "takes 0 positional arguments"),
    lambda mesh: fs.wrap.always(NET),
)
CASES(
    "wrap.always",
    "containers without a forward",
    right(["0.0"]),
    lambda mesh: [*fs.wrap.always()(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))],
)
CASES(
    "wrap.any_of",
    "a list of policies",
    error(TypeError, "any_of(*policies)"),
    lambda mesh: fs.wrap.any_of([fs.wrap.always()]),
)
CASES(
    "wrap.any_of wrap.Policy",
    "units instead of policies",
    error(TypeError, "any_of takes policies"),
    lambda mesh: fs.wrap.any_of(["0"], ["2"]),
)
CASES(
    "wrap.any_of wrap.Policy",
    "a policy that returns a plain list",
    right(LINEARS),
    lambda mesh: [*fs.wrap.any_of(lambda module: ["0"], fs.wrap.always())(NET)],
)


def grouped():
    return fs.wrap.Units(["0", "4"], {"0": {"strategy": "no_shard"}, "4": {"strategy": "no_shard"}}) + [["1", "2"]]  # noqa: RUF005


def not_sharded():
    return fs.wrap.by_function(lambda module: {"strategy": "no_shard"})(NET)


STACKS = {"blocks": {"w": torch.ones(3, 2, 2), "b": torch.ones(3, 2)}, "head": torch.ones(2, 2)}
LAYERS = fs.unstack(STACKS, "blocks")

CASES(
    "unstack",
    "the whole model",
    error(ValueError, "pass the path of the stacked layers alone"),
    lambda mesh: fs.unstack(STACKS, ""),
)
CASES(
    "unstack",
    "a glob of its leaves",
    error(ValueError, "found no node 'blocks.*'"),
    lambda mesh: fs.unstack(STACKS, "blocks.*"),
)
CASES(
    "unstack",
    "the layers are cut by the plan of the stack",
    error(ValueError, "params must be the tree that the plan was made for"),
    lambda mesh: fs.shard(LAYERS, fs.make_plan(STACKS, mesh), mesh),
)
CASES(
    "stack",
    "shards",
    error(ValueError, "found no node 'blocks'"),
    lambda mesh: fs.stack(fs.shard(LAYERS, fs.make_plan(LAYERS, mesh, units=["blocks.*"]), mesh), "blocks"),
)
CASES(
    "stack",
    "a stack",
    error(ValueError, "takes the path of a list of layers"),
    lambda mesh: fs.stack(STACKS, "blocks"),
)
CASES(
    "stack",
    "layers of two kinds",
    error(ValueError, "stack equal layers alone"),
    lambda mesh: fs.stack({"blocks": [*LAYERS["blocks"], {"w": torch.ones(2, 3), "b": torch.ones(2)}]}, "blocks"),
)


@CASES.parametrize()
def test_misuse(case):
    check(case)
